# SPDX-License-Identifier: Apache-2.0
"""Read and check the header of one safetensors file; the weights behind it are not touched.

Format (safetensors 0.8 README): 8 bytes little-endian header length, a JSON object {name: {dtype, shape,
data_offsets}}, then the data, which the offsets must cover without gap or overlap.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_h3_plugin.checkpoint.faults import DOWNLOAD_AGAIN, FaultLog
from vllm_h3_plugin.checkpoint.json_file import LFS_FIX, LFS_PREFIX, LFS_WHY, missing_reason
from vllm_h3_plugin.checkpoint.layout import DTYPE_BYTES

# The safetensors library refuses larger headers, so a larger number is no header length.
_MAX_HEADER = 100_000_000
_READ_ACCESS = "Give the user that runs this read access to it, and check the disk."


@dataclass(frozen=True)
class TensorRecord:
    """Where one tensor lies on disk.

    Attributes:
        dtype: as safetensors spells it (``BF16``, ``F32``).
        file: the shard.
        offset: of its first byte from the start of the file.
        nbytes: its size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardFile:
    """One weight file as it was when its header was read; tensors in the order of their bytes.

    Attributes:
        metadata: what its writer said of it, text by text.
    """

    path: Path
    size: int
    mtime_ns: int
    tensors: tuple[TensorRecord, ...]
    metadata: Mapping[str, str] = field(default_factory=dict, compare=False)


def read_header(path: Path, log: FaultLog) -> ShardFile | None:
    """Header of a shard; None, and a fault, if the file cannot be what it claims."""
    if not path.is_file():
        log.add("shard_missing", path, why=missing_reason(path), fix="Download this file.")
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            stat = os.fstat(descriptor)
            start = os.pread(descriptor, max(8, len(LFS_PREFIX)), 0)
            if not _plausible(path, start, stat.st_size, log):
                return None
            (length,) = struct.unpack("<Q", start[:8])
            raw = os.pread(descriptor, length, 8)
        finally:
            os.close(descriptor)
    except OSError as exc:
        log.add("unreadable", path, why=exc.strerror or str(exc), fix=_READ_ACCESS)
        return None
    parsed = _parse(path, raw, 8 + length, log)
    if parsed is None or not _covers(path, parsed[0], 8 + length, stat.st_size, log):
        return None
    return ShardFile(path, stat.st_size, stat.st_mtime_ns, tuple(parsed[0]), parsed[1])


def _plausible(path: Path, start: bytes, size: int, log: FaultLog) -> bool:
    if start.startswith(LFS_PREFIX):
        log.add("lfs_pointer", path, why=LFS_WHY, fix=LFS_FIX)
        return False
    if size < 8:
        why = "the file is empty" if size == 0 else f"{size} bytes are less than the header's length field"
        log.add("shard_truncated", path, why=why)
        return False
    if start.lstrip()[:5].lower() in (b"<!doc", b"<html", b"<?xml"):
        log.add("not_safetensors", path, why="it is a web page, so the download had answered with an error")
        return False
    (length,) = struct.unpack("<Q", start[:8])
    if length > _MAX_HEADER:
        why = f"its first 8 bytes give a header of {length} bytes, which no safetensors file has"
        log.add("not_safetensors", path, why=why)
        return False
    if length > size - 8:
        why = f"its header should be {length} bytes long and the file has only {size - 8} after the length field"
        log.add("header_beyond_file", path, why=why)
        return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} stands in it twice")
    return dict(pairs)


def _parse(path: Path, raw: bytes, data_start: int, log: FaultLog) -> tuple[list[TensorRecord], dict[str, str]] | None:
    try:
        entries = json.loads(raw, object_pairs_hook=_unique)
        if not isinstance(entries, dict):
            raise ValueError(f"it is a {type(entries).__name__}, not an object")
    except ValueError as exc:
        log.add("header_malformed", path, why=f"its header is not what safetensors writes ({exc})")
        return None
    metadata = entries.pop("__metadata__", None)
    said = {str(key): str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {}
    records = []
    for name, entry in entries.items():
        try:
            records.append(_record(path, name, entry, data_start))
        except (ValueError, KeyError, TypeError) as exc:
            log.add("header_malformed", path, f"tensor {name}", why=f"its header entry cannot be right ({exc})")
            return None
    return sorted(records, key=lambda record: (record.offset, record.nbytes)), said


def _record(path: Path, name: str, entry: dict[str, Any], data_start: int) -> TensorRecord:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}")
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"shape {shape} and offsets {[begin, end]} must be whole numbers from 0")
    if math.prod(shape) * DTYPE_BYTES[dtype] != end - begin:
        raise ValueError(f"{dtype} {shape} is not {end - begin} bytes")
    return TensorRecord(name, dtype, tuple(shape), path, data_start + begin, end - begin)


def _covers(path: Path, records: list[TensorRecord], data_start: int, size: int, log: FaultLog) -> bool:
    position = data_start
    for record in records:
        if record.offset != position:
            kind = "overlaps the tensor before it" if record.offset < position else "leaves a gap before it"
            log.add(
                "offsets",
                path,
                f"tensor {record.name}",
                why=f"it starts at byte {record.offset} where {position} is due: it {kind}",
            )
            return False
        position += record.nbytes
    if size < position:
        why = f"{position - size} of {position} bytes are missing at its end"
        log.add("shard_truncated", path, why=why, fix=f"The download was cut off. {DOWNLOAD_AGAIN}")
    elif size > position:
        log.add("shard_too_long", path, why=f"it has {size - position} bytes more than its header describes")
    return size == position
