# SPDX-License-Identifier: Apache-2.0
"""Threads that read blocks ahead, in file order, into memory that comes free again behind them.

Blocks are handed out in order, so when one fails everything before it is being read. The consumer therefore gets
every tensor before the fault and then the fault, however the threads ran.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vllm_h3_plugin.checkpoint.arena import Memory, Region
from vllm_h3_plugin.checkpoint.read_plan import Segment, cut
from vllm_h3_plugin.checkpoint.shard_io import BLOCK, OpenShard
from vllm_h3_plugin.errors import CheckpointError

Progress = Callable[[int, int], None]
# Looks at a segment's bytes and raises a CheckpointError if they are not what they should be.
Inspect = Callable[[Segment, memoryview], None]


@dataclass(eq=False)
class _Item:
    """A segment that is being read or waits for its consumer."""

    index: int
    segment: Segment
    shard: OpenShard
    region: Region
    view: memoryview
    room: memoryview
    blocks: Iterator[tuple[int, int]]
    unread: int
    inspected: bool = False
    ready: bool = False


@dataclass(frozen=True)
class _Failure:
    """The earliest thing that went wrong: at which segment, at which byte of the file."""

    position: tuple[int, int]
    error: BaseException


class _Failed(Exception):
    """Leads the consumer out of its loop; what failed is in ``ReadPool._failure``."""


class ReadPool:
    """Reads segments once; iterate it once, and close the iterator to stop early.

    Args:
        threads: that read.
        block_bytes: most bytes that one thread reads at a time.
        inspect: called when a segment's last block was read, beside other reads and other inspections, in threads of
            its own: a reader that inspected would leave the disk idle meanwhile.
        in_order: called with one segment after the other, in a thread of its own. A segment is handed out after both.
        progress: called by the consumer while it waits, with (bytes read, bytes in all).
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        memory: Memory,
        *,
        threads: int,
        block_bytes: int,
        inspect: Inspect | None,
        in_order: Inspect | None,
        progress: Progress,
    ) -> None:
        self._segments = segments
        self._memory = memory
        self._threads = threads
        self._block_bytes = block_bytes
        self._inspect = inspect
        self._in_order = in_order
        self._progress = progress
        self._total = sum(segment.nbytes for segment in segments)
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)  # readers wait for it
        self._news = threading.Condition(self._lock)  # consumer and in-order thread wait for it
        self._items: dict[int, _Item] = {}
        self._shards: dict[Path, OpenShard] = {}
        self._issued = 0
        self._issuing: _Item | None = None
        self._done = 0
        self._reported = -1
        self._stopped = False
        self._failure: _Failure | None = None
        self._executor: ThreadPoolExecutor

    def __iter__(self) -> Generator[tuple[Segment, Region], None, None]:
        """Segments that are tensors, in order; a region is the caller's until the next one is asked for.

        Raises:
            CheckpointError: a file cannot be read, is not what it was, or was refused by an inspection.
        """
        executor = ThreadPoolExecutor(2 * self._threads + 1, thread_name_prefix="h3-read")
        self._executor = executor
        try:
            for work in [self._read] * self._threads + ([self._pass_in_order] if self._in_order else []):
                executor.submit(work).add_done_callback(self._note_crash)
            for index, segment in enumerate(self._segments):
                self._wait_for(index)
                if segment.record is not None:
                    yield segment, self._items[index].region
                    self._release(index)
                if segment.last:
                    self._finish(segment)
        except _Failed:
            # Only when no thread reads any more is it certain which fault is the first one in the files.
            self._stop(executor)
            assert self._failure is not None
            raise self._failure.error from None
        finally:
            self._stop(executor)

    def _stop(self, executor: ThreadPoolExecutor) -> None:
        with self._lock:
            self._stopped = True
            self._room.notify_all()
            self._news.notify_all()
        executor.shutdown(wait=True)
        self._items.clear()
        while self._shards:
            self._shards.popitem()[1].close()

    # The consumer's side

    def _wait_for(self, index: int) -> None:
        while True:
            with self._lock:
                while not (self._has_failed(index) or self._is_ready(index) or self._done != self._reported):
                    self._news.wait()
                failed, ready, done = self._has_failed(index), self._is_ready(index), self._done
            if done != self._reported:
                self._reported = done
                self._progress(done, self._total)
            if failed:
                raise _Failed
            if ready:
                return

    def _has_failed(self, index: int) -> bool:
        return self._failure is not None and self._failure.position[0] <= index

    def _is_ready(self, index: int) -> bool:
        item = self._items.get(index)
        # Bytes that are for nobody are gone as soon as they were looked at.
        return item.ready if item else index < self._issued

    def _release(self, index: int) -> None:
        with self._lock:
            self._memory.release(self._items.pop(index).region)
            self._room.notify_all()

    def _finish(self, segment: Segment) -> None:
        with self._lock:
            shard = self._shards.pop(segment.file.path)
        try:
            shard.check_unchanged()
        finally:
            shard.close()

    # The readers' side

    def _read(self) -> None:
        while (block := self._next_block()) is not None:
            item, begin, end = block
            start = item.segment.offset
            first = start - start % BLOCK
            room = item.room[begin - begin % BLOCK - first : -(-end // BLOCK) * BLOCK - first]
            try:
                item.shard.read_into(item.view[begin - start : end - start], begin, item.segment.what, room=room)
                if self._count(item, end - begin):
                    self._complete(item)
            except CheckpointError as exc:
                self._fail(item.index, begin, exc)
                return

    def _complete(self, item: _Item) -> None:
        if self._inspect is None:
            self._pass(item)
            return
        with self._lock:
            work = None if self._stopped else self._executor.submit(self._look_at, item)
        if work is None:
            self._look_at(item)  # it may hold the earliest fault
        else:
            work.add_done_callback(self._note_crash)

    def _look_at(self, item: _Item) -> None:
        assert self._inspect is not None
        try:
            self._inspect(item.segment, item.view)
        except CheckpointError as exc:
            self._fail(item.index, item.segment.offset, exc)
        else:
            self._pass(item)

    def _pass(self, item: _Item) -> None:
        with self._lock:
            item.inspected = True
            item.ready = self._in_order is None
            self._news.notify_all()

    def _next_block(self) -> tuple[_Item, int, int] | None:
        with self._lock:
            while not self._stopped and self._failure is None:
                if self._issuing is not None:
                    block = next(self._issuing.blocks, None)
                    if block is not None:
                        return self._issuing, *block
                    self._issuing = None
                if self._issued == len(self._segments):
                    return None
                segment = self._segments[self._issued]
                region = self._memory.acquire(segment.nbytes, segment.offset % BLOCK)
                if region is None:
                    self._room.wait()
                    continue
                try:
                    self._issuing = self._begin(segment, region)
                except CheckpointError as exc:
                    self._set_failure(self._issued, segment.offset, exc)
                    return None
                self._issued += 1
            return None

    def _begin(self, segment: Segment, region: Region) -> _Item:
        path = segment.file.path
        if path not in self._shards:
            self._shards[path] = OpenShard(segment.file)
        begin, end = segment.offset, segment.offset + segment.nbytes
        blocks = list(cut(begin, end, self._block_bytes)) or [(begin, end)]
        view, room = region.tensor.numpy().data, region.room.numpy().data
        item = _Item(self._issued, segment, self._shards[path], region, view, room, iter(blocks), len(blocks))
        self._items[item.index] = item
        return item

    def _count(self, item: _Item, nbytes: int) -> bool:
        with self._lock:
            item.unread -= 1
            self._done += nbytes
            self._news.notify_all()
            return item.unread == 0

    def _pass_in_order(self) -> None:
        assert self._in_order is not None
        for index, segment in enumerate(self._segments):
            with self._lock:
                while not (self._stopped or self._has_failed(index) or self._is_inspected(index)):
                    self._news.wait()
                if self._stopped or self._has_failed(index):
                    return
                item = self._items[index]
            try:
                self._in_order(segment, item.view)
            except CheckpointError as exc:
                self._fail(index, segment.offset + segment.nbytes, exc)
                return
            with self._lock:
                item.ready = True
                self._news.notify_all()
            if segment.record is None:
                self._release(index)

    def _is_inspected(self, index: int) -> bool:
        item = self._items.get(index)
        return item is not None and item.inspected

    def _note_crash(self, work: Future[None]) -> None:
        error = work.exception()
        if error is not None:
            self._fail(-1, 0, error)

    def _fail(self, index: int, offset: int, error: BaseException) -> None:
        with self._lock:
            self._set_failure(index, offset, error)

    def _set_failure(self, index: int, offset: int, error: BaseException) -> None:
        if self._failure is None or (index, offset) < self._failure.position:
            self._failure = _Failure((index, offset), error)
        self._room.notify_all()
        self._news.notify_all()
