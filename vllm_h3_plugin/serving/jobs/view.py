# SPDX-License-Identifier: Apache-2.0
"""Jobs as those see them who ask: how far one is, what its record says, and each of its moves as it happens."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

from vllm_h3_plugin.serving.jobs.estimates import Estimates
from vllm_h3_plugin.serving.jobs.job import Job, Status, wire
from vllm_h3_plugin.serving.jobs.made import Worker
from vllm_h3_plugin.serving.jobs.progress import Progress, look

_EVENT_S = 0.25
_LOOK_S = 0.05
_HEARTBEAT_S = 15.0


class Source(Protocol):
    """Where jobs are: the service."""

    async def get(self, job_id: str) -> Job | None:
        """A job as it is now."""

    def position(self, job_id: str) -> int | None:
        """Place in the line; None for a job that does not wait."""

    def end_of(self, job_id: str) -> asyncio.Event | None:
        """Set when the job ends; None if it waits or runs nowhere here."""

    def expires_at(self, job: Job) -> float | None:
        """When it is removed, in seconds since 1970."""


class View:
    """Looks at jobs and moves none of them."""

    def __init__(self, source: Source, worker: Worker, estimates: Estimates, clock: Callable[[], float]) -> None:
        """
        Args:
            clock: seconds since 1970.
        """
        self._source = source
        self._worker = worker
        self._estimates = estimates
        self._clock = clock
        self._seen: dict[str, Progress] = {}
        self._worker_seen: Mapping[str, Any] | None = None
        self._worker_at = -math.inf

    def shown(self, job: Job) -> dict[str, Any]:
        """A job as clients see it."""
        return wire(job, self.progress(job).as_fields(), self._source.expires_at(job))

    def progress(self, job: Job) -> Progress:
        """How far a job is."""
        seen = look(
            job,
            self._worker_now() if job.status is Status.IN_PROGRESS else None,
            self._clock(),
            before=self._seen.get(job.id),
            position=self._source.position(job.id),
            tail_s=self._estimates.tail_s(),
        )
        if job.status is Status.IN_PROGRESS:
            self._seen[job.id] = seen
        return seen

    def forget(self, job: Job) -> None:
        """It runs no longer; what was seen of it last is of no more use."""
        self._seen.pop(job.id, None)

    async def events(self, job_id: str) -> AsyncIterator[dict[str, Any] | None]:
        """The job as clients see it, each time that it moves, until its end; None after 15 s without a move."""
        last, quiet = None, 0.0
        while True:
            job = await self._source.get(job_id)
            if job is None:
                return
            now = self.shown(job)
            moved = {name: value for name, value in now.items() if name != "seconds_left"}
            if moved != last or quiet >= _HEARTBEAT_S:
                yield now if moved != last else None
                last, quiet = moved, 0.0
            if job.status.ended:
                return
            end = self._source.end_of(job_id)
            quiet += _EVENT_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(end.wait() if end else asyncio.sleep(_EVENT_S * 2), _EVENT_S)

    def _worker_now(self) -> Mapping[str, Any] | None:
        """What the worker last wrote, read once for all who ask at the same moment."""
        now = time.monotonic()
        if now - self._worker_at > _LOOK_S:
            self._worker_seen, self._worker_at = self._worker.progress(), now
        return self._worker_seen
