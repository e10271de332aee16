# SPDX-License-Identifier: Apache-2.0
"""The one place where jobs live: takes requests, makes them one after the other, stops them, keeps what they come to.

Everything here happens in one event loop, so that between two ``await`` nothing moves; only the database and the disk
are used from other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from vllm_h3_plugin.errors import BusyError, QueueFullError, UsageError
from vllm_h3_plugin.serving.jobs.estimates import Estimates
from vllm_h3_plugin.serving.jobs.job import LOST, Failure, Job, Status, new_id
from vllm_h3_plugin.serving.jobs.keeper import INTERRUPTED, Keeper, event
from vllm_h3_plugin.serving.jobs.line import Line
from vllm_h3_plugin.serving.jobs.made import Asked, Observer, Order, Worker
from vllm_h3_plugin.serving.jobs.retention import Retention
from vllm_h3_plugin.serving.jobs.run import Run
from vllm_h3_plugin.serving.jobs.view import View

log = logging.getLogger(__name__)

_SWEEP_S = 60.0
_SAVE_S = 10.0
"""A server that is told to end gives the clip that it writes this long."""
_BACK_S = 30
_OTHERS_S = 0.5
"""Between two looks at a job that another server of the same folder makes."""

CANCELLED = Failure("cancelled", "The job was cancelled.", 409)


@dataclass(frozen=True)
class Rules:
    """What the operator decides.

    Attributes:
        max_queue: jobs that may wait.
        deadline_s: longest that a job may run; ``fixed``: whatever its own steps predict.
        retention: what is kept, and for how long.
        replica: name that ids of jobs carry; empty for the only server.
    """

    max_queue: int = 16
    deadline_s: float = 3600.0
    fixed: bool = False
    retention: Retention = field(default_factory=Retention)
    replica: str = ""


class JobService:
    """See the module's docstring."""

    def __init__(
        self,
        storage: Path,
        worker: Worker,
        rules: Rules,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            storage: the host's storage folder; everything is kept in ``h3`` below it.

        Raises:
            ServerError: the records there cannot be used.
            OSError: the folder cannot be made.
        """
        self.kept = Keeper(storage, rules.retention, clock)
        self.rules = rules
        self._worker = worker
        self._observer = observer or Observer()
        self._clock = clock
        self._line: Line[tuple[Job, Order]] = Line(rules.max_queue)
        self._running: Run | None = None
        self._ends: dict[str, asyncio.Event] = {}
        self._arrived = asyncio.Event()
        self._submitting = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._estimates = Estimates()
        self.view = View(self, worker, self._estimates, clock)
        self._leaving = False

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring the records in order after whatever happened to the server before, and begin to work."""
        await asyncio.to_thread(self.kept.open)
        self._tasks = [asyncio.create_task(self._work()), asyncio.create_task(self._keep_tidy())]

    async def leave(self) -> None:
        """Take nothing more and interrupt what is not finished, so that whoever waits is answered.

        A server ends only once all its connections have. Nobody waits for the worker, which is about to go.
        """
        self._leaving = True
        running = self._running
        if running is not None:
            running.abandon(INTERRUPTED)
        # All at once: what is left in the line while one is recorded would be started.
        waiting = [first[1] for first in iter(self._line.take, None)]
        self._observer.line(0)
        for job, order in waiting:
            order.close()
            await self._end(job.failed(INTERRUPTED, self._clock()))

    async def stop(self) -> None:
        """Stop working. Jobs that are not finished are interrupted; a clip that is being saved is saved."""
        await self.leave()
        running = self._running
        if running is not None and running.saving:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ends[running.job.id].wait(), _SAVE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            for job in await asyncio.to_thread(self.kept.store.unfinished):
                if job.owner == self.kept.owner and not job.status.ended:
                    await self._end(job.failed(INTERRUPTED, self._clock()))
        except BusyError as exc:
            # The next server finds them as after a kill.
            log.error("event=not_interrupted reason=%r", str(exc))
        finally:
            await asyncio.to_thread(self.kept.close)

    # --- what callers do ----------------------------------------------------------------------------------------

    async def submit(self, asked: Asked, order: Order) -> tuple[Job, bool]:
        """Take a request.

        Returns:
            Its job, and whether it is new; it is not if its key was used for the same request before, unless that was
            lost through no fault of the request. ``order`` is closed then.

        Raises:
            QueueFullError: too many wait.
            UsageError: its key was used for another request.
            BusyError: the disk is full, or the server is ending.
        """
        async with self._submitting:
            try:
                earlier = await self._joined(asked)
                if earlier is not None:
                    order.close()
                    return earlier, False
                if self._leaving:
                    raise BusyError("the server is ending", fix="Ask again when it is back.", retry_after_s=_BACK_S)
                self._line.require_room(
                    busy=self._running is not None, next_s=self._next_place_s(), most=asked.most_waiting
                )
                job = Job(
                    new_id(self.rules.replica),
                    asked.model,
                    asked.prompt,
                    self._clock(),
                    self.kept.owner,
                    self.rules.deadline_s,
                    key=asked.key,
                    fingerprint=asked.fingerprint,
                    sync=asked.sync,
                    shown=asked.shown,
                )
                await asyncio.to_thread(self.kept.store.add, job)
            except BaseException:
                order.close()
                raise
            self._ends[job.id] = asyncio.Event()
            position = self._line.join(job.id, (job, order))
            self._observer.line(len(self._line))
            event(job, "queued", f"position={position}")
            self._arrived.set()
            return job, True

    async def _joined(self, asked: Asked) -> Job | None:
        if asked.key is None:
            return None
        earlier = await asyncio.to_thread(self.kept.store.by_key, asked.key)
        if earlier is not None and earlier.fingerprint != asked.fingerprint:
            raise UsageError(
                f"Idempotency-Key {asked.key!r} was used for another request",
                why=f"job {earlier.id} has it",
                fix="Send each new request with a key of its own.",
            )
        if earlier is not None and earlier.failure is not None and earlier.failure.code in LOST:
            # Asking again is what its caller was told to do. The job that was lost stays, without the key.
            await asyncio.to_thread(self.kept.store.put, replace(earlier, key=None))
            return None
        return earlier

    async def get(self, job_id: str) -> Job | None:
        """A job."""
        running = self._running
        if running is not None and running.job.id == job_id:
            return None if running.deleted else running.job
        waiting = self._line.find(job_id)
        if waiting is not None:
            return waiting[0]
        return await asyncio.to_thread(self.kept.store.get, job_id)

    async def wait(self, job_id: str) -> Job | None:
        """A job once it has ended, another server's too; None if it is removed."""
        end = self._ends.get(job_id)
        if end is not None:
            await end.wait()
        while True:
            job = await asyncio.to_thread(self.kept.store.get, job_id)
            if job is None or job.status.ended:
                return job
            await asyncio.sleep(_OTHERS_S)

    async def cancel(self, job_id: str, reason: Failure = CANCELLED) -> bool:
        """Stop a job; the worker is told, and stops at its next look. False: it neither waits nor runs here."""
        waiting = self._line.leave(job_id)
        if waiting is not None:
            job, order = waiting
            order.close()
            self._observer.line(len(self._line))
            await self._end(job.failed(reason, self._clock()))
            return True
        running = self._running
        if running is not None and running.job.id == job_id:
            event(running.job, "stopping", f"reason={reason.code}")
            running.stop(reason)
            return True
        end = self._ends.get(job_id)
        if end is not None:
            # Somebody else has just stopped it.
            await end.wait()
        return end is not None

    async def delete(self, job_id: str) -> bool:
        """Stop a job if it is not finished, and remove its record and its files. False: there is none.

        Raises:
            UsageError: another server works on it.
        """
        job = await self.get(job_id)
        if job is None:
            return False
        if not job.status.ended and not await self.cancel(job_id):
            job = await asyncio.to_thread(self.kept.store.get, job_id)
            if job is not None and not job.status.ended:
                raise UsageError(
                    f"job {job_id} is another server's", why="it works on it now", fix="Ask that server to delete it."
                )
        if self._running is not None and self._running.job.id == job_id:
            self._running.deleted = True
        await asyncio.to_thread(self.kept.forget, [job_id])
        return True

    def position(self, job_id: str) -> int | None:
        """Place in the line, from 1; None for a job that does not wait."""
        return self._line.position(job_id)

    def end_of(self, job_id: str) -> asyncio.Event | None:
        """Set when the job ends; None if it neither waits nor runs here."""
        return self._ends.get(job_id)

    def expires_at(self, job: Job) -> float | None:
        """When it is removed, in seconds since 1970; None: not by age."""
        return self.kept.retention.expires_at(job)

    @property
    def queue(self) -> dict[str, Any]:
        """The line, for ``/v1/h3/info``."""
        running = self._running
        return {
            "length": len(self._line),
            "max": self.rules.max_queue,
            "running": running.job.id if running is not None else None,
        }

    @property
    def accepting(self) -> bool:
        """Whether a new request would be taken."""
        with contextlib.suppress(QueueFullError):
            self._line.require_room(busy=self._running is not None, next_s=None)
            return bool(self._tasks) and not self._leaving
        return False

    # --- the runner ---------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            first = self._line.take()
            if first is None:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            job_id, (job, order) = first
            try:
                # Without a pause in between: whoever asks finds the job in the line or running.
                await self._run(job, order)
            except Exception:
                # The line must go on whatever one job does.
                log.exception("job=%s event=runner_failed", job_id)
            finally:
                order.close()
                self._observer.line(len(self._line))

    async def _run(self, job: Job, order: Order) -> None:
        if self._leaving:
            return await self._end(job.failed(INTERRUPTED, self._clock()))
        job = job.moved(Status.IN_PROGRESS, self._clock())
        look = None if self.rules.fixed else partial(self.view.progress, job)
        self._running = running = Run(job, order, self._worker, self.kept.clips, self._clock, look)
        try:
            await asyncio.to_thread(self.kept.store.put, job)
            self._observer.started(job)
            event(job, "started", f"queue_s={(job.started_at or 0) - job.created_at:.3f}")
            await self._end(await running.result())
        finally:
            self._running = None
            self.view.forget(job)

    async def _end(self, job: Job) -> None:
        try:
            await asyncio.to_thread(self.kept.end, job)
            if job.status is Status.COMPLETED:
                self._estimates.add(job)
            how = f"code={job.failure.code}" if job.failure else f"bytes={job.nbytes} sha256={job.sha256}"
            event(job, job.status.value, f"{how} run_s={job.ledger.get('run_s')}")
            self._observer.ended(job)
        finally:
            # Whatever went wrong, nobody waits for a job that nobody works on.
            end = self._ends.pop(job.id, None)
            if end is not None:
                end.set()

    # --- housekeeping -------------------------------------------------------------------------------------------

    async def _keep_tidy(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.kept.tidy)
            except Exception:
                log.exception("event=tidy_failed")
            await asyncio.sleep(_SWEEP_S)

    # --- estimates ----------------------------------------------------------------------------------------------

    def _next_place_s(self) -> float | None:
        """Seconds until the running job ends, by its own steps or by the last clips of this server."""
        running = self._running
        if running is None:
            return None
        left = self.view.progress(running.job).seconds_left
        return left if left is not None else self._estimates.left_s(running.job, self._clock())
