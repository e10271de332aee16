# SPDX-License-Identifier: Apache-2.0
"""A service with a made-up worker, whose every step a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from vllm_h3_plugin.serving.jobs.job import Failure, Job
from vllm_h3_plugin.serving.jobs.made import Asked, Made, Observer
from vllm_h3_plugin.serving.jobs.service import JobService, Rules

CLIP = b"not really an mp4 file"


class FakeWorker:
    """Does what a test tells it; stops orders when it is told to."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None
        self.told: dict[str, Any] = {}
        self.stopped: list[str] = []
        self.deaf = False
        self.orders: dict[str, FakeOrder] = {}

    def progress(self) -> Mapping[str, Any] | None:
        return self.state

    def ledger(self, job_id: str) -> Mapping[str, Any]:
        return self.told

    def stop(self, job_id: str) -> bool:
        if self.deaf:
            return False
        self.stopped.append(job_id)
        if job_id in self.orders:
            self.orders[job_id].end.set()
        return True

    def explain(self, error: Exception) -> Failure:
        return Failure("generation_failed", str(error))


class FakeOrder:
    """Runs until ``end`` is set; fails if ``error`` is."""

    def __init__(self, worker: FakeWorker, error: Exception | None = None, *, at_once: bool = False) -> None:
        self._worker = worker
        self.error = error
        self.end = asyncio.Event()
        self.began = asyncio.Event()
        self.closed = 0
        if at_once:
            self.end.set()

    async def make(self, job_id: str) -> Made:
        self._worker.orders[job_id] = self
        self.began.set()
        if job_id not in self._worker.stopped:
            await self.end.wait()
        if job_id in self._worker.stopped:
            raise RuntimeError("stopped by its flag")
        if self.error is not None:
            raise self.error
        return Made(CLIP, {"peak_memory_mb": 1.0})

    def close(self) -> None:
        self.closed += 1


class Told(Observer):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.ends: list[Job] = []

    def line(self, length: int) -> None:
        self.lengths.append(length)

    def ended(self, job: Job) -> None:
        self.ends.append(job)


def asked(key: str | None = None, fingerprint: str = "a", **shown: Any) -> Asked:
    return Asked("h3", "a red kite", shown, key, fingerprint if key else None)


@asynccontextmanager
async def serving(folder: Path, rules: Rules | None = None) -> AsyncIterator[tuple[JobService, FakeWorker]]:
    """A service that works."""
    worker = FakeWorker()
    service = JobService(folder, worker, rules or Rules(), Told())
    await service.start()
    try:
        yield service, worker
    finally:
        await service.stop()


async def finished(service: JobService, worker: FakeWorker) -> Job:
    """A finished job."""
    job, _ = await service.submit(asked(), FakeOrder(worker, at_once=True))
    ended = await service.wait(job.id)
    assert ended is not None
    return ended
