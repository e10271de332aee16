# SPDX-License-Identifier: Apache-2.0
"""Whether two requests are the same request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from vllm_h3_plugin.serving.rules.read import Upload

_CHUNK_BYTES = 1 << 20


def fingerprint(fields: Iterable[tuple[str, Any]]) -> str:
    """SHA-256 of a request's fields and files; equal whatever the order of the names. It reads the files.

    Args:
        fields: as for :func:`.read.read`. Values of one name keep their order, which is that of references.
    """
    places: dict[str, int] = {}
    digests = []
    for name, value in fields:
        place = places[name] = places.get(name, -1) + 1
        digest = hashlib.sha256(json.dumps([name, place, _shape(value)], sort_keys=True).encode())
        if isinstance(value, Upload):
            value.file.seek(0)
            while chunk := value.file.read(_CHUNK_BYTES):
                digest.update(chunk)
            value.file.seek(0)
        digests.append(digest.digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def _shape(value: Any) -> Any:
    """What JSON can hold of a value; a file's name is no part of what it asks for."""
    return "file" if isinstance(value, Upload) else ["value", value]
