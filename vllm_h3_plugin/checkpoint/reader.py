# SPDX-License-Identifier: Apache-2.0
"""Read one part's weights in file order, without leaving them in the page cache.

A file that is mapped, or read and left in the cache, competes with the model for unified memory. So each tensor is
read with ``preadv`` into ordinary memory and its pages are dropped behind it with ``posix_fadvise(DONTNEED)``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from vllm_h3_plugin.checkpoint.faults import DOWNLOAD_AGAIN
from vllm_h3_plugin.checkpoint.inventory import PartInventory
from vllm_h3_plugin.checkpoint.safetensors_header import ShardFile, TensorRecord
from vllm_h3_plugin.errors import CheckpointError

# safetensors dtype -> torch dtype.
TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}

# Bytes read, and then dropped from the page cache, at a time.
_BLOCK = 32 << 20

Progress = Callable[[int, int], None]


class WeightSource:
    """Iterates ``(name, tensor)`` of one part: shard by shard, by offset, tensors on the CPU.

    Args:
        part: from an inventory without faults. Tensors that the host drops are skipped unread.
        reuse: None: every tensor has memory of its own and is the caller's for good. A number N ≥ 1: tensors are read
            into N buffers in turn; one is valid only until N more have been taken, so the caller must have copied or
            consumed it by then. The host's online quantization holds on to the tensors of an unfinished layer:
            it needs None.
        wanted: names to read; others are skipped unread.
        progress: called after each block with (bytes read, bytes in all).

    Each iteration reads the files anew. Raises from the iteration:
        CheckpointError: a file is not the one that the inventory saw, cannot be read, or ends early; the message
            names path and offset.
    """

    def __init__(
        self,
        part: PartInventory,
        *,
        reuse: int | None = None,
        wanted: Callable[[str], bool] = lambda name: True,
        progress: Progress = lambda done, total: None,
    ) -> None:
        if reuse is not None and reuse < 1:
            raise AssertionError(f"reuse={reuse}: at least one buffer is needed")
        self._plan = [
            (file, [record for record in file.tensors if record.name not in part.ignored and wanted(record.name)])
            for file in part.files
        ]
        self._slots: list[torch.Tensor] | None = None
        if reuse is not None:
            self._slots = [torch.empty(0, dtype=torch.uint8) for _ in range(reuse)]
        self._progress = progress
        self.total_bytes = sum(record.nbytes for _, records in self._plan for record in records)
        """Bytes that an iteration reads."""

    def __len__(self) -> int:
        """Number of tensors that an iteration yields."""
        return sum(len(records) for _, records in self._plan)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        done = taken = 0
        for file, records in self._plan:
            if not records:
                continue
            descriptor = _open(file)
            try:
                for record in records:
                    buffer = self._buffer(record.nbytes, taken)
                    for size in _read(descriptor, record, buffer):
                        done += size
                        self._progress(done, self.total_bytes)
                    taken += 1
                    yield record.name, buffer.view(TORCH_DTYPES[record.dtype]).view(record.shape)
                _check_unchanged(descriptor, file)
            finally:
                os.close(descriptor)

    def _buffer(self, nbytes: int, taken: int) -> torch.Tensor:
        if self._slots is None:
            return torch.empty(nbytes, dtype=torch.uint8)
        slot = taken % len(self._slots)
        if self._slots[slot].numel() < nbytes:
            self._slots[slot] = torch.empty(nbytes, dtype=torch.uint8)
        return self._slots[slot][:nbytes]


def _open(file: ShardFile) -> int:
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise _unreadable(file.path, 0, exc) from exc
    try:
        _check_unchanged(descriptor, file)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_unchanged(descriptor: int, file: ShardFile) -> None:
    stat = os.fstat(descriptor)
    if (stat.st_size, stat.st_mtime_ns) != (file.size, file.mtime_ns):
        raise CheckpointError(
            f"{file.path} changed while the checkpoint was in use",
            why=f"it had {file.size} bytes when it was checked and has {stat.st_size} now, or was written to since",
            fix="Let the download or copy finish, then start again.",
            path=str(file.path),
        )


def _read(descriptor: int, record: TensorRecord, buffer: torch.Tensor) -> Iterator[int]:
    """Fill ``buffer`` with the tensor's bytes, block by block; yields the size of each block."""
    view = buffer.numpy().data
    done = 0
    while done < record.nbytes:
        offset = record.offset + done
        try:
            size = os.preadv(descriptor, [view[done : done + _BLOCK]], offset)
        except OSError as exc:
            raise _unreadable(record.file, offset, exc) from exc
        if size == 0:
            raise CheckpointError(
                f"{record.file} ends at byte {offset}, inside tensor {record.name}",
                why=f"the tensor goes on to byte {record.offset + record.nbytes}",
                fix=DOWNLOAD_AGAIN,
                path=str(record.file),
                offset=offset,
            )
        _drop(descriptor, offset, offset + size)
        done += size
        yield size


def _drop(descriptor: int, begin: int, end: int) -> None:
    # The kernel drops whole pages only, so the page that the last block ended in is dropped along with this one.
    begin -= begin % mmap.PAGESIZE
    os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)


def _unreadable(path: Path, offset: int, exc: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read at byte {offset}",
        why=exc.strerror or str(exc),
        fix="Check the disk and the file's permissions.",
        path=str(path),
        offset=offset,
    )
