# SPDX-License-Identifier: Apache-2.0
"""What the disk gives: the same bytes, read by threads into memory that is used again, and nothing else done.

This is what loading is held against, so each reading says how much of the files was in the page cache before it: a
"disk" of 20 GiB/s is memory. What lies in caches below this machine's own (a hypervisor's, a storage server's) cannot
be seen from here.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_h3_plugin.checkpoint.atomic import fsync
from vllm_h3_plugin.checkpoint.page_cache import cached_share, drop
from vllm_h3_plugin.errors import CheckpointError

COLD_SHARE = 0.02
"""Files of which no more than this is cached count as cold."""

_PAGE = 4096
# Linux has it; elsewhere files are read through the page cache.
_O_DIRECT = getattr(os, "O_DIRECT", 0)

_TRIES, _PAUSE_S = 20, 0.05


@dataclass(frozen=True)
class Range:
    """Bytes ``begin`` to ``end`` of a file."""

    path: Path
    begin: int
    end: int


@dataclass(frozen=True)
class Cold:
    """How cold files are.

    Attributes:
        share: of their bytes in the page cache, 0 to 1; None where it cannot be told.
        reason: why they are not cold, or why that cannot be told; empty if they are.
    """

    share: float | None
    reason: str = ""


@dataclass(frozen=True)
class RawRead:
    """One reading.

    Attributes:
        nbytes: that were read.
        seconds: from the first read's start to the last one's end.
        cold: before it.
        direct: whether it went past the page cache (O_DIRECT).
    """

    nbytes: int
    seconds: float
    cold: Cold
    direct: bool = False

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds

    def __str__(self) -> str:
        way, note = "past" if self.direct else "through", f" ({self.cold.reason})" if self.cold.reason else ""
        speed = f"{self.nbytes / 2**30:.3f} GiB in {self.seconds:.2f} s, {self.rate / 2**30:.2f} GiB/s"
        return f"{speed} {way} the page cache{note}"


def whole(paths: Iterable[Path]) -> list[Range]:
    """Every byte of files, in order."""
    return [Range(path, 0, path.stat().st_size) for path in paths]


def joined(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes, with ranges that follow each other in a file as one."""
    result: list[Range] = []
    for piece in ranges:
        last = result[-1] if result else None
        if last is not None and (last.path, last.end) == (piece.path, piece.begin):
            result[-1] = Range(piece.path, last.begin, piece.end)
        else:
            result.append(piece)
    return result


def share_of(paths: Sequence[Path]) -> Cold:
    """How much of files is in the page cache now."""
    try:
        share = cached_share(paths)
    except (CheckpointError, OSError) as exc:
        return Cold(None, f"what is cached cannot be told: {exc}")
    return Cold(share, "" if share <= COLD_SHARE else f"{share:.1%} stayed in the page cache")


def make_cold(paths: Sequence[Path]) -> Cold:
    """Bring files out of the page cache: their bytes to the disk first, since pages to be written stay."""
    for path in paths:
        fsync(path)
    cold = Cold(None)
    for _ in range(_TRIES):
        drop(paths)
        cold = share_of(paths)
        if cold.share is None or cold.share <= COLD_SHARE:
            break
        time.sleep(_PAUSE_S)
    return cold


def read_raw(ranges: Sequence[Range], *, threads: int, block_bytes: int, direct: bool = False) -> RawRead:
    """Make the files cold and read the ranges, block by block in order, ``threads`` blocks at a time.

    Args:
        direct: past the page cache, where the file system can; the result says whether it could.

    Raises:
        OSError: a file cannot be read.
        CheckpointError: a file ends early.
    """
    paths = list(dict.fromkeys(piece.path for piece in ranges))
    cold = make_cold(paths)
    blocks = [
        (piece.path, begin, min(begin + block_bytes, piece.end))
        for piece in ranges
        for begin in range(piece.begin, piece.end, block_bytes)
    ]
    descriptors, direct = _open(paths, direct)
    try:
        waiting, lock = iter(blocks), threading.Lock()
        failures: list[OSError | CheckpointError] = []
        # A direct read begins and ends at whole pages, so that it may reach beyond its block on either side.
        buffers = [_memory(block_bytes + 2 * _PAGE) for _ in range(threads)]

        def work(buffer: memoryview) -> None:
            while not failures:
                with lock:
                    block = next(waiting, None)
                if block is None:
                    return
                path, begin, end = block
                if direct:
                    begin -= begin % _PAGE
                try:
                    _read(descriptors[path], path, buffer, begin, end)
                except (OSError, CheckpointError) as exc:
                    failures.append(exc)

        workers = [threading.Thread(target=work, args=(buffer,), name="h3-raw") for buffer in buffers]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds = time.perf_counter() - started
        if failures:
            raise failures[0]
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
        drop(paths)
    return RawRead(sum(end - begin for _, begin, end in blocks), seconds, cold, direct)


def _open(paths: Sequence[Path], direct: bool) -> tuple[dict[Path, int], bool]:
    """Descriptors by path, and whether they go past the page cache."""
    descriptors: dict[Path, int] = {}
    try:
        for path in paths:
            descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (_O_DIRECT if direct else 0))
    except OSError:
        for descriptor in descriptors.values():
            os.close(descriptor)
        if direct:  # a file system that cannot
            return _open(paths, False)
        raise
    return descriptors, direct and _O_DIRECT != 0


def _memory(nbytes: int) -> memoryview:
    """Pages of its own that are there before the clock starts."""
    mapping = mmap.mmap(-1, nbytes)
    mapping.write(bytes(nbytes))
    return memoryview(mapping)


def _read(descriptor: int, path: Path, buffer: memoryview, begin: int, end: int) -> None:
    while begin < end:
        # Whole pages, which a direct read asks for and no other minds; the file's end cuts the last one.
        size = os.preadv(descriptor, [buffer[: -(-(end - begin) // _PAGE) * _PAGE]], begin)
        if size == 0:
            raise CheckpointError(f"{path} ends at byte {begin}", why=f"{end} bytes were expected", path=str(path))
        begin += size
