# SPDX-License-Identifier: Apache-2.0
"""Files of finished jobs: ``ID.mp4`` is whole or not there, and ``ID.json`` beside it tells how it was made."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from vllm_h3_plugin.checkpoint.file_lock import HeldLock, hold
from vllm_h3_plugin.serving.jobs.job import Job

_OURS = re.compile(r"(?P<id>video_[A-Za-z0-9_-]+)\.(mp4|json)(\.part)?")


class Clips:
    """The folder of finished clips."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, job_id: str) -> Path:
        """Where the clip of a job is, once it is finished."""
        return self.folder / f"{job_id}.mp4"

    def save(self, job: Job, data: bytes, finish: Callable[[int, str], Job]) -> Job:
        """Write a job's clip and the record beside it.

        The record has its name before the clip has: whoever finds the clip under its name finds all that there is to
        know about it, whatever happened to the database.

        Args:
            finish: the finished job, from the number of bytes and their SHA-256 in hexadecimal.

        Raises:
            OSError: the disk is full or cannot be written; nothing of the job is left then.
        """
        try:
            # Whoever cleans /tmp takes folders along that nobody has used for days.
            self.folder.mkdir(parents=True, exist_ok=True)
            part = self._part(self.path(job.id))
            _write(part, data)
            done = finish(len(data), hashlib.sha256(data).hexdigest())
            beside = self._beside(job.id)
            _write(self._part(beside), json.dumps(done.as_record(), indent=2, default=str).encode())
            self._part(beside).replace(beside)
            part.replace(self.path(job.id))
            _fsync(self.folder)
            return done
        except BaseException:
            self.remove(job.id)
            raise

    def promoted(self, job: Job) -> Job | None:
        """The finished job, if its clip has its name; None if it does not, or does not have all its bytes."""
        try:
            done = Job.from_record(json.loads(self._beside(job.id).read_text(encoding="utf-8")))
            return done if self.path(job.id).stat().st_size == done.nbytes else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def adopted(self, known: Iterable[str]) -> list[Job]:
        """Finished jobs that only their files tell of: the database was lost or moved away. Without their keys."""
        strangers = {path.stem for path in self.folder.glob("*.json")} - set(known)
        jobs = [self.promoted(Job(job_id, "", "", 0, "", 0)) for job_id in sorted(strangers)]
        found = [replace(job, key=None, fingerprint=None) for job in jobs if job is not None]
        return sorted(found, key=lambda job: job.created_at)

    def remove(self, job_id: str) -> None:
        """Remove a job's files, finished or not. Files that are not there are no fault."""
        for path in (self.path(job_id), self._beside(job_id)):
            for found in (path, self._part(path)):
                with contextlib.suppress(FileNotFoundError):
                    found.unlink()

    def sweep(self, known: Iterable[str], running: Iterable[str]) -> list[str]:
        """Remove files of jobs that no record tells of, and unfinished ones of jobs that do not run.

        Returns:
            Their names. Files that are not of this project's making stay.
        """
        kept, living, gone = set(known), set(running), []
        for path in sorted(self.folder.iterdir()):
            match = _OURS.fullmatch(path.name)
            if match is None or match["id"] in living:
                continue
            if match["id"] not in kept or path.suffix == ".part":
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                gone.append(path.name)
        return gone

    def _beside(self, job_id: str) -> Path:
        return self.folder / f"{job_id}.json"

    @staticmethod
    def _part(path: Path) -> Path:
        return path.with_name(path.name + ".part")


class Owners:
    """Which server processes live: each holds a lock in the storage folder for as long as it does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._mine: HeldLock | None = None

    def enter(self, token: str) -> None:
        """Take this process's lock.

        Raises:
            SnapshotError: the file system has no file locks.
        """
        self._mine = hold(self.folder / token)

    def leave(self) -> None:
        """Give it back."""
        if self._mine is not None:
            self._mine.release(remove=True)
            self._mine = None

    def alive(self, token: str) -> bool:
        """Whether the process with this token lives; its lock file is removed if it does not."""
        path = self.folder / token
        if not path.exists():
            return False
        lock = hold(path)
        if lock is None:
            return True
        lock.release(remove=True)
        return False


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
