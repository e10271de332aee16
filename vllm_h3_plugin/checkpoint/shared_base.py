# SPDX-License-Identifier: Apache-2.0
"""A snapshot as the one read-only base of all ranks of a machine.

Each part's file is mapped once a process, ``MAP_SHARED`` and ``PROT_READ``, so that all processes look at the same
pages of the page cache. What is taken as a view costs a process nothing of its own; what has to be copied (a slice of a
tensor-parallel rank that is no view, anything for an accelerator) is read with ``pread`` into anonymous memory: from
the same pages, so from the disk at most once a machine, and never by a copy engine from a mapped page.

A file that is cut off while it is mapped: ``pread`` comes back short, which is an error with a message. Touching a
mapped page behind the new end is SIGBUS, so :meth:`SharedBase.check` compares sizes before each use of views, and
``announce_bus_errors`` leaves a message for what is cut off in between. A sealed copy in a memfd would exclude it, but
would have to be handed from process to process and would hold every byte twice while it is made.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import IO

import torch
from blake3 import blake3

from vllm_h3_plugin.checkpoint.read_only import read_only
from vllm_h3_plugin.checkpoint.reader import TORCH_DTYPES
from vllm_h3_plugin.checkpoint.safetensors_header import ShardFile, TensorRecord
from vllm_h3_plugin.checkpoint.snapshot import Snapshot
from vllm_h3_plugin.errors import BusyError, SnapshotError

_GIB = 2**30


class _Mapped:
    """One part's file."""

    def __init__(self, file: ShardFile) -> None:
        self.file = file
        self.entries = {record.name: record for record in file.tensors}
        self.descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.check()
            mapping = mmap.mmap(self.descriptor, file.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self.descriptor)
            raise
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            # Read-only before anybody can hold it; the tensor keeps the mapping alive.
            self.bytes = read_only(torch.frombuffer(mapping, dtype=torch.uint8))

    def check(self) -> None:
        size = os.fstat(self.descriptor).st_size
        if size != self.file.size:
            raise SnapshotError(
                f"{self.file.path} was cut off or changed while it is the base of this server",
                why=f"it has {size} bytes and had {self.file.size}",
                fix="Restart the server: the next start notices the damage and makes the snapshot again.",
                path=str(self.file.path),
            )

    def pread(self, out: memoryview, offset: int) -> None:
        done = 0
        while done < len(out):
            count = os.preadv(self.descriptor, [out[done:]], offset + done)
            if count == 0:
                self.check()
                raise SnapshotError(f"{self.file.path} ends at byte {offset + done}", why="more was expected")
            done += count


