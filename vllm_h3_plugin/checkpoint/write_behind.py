# SPDX-License-Identifier: Apache-2.0
"""Bytes on their way to files: written and hashed by one thread behind the caller's back, in bounded memory.

Dirty and clean pages of tens of GiB of output would compete with the model for unified memory, so each file is flushed
and its pages are dropped every :data:`_FLUSH` bytes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from vllm_h3_plugin.checkpoint.page_cache import drop_range

_FLUSH = 256 << 20


class WriteBehindFile:
    """A file of a size known up front, written at offsets.

    Raises:
        OSError: from the constructor and from every method; carries the file's name.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._unflushed = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as exc:
            self.close()
            raise self._named(exc) from exc

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""
        view = memoryview(data)
        try:
            while view:
                size = os.pwrite(self._descriptor, view, offset)
                view, offset = view[size:], offset + size
                self._unflushed += size
            if self._unflushed >= _FLUSH:
                self.flush()
        except OSError as exc:
            raise self._named(exc) from exc

    def flush(self) -> None:
        """Wait until everything written is on the disk, and drop its pages from the cache."""
        try:
            os.fsync(self._descriptor)
            drop_range(self._descriptor)
        except OSError as exc:
            raise self._named(exc) from exc
        self._unflushed = 0

    def close(self) -> None:
        """Close it; may be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _named(self, exc: OSError) -> OSError:
        return OSError(exc.errno, exc.strerror, str(self._path))


class WriteBehind:
    """Runs jobs one after another in a thread.

    Args:
        limit: bytes that may wait; :meth:`submit` blocks above it. A single larger job is let through alone.
        on_error: called in the thread at the first OSError of a job. Jobs behind it are dropped.
    """

    def __init__(self, limit: int, on_error: Callable[[OSError], None]) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="h3-snapshot")
        self._limit = limit
        self._on_error = on_error
        self._waiting = 0
        self._room = threading.Condition()
        self._failed = False
        self._bug: BaseException | None = None

    def submit(self, nbytes: int, prepare: Callable[[], Callable[[], None]]) -> None:
        """Queue a job that holds ``nbytes`` of memory.

        Args:
            prepare: takes the memory and makes the job; called here, once there is room.
        """
        with self._room:
            self._room.wait_for(lambda: self._waiting == 0 or self._waiting + nbytes <= self._limit)
            self._waiting += nbytes

        def release() -> None:
            with self._room:
                self._waiting -= nbytes
                self._room.notify_all()

        def done(future: Future[None]) -> None:
            if not future.cancelled() and self._bug is None:
                self._bug = future.exception()
            release()

        try:
            job = prepare()
        except BaseException:
            release()
            raise
        self._executor.submit(self._run, job).add_done_callback(done)

    def _run(self, job: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            job()
        except OSError as exc:
            self._failed = True
            self._on_error(exc)

    def finish(self) -> None:
        """Wait for all jobs; raises what one raised that is no OSError."""
        self._executor.shutdown(wait=True)
        if self._bug is not None:
            raise self._bug

    def cancel(self) -> None:
        """Drop the jobs that wait and let the one that runs end."""
        self._executor.shutdown(wait=True, cancel_futures=True)
