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

import torch

from vllm_h3_plugin.checkpoint.arena import Memory, Region
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
    """Runs jobs one after another in a thread, on copies that lie in memory which is used again.

    Args:
        memory: for the copies; made when the first is.
        on_error: called in the thread at the first OSError of a job. Jobs behind it are dropped.
    """

    def __init__(self, memory: Callable[[torch.Tensor], Memory], on_error: Callable[[OSError], None]) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="h3-snapshot")
        self._make_memory = memory
        self._memory: Memory | None = None
        self._on_error = on_error
        self._room = threading.Condition()
        self._failed = False
        self._bug: BaseException | None = None

    def submit(self, tensor: torch.Tensor, job: Callable[[memoryview], None]) -> None:
        """Copy a tensor, which may be on a device and strided, and queue a job that gets its bytes, row by row.

        Blocks until there is room for the copy.
        """
        region = self._acquire(tensor)
        try:
            # A copy from a device waits for the device, and so for what computed the tensor.
            region.tensor.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        except BaseException:
            self._release(region)
            raise

        def done(future: Future[None]) -> None:
            if not future.cancelled() and self._bug is None:
                self._bug = future.exception()
            self._release(region)

        data = region.tensor.numpy().data
        self._executor.submit(self._run, lambda: job(data)).add_done_callback(done)

    def _acquire(self, tensor: torch.Tensor) -> Region:
        region: Region | None = None
        with self._room:
            memory = self._memory = self._memory or self._make_memory(tensor)
            while region is None:
                region = memory.acquire(tensor.numel() * tensor.element_size())
                if region is None:
                    self._room.wait()
        return region

    def _release(self, region: Region) -> None:
        with self._room:
            if self._memory is not None:
                self._memory.release(region)
            self._room.notify_all()

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
        self._memory = None
        if self._bug is not None:
            raise self._bug

    def cancel(self) -> None:
        """Drop the jobs that wait and let the one that runs end."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._memory = None
