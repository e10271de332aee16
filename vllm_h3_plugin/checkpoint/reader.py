# SPDX-License-Identifier: Apache-2.0
"""Read one part's weights in file order, at the speed of the disk, without leaving them in the page cache.

A file that is mapped, or read and left in the cache, competes with the model for unified memory. So several threads
read blocks ahead with ``preadv`` into memory that is used again, past the page cache (O_DIRECT) where the file system
can, else dropping the pages behind each block with ``posix_fadvise(DONTNEED)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_h3_plugin.checkpoint.arena import Arena, Memory, OwnMemory
from vllm_h3_plugin.checkpoint.digests import FileDigests, TensorDigests
from vllm_h3_plugin.checkpoint.inventory import PartInventory
from vllm_h3_plugin.checkpoint.read_plan import plan_reads
from vllm_h3_plugin.checkpoint.read_pool import Progress, ReadPool
from vllm_h3_plugin.checkpoint.safetensors_header import TensorRecord

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

# Bytes that are read ahead of a consumer whose tensors have memory of their own.
_AHEAD = 256 << 20


@dataclass(frozen=True)
class ReadOptions:
    """How a part is read.

    Attributes:
        threads: that read at the same time.
        buffer_bytes: memory that tensors are read into, in turn. A tensor that is larger gets one buffer more of its
            size, which all such tensors share. Overlap needs room for two tensors: two of 1 GiB take turns in 1 GiB.
        block_bytes: most bytes that one thread reads at a time.
        pin: page-lock the buffer, for copies to a CUDA device.
    """

    threads: int = 4
    buffer_bytes: int = 1 << 30
    block_bytes: int = 16 << 20
    pin: bool = False


class WeightSource:
    """Iterates ``(name, tensor)`` of one part: shard by shard, by offset, tensors on the CPU.

    Args:
        part: from an inventory without faults. Tensors that the host drops are skipped unread.
        options: None: every tensor has memory of its own and is the caller's for good. Otherwise tensors lie in a
            buffer that is used again, and one is valid only until the next is taken: until then the caller must have
            copied or consumed it, and have waited for copies that a device makes on its own time. The host's online
            quantization holds on to the tensors of an unfinished layer: it needs None.
        wanted: names to read; others are skipped unread.
        progress: called with (bytes read, bytes in all) by the thread that iterates, while it waits.
        tensor_digests: tensor name -> BLAKE3 of its bytes, 64 hex digits. A tensor is handed out if it has them.
        file_digests: path as in ``part`` -> SHA-256 of the whole file. Every byte of every file is then read, and
            hashed in a thread of its own. Tensors come before the end of their file and thus before the verdict on it;
            a file's last tensor and the end of the iteration are reached only if the file is right.

    Each iteration reads the files anew, with threads of its own that end with it.

    Raises:
        SnapshotError: a tensor has no digest in ``tensor_digests``; from the iteration: it has another.
        CheckpointError: a file has no digest in ``file_digests``. From the iteration: it has another, is not the one
            that the inventory saw, is replaced while it is read, cannot be read, or ends early; the message names path
            and offset. Tensors that lie before the fault come first.
    """

    def __init__(
        self,
        part: PartInventory,
        *,
        options: ReadOptions | None = None,
        wanted: Callable[[str], bool] = lambda name: True,
        progress: Progress = lambda done, total: None,
        tensor_digests: Mapping[str, str] | None = None,
        file_digests: Mapping[Path, str] | None = None,
    ) -> None:
        self._options = options
        self._how = options or ReadOptions()
        self._segments = plan_reads(
            part.files,
            lambda name: name not in part.ignored and wanted(name),
            whole=file_digests is not None,
            piece=self._how.block_bytes,
        )
        self._progress = progress
        self._tensor_digests = None if tensor_digests is None else TensorDigests(tensor_digests, self._segments)
        self._file_digests = None if file_digests is None else FileDigests(file_digests, part.files)
        self.total_bytes = sum(segment.nbytes for segment in self._segments)
        """Bytes that an iteration reads."""

    def __len__(self) -> int:
        """Number of tensors that an iteration yields."""
        return sum(segment.record is not None for segment in self._segments)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        pool = ReadPool(
            self._segments,
            self._memory(),
            threads=self._how.threads,
            block_bytes=self._how.block_bytes,
            inspect=self._tensor_digests,
            in_order=None if self._file_digests is None else self._file_digests.checker(),
            progress=self._progress,
        )
        reading = iter(pool)
        try:
            for segment, region in reading:
                record = segment.record
                assert record is not None
                yield record.name, _as(region.tensor, record)
        finally:
            reading.close()

    def _memory(self) -> Memory:
        if self._options is None:
            return OwnMemory(_AHEAD)
        largest = max((segment.nbytes for segment in self._segments), default=0)
        # Alignment takes less than two pages a tensor.
        needed = self.total_bytes + 2 * 4096 * len(self._segments)
        return Arena(min(self._options.buffer_bytes, needed), largest=largest, pin=self._options.pin)


def _as(data: torch.Tensor, record: TensorRecord) -> torch.Tensor:
    dtype = TORCH_DTYPES[record.dtype]
    if data.storage_offset() % dtype.itemsize:
        # It lies in memory as it lies in the file, and a file may put it at any byte.
        data = data.clone()
    return data.view(dtype).view(record.shape)
