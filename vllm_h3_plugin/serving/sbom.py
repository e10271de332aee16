# SPDX-License-Identifier: Apache-2.0
"""Software bill of materials of this Python environment: CycloneDX 1.6 JSON from package metadata.

Written here and not by a library, because the image gets no package that only its build needs. The document is the same
for the same environment: no random serial number, and its time is ``SOURCE_DATE_EPOCH``'s.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from typing import Any

from vllm_h3_plugin import __version__
from vllm_h3_plugin.serving.provenance import record_digest, wheel_digest

NAME = "vllm-h3-plugin"


def purl(name: str, version: str) -> str:
    """Package URL of a PyPI package: name normalised, ``+`` of a local version percent-encoded (purl-spec, pypi)."""
    return f"pkg:pypi/{_normal(name)}@{version.replace('+', '%2B')}"


@dataclass(frozen=True, slots=True)
class _Package:
    """What the document tells of a package; its metadata is parsed once, which is most of the work."""

    name: str
    version: str
    license: str | None
    needs: frozenset[str]
    wheel_sha256: str | None
    record_sha256: str | None

    @property
    def purl(self) -> str:
        return purl(self.name, self.version)


def sbom(epoch: int | None, found: Iterable[Distribution] | None = None) -> dict[str, Any]:
    """The document.

    Args:
        epoch: seconds since 1970 for its time stamp; None leaves the time out.
        found: packages; by default all of this environment.
    """
    packages: dict[str, _Package] = {}
    for each in distributions() if found is None else found:
        package = _read(each)
        # The first on the path is the one that is imported.
        packages.setdefault(_normal(package.name), package)
    metadata: dict[str, Any] = {
        "component": {
            "type": "application",
            "bom-ref": purl(NAME, __version__),
            "name": NAME,
            "version": __version__,
            "purl": purl(NAME, __version__),
            "licenses": [{"license": {"id": "Apache-2.0"}}],
        }
    }
    if epoch is not None:
        metadata["timestamp"] = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ordered = [packages[name] for name in sorted(packages)]
    body = {
        "metadata": metadata,
        "components": [_component(package) for package in ordered if _normal(package.name) != NAME],
        "dependencies": [
            {
                "ref": package.purl,
                "dependsOn": sorted(packages[name].purl for name in package.needs if name in packages),
            }
            for package in ordered
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        **body,
    }


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _read(package: Distribution) -> _Package:
    metadata = package.metadata
    wanted = [text for text in metadata.get_all("Requires-Dist") or [] if "extra ==" not in text]
    names = (re.match(r"[A-Za-z0-9._-]+", text) for text in wanted)
    return _Package(
        name=metadata["Name"],
        version=metadata["Version"],
        license=next(iter(metadata.get_all("License-Expression") or []), None),
        needs=frozenset(_normal(found[0]) for found in names if found),
        wheel_sha256=wheel_digest(package),
        record_sha256=record_digest(package),
    )


def _component(package: _Package) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "purl": package.purl,
    }
    if package.license:
        component["licenses"] = [{"expression": package.license}]
    if package.wheel_sha256:
        component["hashes"] = [{"alg": "SHA-256", "content": package.wheel_sha256}]
    if package.record_sha256:
        component["properties"] = [{"name": "vllm-h3:record-sha256", "value": package.record_sha256}]
    return component
