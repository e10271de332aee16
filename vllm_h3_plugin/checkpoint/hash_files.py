# SPDX-License-Identifier: Apache-2.0
"""SHA-256 of whole files, several at a time, without leaving them in the page cache.

SHA-256 of one file cannot be split, so files are what runs in parallel. Importing this module does not import torch.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from vllm_h3_plugin.checkpoint.safetensors_header import ShardFile
from vllm_h3_plugin.checkpoint.shard_io import OpenShard
from vllm_h3_plugin.errors import CheckpointError

_BLOCK = 8 << 20


@dataclass(frozen=True)
class Hashed:
    """A file and its SHA-256, or why it has none."""

    path: Path
    sha256: str = ""
    error: CheckpointError | None = None


def stat_file(path: Path) -> ShardFile:
    """A file as it is now, its header unread. Raises OSError."""
    stat = path.stat()
    return ShardFile(path, stat.st_size, stat.st_mtime_ns, ())


def hash_files(
    files: Iterable[ShardFile], *, threads: int = 8, progress: Callable[[int], None] = lambda nbytes: None
) -> Iterator[Hashed]:
    """Hash files, each as it becomes ready. Closing the iterator stops the reading.

    Args:
        threads: files that are read at the same time, 8 MiB of memory each.
        progress: called with the bytes of each block, never by two threads at once.
    """
    stop = threading.Event()
    lock = threading.Lock()

    def advance(nbytes: int) -> None:
        with lock:
            progress(nbytes)

    with ThreadPoolExecutor(threads, thread_name_prefix="h3-sha256") as executor:
        try:
            # The largest first: the last one to end then ends soonest.
            ordered = sorted(files, key=lambda file: -file.size)
            for work in as_completed([executor.submit(_hash, file, stop, advance) for file in ordered]):
                yield work.result()
        finally:
            stop.set()
            executor.shutdown(cancel_futures=True)


def _hash(file: ShardFile, stop: threading.Event, advance: Callable[[int], None]) -> Hashed:
    try:
        shard = OpenShard(file)
        try:
            # A mapping lies at a page's begin, which reading past the page cache needs.
            state, buffer, position = hashlib.sha256(), memoryview(mmap.mmap(-1, _BLOCK)), 0
            while position < file.size and not stop.is_set():
                view = buffer[: min(_BLOCK, file.size - position)]
                shard.read_into(view, position, room=buffer)
                state.update(view)
                position += len(view)
                advance(len(view))
            shard.check_unchanged()
        finally:
            shard.close()
    except CheckpointError as exc:
        return Hashed(file.path, error=exc)
    return Hashed(file.path, state.hexdigest())
