# SPDX-License-Identifier: Apache-2.0
"""Records of jobs in one SQLite file, which a kill at any moment leaves whole."""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_h3_plugin.errors import BusyError, ServerError, UsageError
from vllm_h3_plugin.serving.jobs.job import Job, Status

DATABASE = "jobs.sqlite"
_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    key TEXT UNIQUE,
    status TEXT NOT NULL,
    owner TEXT NOT NULL,
    created_at REAL NOT NULL,
    ended_at REAL,
    nbytes INTEGER NOT NULL,
    record TEXT NOT NULL
)
"""
_COLUMNS = "id, key, status, owner, created_at, ended_at, nbytes, record"
_WAIT_S = 5.0
_RETRY_S = 10

log = logging.getLogger(__name__)


class JobStore:
    """All jobs of one storage folder. Several servers may share it; may be used from any thread.

    A record that cannot be written (the disk is full, the file is locked or damaged) is kept in memory and written with
    the next one that can: what a job came to must reach its caller even then.

    Raises (from everything but :meth:`put`):
        BusyError: the file cannot be used now.
    """

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            ServerError: the file is no database of this project's, or of a later version of it.
        """
        self.path = folder / DATABASE
        self._lock = threading.RLock()
        self._unsaved: dict[str, Job] = {}
        try:
            self._db = sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
            # A reader never waits for a writer, and what is committed stays committed when the power goes.
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            if version > _VERSION:
                raise sqlite3.DatabaseError(f"it was written by a later version (format {version}, not {_VERSION})")
            self._db.execute(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={_VERSION}")
        except sqlite3.DatabaseError as exc:
            raise ServerError(
                f"the job records in {self.path} cannot be used",
                why=str(exc),
                fix=f"Move {DATABASE}* there away; clips with a .json file beside them are listed again.",
            ) from exc

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def add(self, job: Job) -> None:
        """Keep a new job.

        Raises:
            BusyError: the disk is full.
            UsageError: its id or its key is taken; another server was faster.
        """
        with self._used("the job cannot be recorded") as db:
            try:
                db.execute(f"INSERT INTO jobs ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", _row(job))
            except sqlite3.IntegrityError as exc:
                raise UsageError(
                    f"job {job.id} cannot be recorded",
                    why="its Idempotency-Key was used at the same moment at another server",
                    fix="Ask again with the same key to join that job.",
                ) from exc

    def put(self, job: Job) -> bool:
        """Replace a job's record; False if the job was removed meanwhile."""
        with self._lock:
            try:
                for unsaved in (*self._unsaved.values(), job):
                    kept = self._update(unsaved)
                self._unsaved.clear()
                return kept
            except sqlite3.Error as exc:
                log.error("job=%s event=not_recorded reason=%r", job.id, str(exc))
                self._unsaved[job.id] = job
                return True

    def _update(self, job: Job) -> bool:
        assignments = ", ".join(f"{name}=?" for name in _COLUMNS.split(", "))
        return self._db.execute(f"UPDATE jobs SET {assignments} WHERE id=?", (*_row(job), job.id)).rowcount > 0

    def get(self, job_id: str) -> Job | None:
        """One job."""
        return next(iter(self._select("WHERE id=?", job_id)), None)

    def by_key(self, key: str) -> Job | None:
        """The job of an ``Idempotency-Key``."""
        return next(iter(self._select("WHERE key=?", key)), None)

    def listed(
        self, *, after: str | None = None, limit: int | None = None, newest_first: bool = True
    ) -> tuple[list[Job], bool]:
        """A page of all jobs, and whether more follow.

        Args:
            after: id of the last job of the page before; an unknown one gives an empty page, as the host does.
        """
        with self._used() as db:
            beyond, values = "", []
            if after is not None:
                found = db.execute("SELECT seq FROM jobs WHERE id=?", (after,)).fetchone()
                if found is None:
                    return [], False
                beyond, values = f"WHERE seq {'<' if newest_first else '>'} ?", [found[0]]
            order = f"ORDER BY seq {'DESC' if newest_first else 'ASC'}"
            jobs = self._select(f"{beyond} {order} LIMIT ?", *values, -1 if limit is None else limit + 1)
        return jobs[:limit], limit is not None and len(jobs) > limit

    def unfinished(self) -> list[Job]:
        """Jobs that are queued or in progress, oldest first; of every server."""
        return self._select("WHERE status IN (?, ?) ORDER BY seq", Status.QUEUED.value, Status.IN_PROGRESS.value)

    def ended(self) -> list[Job]:
        """Jobs that came to an end, oldest first."""
        return self._select("WHERE ended_at IS NOT NULL ORDER BY ended_at, seq")

    def ids(self) -> set[str]:
        """Ids of all jobs."""
        with self._used() as db:
            return {row[0] for row in db.execute("SELECT id FROM jobs")}

    def remove(self, job_ids: Iterable[str]) -> None:
        """Forget jobs; their keys are free again."""
        with self._used("the job cannot be removed") as db:
            for job_id in job_ids:
                self._unsaved.pop(job_id, None)
                db.execute("DELETE FROM jobs WHERE id=?", (job_id,))

    def _select(self, condition: str, *values: object) -> list[Job]:
        with self._used() as db:
            rows = db.execute(f"SELECT id, record FROM jobs {condition}", values).fetchall()
            return [self._unsaved.get(row[0]) or Job.from_record(json.loads(row[1])) for row in rows]

    @contextmanager
    def _used(self, what: str = "the job records cannot be read") -> Iterator[sqlite3.Connection]:
        """The database, by one thread at a time."""
        with self._lock:
            try:
                yield self._db
            except sqlite3.Error as exc:
                raise BusyError(
                    what,
                    why=f"{self.path}: {exc}",
                    fix="Free space on that disk, or end what locks the file, then ask again.",
                    retry_after_s=_RETRY_S,
                ) from exc


def recover(
    store: JobStore,
    alive: Callable[[str], bool],
    promoted: Callable[[Job], Job | None],
    interrupted: Callable[[Job, float], Job],
    clock: Callable[[], float] = time.time,
) -> tuple[list[Job], list[Job]]:
    """Give the jobs of servers that are gone their end.

    Args:
        alive: whether the server of an owner's token lives.
        promoted: the finished job, if its clip was promoted before its record was written.
        interrupted: the job as interrupted.

    Returns:
        Jobs that turned out to be finished, and those that were interrupted.
    """
    finished: list[Job] = []
    lost: list[Job] = []
    for job in store.unfinished():
        if alive(job.owner):
            continue
        done = promoted(job)
        (finished if done else lost).append(done or interrupted(job, clock()))
        store.put((finished if done else lost)[-1])
    return finished, lost


def _row(job: Job) -> tuple[object, ...]:
    record = json.dumps(job.as_record(), default=str)
    return (job.id, job.key, job.status.value, job.owner, job.created_at, job.ended_at, job.nbytes, record)
