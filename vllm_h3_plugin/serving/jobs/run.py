# SPDX-License-Identifier: Apache-2.0
"""One job from its start to its end: made, stopped or failed, and saved."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable
from typing import Any

from vllm_h3_plugin.serving.jobs.clips import Clips
from vllm_h3_plugin.serving.jobs.job import Failure, Job, Status
from vllm_h3_plugin.serving.jobs.keeper import INTERRUPTED
from vllm_h3_plugin.serving.jobs.made import Made, Order, Worker
from vllm_h3_plugin.serving.jobs.progress import ENCODING_VIDEO, Progress
from vllm_h3_plugin.serving.limits import AFTER_LAST_STEP_S

log = logging.getLogger(__name__)

_MARGIN = 2.0
"""A job may take this many times what its own steps predict, and what comes after them besides."""
_PREDICT_S = 5.0
"""Between two looks at that."""


class Run:
    """The run of a job that is in progress.

    Attributes:
        job: as it was started.
        deleted: nobody wants to hear of it any more.
        saving: its clip is made and being written.
    """

    def __init__(
        self,
        job: Job,
        order: Order,
        worker: Worker,
        clips: Clips,
        clock: Callable[[], float],
        progress: Callable[[], Progress] | None = None,
    ) -> None:
        """
        Args:
            clock: seconds since 1970.
            progress: how far the job is; what its own steps predict moves its deadline on. None: the deadline stays.
        """
        self._progress = progress
        self._deadline_s = job.deadline_s
        self.job = job
        self.deleted = False
        self.saving = False
        self._order = order
        self._worker = worker
        self._clips = clips
        self._clock = clock
        self._stopped: Failure | None = None
        self._task: asyncio.Task[Made] | None = None

    def stop(self, reason: Failure) -> None:
        """Have it stopped at the worker's next look. The first reason stays."""
        self._stopped = self._stopped or reason
        if not self._worker.stop(self.job.id) and self._task is not None:
            self._task.cancel()

    def abandon(self, reason: Failure) -> None:
        """Have it stopped and do not wait for the worker: it goes with the server. A clip that is made is saved."""
        self.stop(reason)
        if self._task is not None:
            self._task.cancel()

    async def result(self) -> Job:
        """Make the clip and save it; returns the job as it ended, once the worker is free."""
        job = self.job
        if self._stopped is not None:
            return job.failed(self._stopped, self._clock())
        task = self._task = asyncio.create_task(self._order.make(job.id))
        try:
            if not await self._in_time(task):
                self.stop(_too_long(self._deadline_s))
                # The worker looks between two steps; the next job starts when it is free, and not before.
                await asyncio.wait({task})
            if task.cancelled():
                return job.failed(self._stopped or INTERRUPTED, self._clock())
            made, made_at = task.result(), self._clock()
        except asyncio.CancelledError:
            task.cancel()
            raise
        except Exception as exc:  # noqa: BLE001  # whatever the host raises ends this job and no other
            failure = self._stopped or self._worker.explain(exc)
            if self._stopped is None:
                log.error("job=%s event=failed code=%s message=%r", job.id, failure.code, failure.message)
            return self._failed(failure, self._clock())
        if self._stopped is not None:
            return self._failed(self._stopped, made_at)
        return await self._saved(made, made_at)

    async def _in_time(self, task: asyncio.Task[Made]) -> bool:
        """Whether it ends before its deadline. A long clip that moves as it should is not the fault that one is for."""
        began, step = time.monotonic(), 1
        while not task.done():
            elapsed = time.monotonic() - began
            seen = None if self._progress is None else self._progress()
            # The first step also warms up. Only a step that is done predicts: one that never ends must not move it.
            if seen is not None and seen.seconds_left is not None and seen.step > step:
                step = seen.step
                predicted = _MARGIN * (elapsed + seen.seconds_left) + AFTER_LAST_STEP_S
                self._deadline_s = max(self._deadline_s, predicted)
            if elapsed >= self._deadline_s:
                return False
            await asyncio.wait({task}, timeout=min(_PREDICT_S, self._deadline_s - elapsed))
        return True

    async def _saved(self, made: Made, made_at: float) -> Job:
        def finish(nbytes: int, digest: str) -> Job:
            now = self._clock()
            return self.job.moved(
                Status.COMPLETED,
                now,
                nbytes=nbytes,
                sha256=digest,
                shown={**self.job.shown, **made.shown},
                ledger=self._ledger(made_at, now),
            )

        self.saving = True
        try:
            return await asyncio.to_thread(self._clips.save, self.job, made.data, finish)
        except OSError as exc:
            full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
            failure = Failure(
                "disk_full" if full else "not_saved",
                f"The clip was made and could not be saved in {self._clips.folder}: {exc.strerror or exc}. "
                f"{'Free space there' if full else 'Look at that folder'}, then ask for it again.",
                507 if full else 500,
            )
            return self._failed(failure, made_at)

    def _failed(self, failure: Failure, made_at: float) -> Job:
        return self.job.failed(failure, self._clock(), ledger=self._ledger(made_at, None))

    def _ledger(self, made_at: float, saved_at: float | None) -> dict[str, Any]:
        """Where the time of the job went: what was seen from here, and what the worker wrote."""
        told = dict(self._worker.ledger(self.job.id))
        started = self.job.started_at or self.job.created_at
        left = told.pop("ended_at", None)
        encoding = float((told.get("phases") or {}).get(ENCODING_VIDEO, 0.0))
        return {
            "queue_s": round(started - self.job.created_at, 3),
            **told,
            # What the worker still encoded when all frames were decoded, and what came between its last word and the
            # clip: that travels, and is encoded only now if the worker did not.
            "encode_s": None if left is None else round(encoding + max(0.0, made_at - float(left)), 3),
            "save_s": None if saved_at is None else round(saved_at - made_at, 3),
            "run_s": round((saved_at or made_at) - started, 3),
        }


def _too_long(deadline_s: float) -> Failure:
    return Failure(
        "deadline_exceeded",
        f"The job ran for longer than {deadline_s:.0f} s and was stopped. Ask for a shorter or smaller clip or "
        "fewer steps, or raise H3_JOB_TIMEOUT_S.",
        504,
    )
