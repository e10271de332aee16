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
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from typing import Any

from vllm_h3_plugin import __version__
from vllm_h3_plugin.serving.provenance import record_digest, wheel_digest

NAME = "vllm-h3-plugin"


def purl(name: str, version: str) -> str:
    """Package URL of a PyPI package: name normalised, ``+`` of a local version percent-encoded (purl-spec, pypi)."""
    return f"pkg:pypi/{_normal(name)}@{version.replace('+', '%2B')}"


def sbom(epoch: int | None, found: Iterable[Distribution] | None = None) -> dict[str, Any]:
    """The document.

    Args:
        epoch: seconds since 1970 for its time stamp; None leaves the time out.
        found: packages; by default all of this environment.
    """
    packages: dict[str, Distribution] = {}
    for package in distributions() if found is None else found:
        # The first on the path is the one that is imported.
        packages.setdefault(_normal(package.metadata["Name"]), package)
    components = [_component(packages[name]) for name in sorted(packages) if name != NAME]
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
    dependencies = [
        {
            "ref": purl(package.metadata["Name"], package.version),
            "dependsOn": sorted(
                purl(packages[name].metadata["Name"], packages[name].version)
                for name in {_required(text) for text in package.requires or [] if "extra ==" not in text}
                if name in packages
            ),
        }
        for _, package in sorted(packages.items())
    ]
    body = {"metadata": metadata, "components": components, "dependencies": dependencies}
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


def _required(text: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", text)
    return _normal(found[0]) if found else ""


def _component(package: Distribution) -> dict[str, Any]:
    name, version = package.metadata["Name"], package.version
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl(name, version),
        "name": name,
        "version": version,
        "purl": purl(name, version),
    }
    if license_text := package.metadata.get("License-Expression"):
        component["licenses"] = [{"expression": license_text}]
    if digest := wheel_digest(package):
        component["hashes"] = [{"alg": "SHA-256", "content": digest}]
    if record := record_digest(package):
        component["properties"] = [{"name": "vllm-h3:record-sha256", "value": record}]
    return component
