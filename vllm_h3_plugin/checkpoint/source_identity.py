# SPDX-License-Identifier: Apache-2.0
"""Tell whether a checkpoint is the one that something was made from, without reading it.

Importing this module does not import torch.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from vllm_h3_plugin.checkpoint.inventory import Inventory, PartInventory
from vllm_h3_plugin.checkpoint.page_cache import drop_range
from vllm_h3_plugin.checkpoint.safetensors_header import ShardFile
from vllm_h3_plugin.errors import CheckpointError

_SAMPLES = 64
_SAMPLE_BYTES = 4096
# Samples are single random reads: what counts is how many the disk is given at a time.
_THREADS = 8

_INDEX = "model_index.json"
_CONFIG = "config.json"


def source_identity(inventory: Inventory) -> str:
    """Identity of a checkpoint's files: 64 hex digits (BLAKE3).

    It covers, for each weight file of each part: its path below the partition's folder, size, time of change, header,
    and 64 evenly spaced samples of 4 KiB, the first and the last of the file included; and what shapes the model: each
    part's ``config.json`` and each partition's ``model_index.json``. It is the same whether the partition's folder or
    the root above it was named, and wherever the checkpoint lies. It takes well under a second on a local disk and
    leaves no pages in the cache.

    It misses a change that keeps a file's size, its time of change and all samples, 0.005 % of a 5 GB shard.
    ``vllm-h3 checksums`` closes that gap: it writes SHA-256 of whole files, against which ``H3_VERIFY_CHECKSUMS`` holds
    each shard while it is read.

    Args:
        inventory: of the partitions in use, without faults.

    Raises:
        CheckpointError: a file is not the one that the inventory saw, or cannot be read.
    """
    hasher = blake3()
    for partition in inventory.partitions:
        _feed(hasher, partition.name.encode(), _optional(partition.path / _INDEX))
        for part in partition.parts:
            _feed(hasher, part.name.encode(), part_identity(part).encode())
    return hasher.hexdigest()


def part_identity(part: PartInventory) -> str:
    """The same for one part, its ``config.json`` included: 64 hex digits.

    Raises:
        CheckpointError: as :func:`source_identity`.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="h3-identity") as pool:
        files = list(pool.map(_file_identity, part.files))
    hasher = blake3()
    _feed(hasher, _optional(part.path / _CONFIG))
    for file, identity in zip(part.files, files, strict=True):
        _feed(hasher, str(file.path.relative_to(part.path)).encode(), identity)
    return hasher.hexdigest()


def _file_identity(file: ShardFile) -> bytes:
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            stat = os.fstat(descriptor)
            if (stat.st_size, stat.st_mtime_ns) != (file.size, file.mtime_ns):
                raise CheckpointError(
                    f"{file.path} changed while the checkpoint was in use",
                    why=f"it had {file.size} bytes when it was checked and has {stat.st_size} now, or was written to",
                    fix="Let the download or copy finish, then start again.",
                    path=str(file.path),
                )
            # Without it, each sample would pull its neighbourhood into the page cache.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            hasher = blake3()
            _feed(hasher, struct.pack("<Qq", file.size, file.mtime_ns), *_samples(descriptor, file.size))
            return hasher.digest()
        finally:
            os.close(descriptor)
    except OSError as exc:
        raise _unreadable(file.path, exc) from exc


def file_samples(file: ShardFile) -> tuple[bytes, ...]:
    """A file's header and the samples that its identity is made of, without its time of change.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return tuple(_samples(descriptor, file.size))
        finally:
            os.close(descriptor)
    except OSError as exc:
        raise _unreadable(file.path, exc) from exc


def _samples(descriptor: int, size: int) -> Iterable[bytes]:
    (length,) = struct.unpack("<Q", _read(descriptor, 0, 8))
    yield _read(descriptor, 8, length)
    last = max(0, size - _SAMPLE_BYTES)
    for offset in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
        yield _read(descriptor, offset, _SAMPLE_BYTES)


def _read(descriptor: int, offset: int, size: int) -> bytes:
    data = os.pread(descriptor, size, offset)
    end = -(-(offset + len(data)) // mmap.PAGESIZE) * mmap.PAGESIZE
    drop_range(descriptor, offset, end)
    return data


def _optional(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as exc:
        raise _unreadable(path, exc) from exc


def _feed(hasher: blake3, *fields: bytes) -> None:
    """Each field with its length, so that no two lists of fields look alike."""
    for field in fields:
        hasher.update(struct.pack("<Q", len(field)))
        hasher.update(field)


def _unreadable(path: Path, exc: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read",
        why=exc.strerror or str(exc),
        fix="Check the disk and the file's permissions.",
        path=str(path),
    )
