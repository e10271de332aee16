# SPDX-License-Identifier: Apache-2.0
"""How much of a file lies in the page cache, and how to drop it from there. Neither reads data nor needs root.

On unified memory a cached checkpoint takes what the model needs, so what is in the cache is measured with
``mincore(2)`` and not assumed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from vllm_h3_plugin.errors import CheckpointError

# Bytes looked at per mincore() call; its answer takes one byte a page.
_WINDOW = 1 << 30
# mincore() says it in the lowest bit; the others are reserved.
_LOW_BIT = bytes(value & 1 for value in range(256))
_TRIES, _PAUSE_S = 10, 0.005


def cached_bytes(path: Path | str) -> int:
    """Bytes of a file that lie in the page cache; whole pages, the last one cut at the file's end.

    Raises:
        CheckpointError: the file cannot be opened, or belongs to somebody else: Linux (since 5.2, ``can_do_mincore``
            in mm/mincore.c) then claims that every page is cached.
    """
    path = Path(path)
    descriptor = _open(path)
    try:
        stat = os.fstat(descriptor)
        if not (os.geteuid() in (0, stat.st_uid) or os.access(path, os.W_OK)):
            raise CheckpointError(
                f"how much of {path} is in the page cache cannot be told",
                why="Linux tells it only to the file's owner and to those who may write to it",
                fix="Run this as the owner of the checkpoint.",
                path=str(path),
            )
        return _resident(descriptor, stat.st_size)
    finally:
        os.close(descriptor)


def cached_share(paths: Iterable[Path | str]) -> float:
    """Share of the files' bytes that lie in the page cache, from 0 to 1; 0 for no bytes.

    Raises:
        CheckpointError: as :func:`cached_bytes`.
    """
    paths = list(paths)
    total = sum(os.stat(path).st_size for path in paths)
    return sum(map(cached_bytes, paths)) / total if total else 0.0


def drop(paths: Iterable[Path | str]) -> None:
    """Drop whole files from the page cache. Pages that are still to be written, mapped or being read stay.

    Raises:
        CheckpointError: a file cannot be opened; those before it were dropped.
    """
    for path in paths:
        descriptor = _open(Path(path))
        try:
            drop_range(descriptor)
        finally:
            os.close(descriptor)


def drop_range(descriptor: int, begin: int = 0, end: int | None = None) -> None:
    """Drop the pages that hold bytes ``begin`` to ``end`` (None: the file's end) of an open file.

    The kernel drops whole pages only. The page that ``begin`` lies in goes too, since whoever read what is before it
    left it; the page that ``end`` lies in stays for whoever reads on.
    """
    if end is not None and end <= begin:
        return  # a length of 0 would mean the rest of the file
    begin -= begin % mmap.PAGESIZE
    os.posix_fadvise(descriptor, begin, 0 if end is None else end - begin, os.POSIX_FADV_DONTNEED)


def drop_file(descriptor: int) -> None:
    """Drop a whole open file that was just read, and what the kernel's readahead is still bringing in.

    A page that is being read stays when it is dropped, so this looks again for up to 50 ms.
    """
    size = os.fstat(descriptor).st_size
    for _ in range(_TRIES):
        drop_range(descriptor)
        if _resident(descriptor, size) == 0:
            return
        time.sleep(_PAUSE_S)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise CheckpointError(
            f"{path} cannot be opened",
            why=exc.strerror or str(exc),
            fix="Check that the file is there and that you may read it.",
            path=str(path),
        ) from exc


def _resident(descriptor: int, size: int) -> int:
    return sum(_resident_in(descriptor, begin, min(_WINDOW, size - begin)) for begin in range(0, size, _WINDOW))


def _resident_in(descriptor: int, begin: int, length: int) -> int:
    # ACCESS_COPY because ctypes takes the address of writable buffers only; nothing is touched, so nothing is copied.
    with mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=begin) as mapping:
        pages = (ctypes.c_ubyte * (-(-length // mmap.PAGESIZE)))()
        window = ctypes.c_ubyte.from_buffer(mapping)
        failed = _mincore()(ctypes.byref(window), length, pages)
        error = ctypes.get_errno()
        del window  # a mapping that is pointed into cannot be closed
    if failed:
        raise OSError(error, os.strerror(error))
    bits = bytes(pages).translate(_LOW_BIT)
    tail = len(bits) * mmap.PAGESIZE - length
    return bits.count(1) * mmap.PAGESIZE - (tail if bits[-1] else 0)


@cache
def _mincore() -> ctypes._NamedFuncPointer:  # type: ignore[name-defined]
    function = ctypes.CDLL(None, use_errno=True).mincore
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    function.restype = ctypes.c_int
    return function
