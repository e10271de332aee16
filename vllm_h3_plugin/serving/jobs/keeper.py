# SPDX-License-Identifier: Apache-2.0
"""Records and files of jobs kept together: in order after a kill, within their age and size, gone at once."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from vllm_h3_plugin.serving.jobs.clips import Clips, Owners
from vllm_h3_plugin.serving.jobs.job import Failure, Job
from vllm_h3_plugin.serving.jobs.retention import Retention
from vllm_h3_plugin.serving.jobs.store import JobStore, recover

log = logging.getLogger(__name__)

FOLDER = "h3"
"""Below the host's storage folder, whose own sweeper removes every old file that lies directly in it."""

INTERRUPTED = Failure(
    "interrupted", "The server was stopped or died while it worked on this clip. Ask for it again.", 503
)


class Keeper:
    """What is on the disk, for one server process. For threads: everything here may wait for the disk."""

    def __init__(self, storage: Path, retention: Retention, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            storage: the host's storage folder; everything is in ``h3`` below it.

        Raises:
            ServerError: the records there cannot be used.
            OSError: the folder cannot be made.
        """
        folder = storage / FOLDER
        self.clips = Clips(folder / "clips")
        self.store = JobStore(folder)
        self.retention = retention
        self.owner = secrets.token_hex(8)
        self._owners = Owners(folder / "servers")
        self._clock = clock

    def open(self) -> None:
        """Bring everything in order after whatever happened before.

        Raises:
            SnapshotError: the file system has no file locks.
        """
        self._owners.enter(self.owner)
        for job in self.clips.adopted(self.store.ids()):
            self.store.add(job)
            event(job, "adopted", "its clip lay there without a record")
        self._recover()
        running = {job.id for job in self.store.unfinished()}
        for name in self.clips.sweep(self.store.ids(), running):
            log.info("event=swept file=%s reason=%r", name, "no job of a living server owns it")

    def close(self) -> None:
        """Close the records; the jobs of this process belong to nobody from now on."""
        self._owners.leave()
        self.store.close()

    def end(self, job: Job) -> None:
        """Record how a job ended. One that was deleted meanwhile leaves nothing."""
        if not self.store.put(job):
            self.clips.remove(job.id)

    def forget(self, job_ids: Iterable[str]) -> None:
        """Remove jobs, record and files."""
        # Files first: a record without its file can be removed again, a file without a record is only found by a sweep.
        job_ids = list(job_ids)
        for job_id in job_ids:
            self.clips.remove(job_id)
        self.store.remove(job_ids)

    def _recover(self) -> None:
        """Give the jobs of servers that are gone their end."""
        finished, lost = recover(
            self.store, self._owners.alive, self.clips.promoted, lambda job, now: job.failed(INTERRUPTED, now)
        )
        for job in finished:
            event(job, "recovered", "its clip was whole before the server went")
        for job in lost:
            event(job, "interrupted", "its server is gone")

    def tidy(self) -> list[str]:
        """Remove the jobs that are too old or too much; returns their ids. Jobs of another server of this folder that
        is gone, and that nobody may start again, get their end here."""
        self._recover()
        gone = self.retention.gone(self.store.ended(), self._clock())
        self.forget(gone)
        for job_id in gone:
            log.info("job=%s event=expired", job_id)
        return gone


def event(job: Job, what: str, more: str) -> None:
    """One line of the log that programs can read: ``job=… event=… name=value …``."""
    log.info("job=%s event=%s %s", job.id, what, more)