class SharedBase:
    """The mapped parts of a snapshot. Holds the snapshot's shared lock for as long as it lives: nothing of this project
    removes or replaces files that are mapped.

    Args:
        snapshot: open; closed by :meth:`close`.

    Attributes:
        copied_bytes: bytes that were read into memory of this process's own.
        viewed_bytes: bytes handed out as views.

    Raises:
        SnapshotError: a file has another size than its manifest says.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.copied_bytes = 0
        self.viewed_bytes = 0
        self._lock = threading.Lock()
        self._parts: dict[str, _Mapped] = {}
        try:
            for name in snapshot.parts:
                self._parts[name] = _Mapped(snapshot.file(name))
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Size of one copy."""
        return self.snapshot.nbytes

    def entry(self, part: str, name: str) -> TensorRecord | None:
        """Where a whole parameter lies; None if the snapshot has none of that name."""
        return self._parts[part].entries.get(name)

    def view(self, part: str, name: str) -> torch.Tensor | None:
        """A whole parameter, as a view of the mapping that cannot be written; None where its bytes are not aligned.

        Raises:
            KeyError: there is no such entry.
        """
        mapped = self._parts[part]
        record = mapped.entries[name]
        if record.offset % TORCH_DTYPES[record.dtype].itemsize:
            return None
        self.viewed_bytes += record.nbytes
        return _shaped(mapped.bytes[record.offset : record.offset + record.nbytes], record)

    def read(self, part: str, record: TensorRecord, out: torch.Tensor | None = None) -> torch.Tensor:
        """An entry, or a piece of one, in anonymous memory.

        Args:
            record: of this part's file.
            out: ``[nbytes]`` uint8 on the CPU to read into; None: new memory.

        Raises:
            SnapshotError: the file was cut off.
            OSError: the disk cannot read it.
        """
        memory = torch.empty(record.nbytes, dtype=torch.uint8) if out is None else out
        self._parts[part].pread(memoryview(memory.numpy()), record.offset)
        with self._lock:
            self.copied_bytes += record.nbytes
        return _shaped(memory, record)

    def read_into(self, part: str, record: TensorRecord, out: torch.Tensor, offset: int) -> None:
        """Bytes of a record from ``offset`` on into ``out``, uint8 on the CPU.

        Raises:
            SnapshotError: the file was cut off.
        """
        self._parts[part].pread(memoryview(out.numpy()), record.offset + offset)

    def check(self) -> None:
        """Before views are used: every file is still as long as it was.

        Raises:
            SnapshotError: one is not; names it and both sizes.
        """
        for mapped in self._parts.values():
            mapped.check()

    def verify(self, rank: int = 0, ranks: int = 1, progress: Callable[[int], None] = lambda done: None) -> None:
        """Hold this rank's share of the pieces against their digests: every ``ranks``-th. Reads, keeps nothing.

        Raises:
            SnapshotError: a piece is not what the manifest says.
        """
        done = 0
        for part in self.snapshot.parts:
            digests = self.snapshot.digests(part)
            for number, record in enumerate(self.snapshot.part(part).tensors):
                if number % ranks != rank:
                    continue
                memory = torch.empty(record.nbytes, dtype=torch.uint8)
                self._parts[part].pread(memoryview(memory.numpy()), record.offset)
                if blake3(memory.numpy()).hexdigest() != digests[record.name]:
                    raise SnapshotError(
                        f"{record.file}: tensor {record.name} is not what was written",
                        why="its BLAKE3 is not the manifest's",
                        fix=f"Remove the snapshot: vllm-h3 snapshot remove {self.snapshot.id}",
                        path=str(record.file),
                    )
                done += record.nbytes
                progress(done)

    def close(self) -> None:
        """Let the snapshot be replaced. Views that were handed out stay good: they hold the mapping."""
        for mapped in self._parts.values():
            if mapped.descriptor >= 0:
                os.close(mapped.descriptor)
                mapped.descriptor = -1
        self._parts = {}
        self.snapshot.close()

    def __enter__(self) -> SharedBase:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def require_host_memory(nbytes: int, available: int) -> None:
    """Refuse a base that would not stay in memory: its pages would be read from the disk again and again.

    Args:
        nbytes: of the base.
        available: MemAvailable in bytes, which counts pages of the base that are cached already.

    Raises:
        BusyError: with both numbers.
    """
    if nbytes > available:
        raise BusyError(
            f"the shared base needs {nbytes / _GIB:.1f} GiB of host memory and {available / _GIB:.1f} GiB are free",
            why="all ranks map one copy of the quantized weights, which has to stay in memory",
            fix="End what is not needed, choose a recipe that holds less, or set H3_SHARED_BASE=off.",
            needed_bytes=nbytes,
            available_bytes=available,
        )


def announce_bus_errors(stream: IO[str] | None = None) -> None:
    """Have a SIGBUS of this process leave a traceback of all threads before it ends.

    Where several threads meet the hole at once, the process ends in the middle of the message.
    """
    import faulthandler

    faulthandler.enable(stream or sys.__stderr__ or sys.stderr, all_threads=True)


def _shaped(data: torch.Tensor, record: TensorRecord) -> torch.Tensor:
    return data.view(TORCH_DTYPES[record.dtype]).view(record.shape)
