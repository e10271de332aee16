# SPDX-License-Identifier: Apache-2.0
"""What is read from which file in which order: tensors, and where whole files are wanted, all between them too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from vllm_h3_plugin.checkpoint.safetensors_header import ShardFile, TensorRecord


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of one file that are read into one piece of memory.

    Attributes:
        record: the tensor that they are; None for bytes that are read and handed to nobody.
        last: whether nothing more is read from this file.
    """

    file: ShardFile
    offset: int
    nbytes: int
    record: TensorRecord | None
    last: bool

    @property
    def what(self) -> str:
        """What the bytes belong to, for messages."""
        return f"tensor {self.record.name}" if self.record else ""


def plan_reads(
    files: Iterable[ShardFile], wanted: Callable[[str], bool], *, whole: bool, piece: int
) -> tuple[Segment, ...]:
    """Segments in file order.

    Args:
        wanted: whether a tensor of that name is handed out.
        whole: read every byte of every file: its header and the tensors that are not wanted, in pieces of at most
            ``piece`` bytes. Otherwise they are skipped, and so is a file without wanted tensors.
    """
    return tuple(segment for file in files for segment in _plan_file(file, wanted, whole, piece))


def _plan_file(file: ShardFile, wanted: Callable[[str], bool], whole: bool, piece: int) -> list[Segment]:
    spans: list[tuple[int, int, TensorRecord | None]] = []
    position = 0
    for record in file.tensors:
        if not wanted(record.name):
            continue
        if whole:
            spans += [(begin, end, None) for begin, end in cut(position, record.offset, piece)]
        position = record.offset + record.nbytes
        spans.append((record.offset, position, record))
    if whole:
        spans += [(begin, end, None) for begin, end in cut(position, file.size, piece)]
    return [
        Segment(file, begin, end - begin, record, last=number == len(spans))
        for number, (begin, end, record) in enumerate(spans, 1)
    ]


def cut(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut bytes ``begin`` to ``end`` at the multiples of ``size``: pieces then share no page."""
    while begin < end:
        stop = min(end, begin - begin % size + size)
        yield begin, stop
        begin = stop
