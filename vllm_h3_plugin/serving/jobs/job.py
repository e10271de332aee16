# SPDX-License-Identifier: Apache-2.0
"""One job as a value: what was asked, how far it is, how it ended, and how it is shown to OpenAI-style clients."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any


class Status(Enum):
    """States of a job. A client sees ``cancelled`` as ``failed``: OpenAI's clients know four states and no more."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing follows."""
        return self not in (Status.QUEUED, Status.IN_PROGRESS)


# From a state to those that may follow. A queued job can fail: its server was killed, or its disk is full.
_NEXT: Mapping[Status, frozenset[Status]] = {
    Status.QUEUED: frozenset({Status.IN_PROGRESS, Status.FAILED, Status.CANCELLED}),
    Status.IN_PROGRESS: frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED}),
}


@dataclass(frozen=True)
class Failure:
    """Why a job has no clip.

    Attributes:
        code: a word for programs: ``interrupted``, ``cancelled``, ``deadline_exceeded``, ``disk_full``,
            ``insufficient_memory``, ``invalid_request``, ``engine_dead`` or ``generation_failed``.
        message: for people.
        http_status: what ``/v1/videos/sync`` answers with. A job's own GET is 200 all the same.
    """

    code: str
    message: str
    http_status: int = 500


LOST = frozenset({"interrupted", "engine_dead", "insufficient_memory", "disk_full", "not_saved"})
"""Codes of failures that are no fault of the request: the same one, asked again, may be made."""


@dataclass(frozen=True)
class Job:
    """One job.

    Attributes:
        created_at, started_at, ended_at: seconds since 1970.
        owner: token of the server process that runs it.
        key: the caller's ``Idempotency-Key``; ``fingerprint``: digest of the request that came with it.
        sync: it was asked for at ``/v1/videos/sync``.
        deadline_s: longest that it may run, in seconds, from its start.
        nbytes, sha256: of the clip.
        shown: further fields of the wire format (``size``, ``num_frames``, ``stage_durations``, …).
        ledger: where its time and memory went.
    """

    id: str
    model: str
    prompt: str
    created_at: float
    owner: str
    deadline_s: float
    status: Status = Status.QUEUED
    key: str | None = None
    fingerprint: str | None = None
    sync: bool = False
    started_at: float | None = None
    ended_at: float | None = None
    failure: Failure | None = None
    nbytes: int = 0
    sha256: str | None = None
    shown: Mapping[str, Any] = field(default_factory=dict)
    ledger: Mapping[str, Any] = field(default_factory=dict)

    def moved(self, status: Status, now: float, **changes: Any) -> Job:
        """This job in its next state, with the time of the move.

        Raises:
            ValueError: the state cannot follow; a fault of this program.
        """
        if status not in _NEXT.get(self.status, frozenset()):
            raise ValueError(f"job {self.id} is {self.status.value} and cannot become {status.value}")
        times = {"started_at": now} if status is Status.IN_PROGRESS else {"ended_at": now}
        return replace(self, status=status, **{**times, **changes})

    def failed(self, failure: Failure, now: float, **changes: Any) -> Job:
        """This job as failed, or as cancelled where that is the reason."""
        status = Status.CANCELLED if failure.code == "cancelled" else Status.FAILED
        return self.moved(status, now, failure=failure, **changes)

    def as_record(self) -> dict[str, Any]:
        """For the database and the file beside the clip; :meth:`from_record` reads it."""
        return {**asdict(self), "status": self.status.value}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Job:
        """The job that :meth:`as_record` wrote; fields of a later version are left out.

        Raises:
            KeyError, TypeError, ValueError: it is no such record.
        """
        known = {name: value for name, value in record.items() if name in cls.__dataclass_fields__}
        failure = known.get("failure")
        return cls(**{**known, "status": Status(record["status"]), "failure": Failure(**failure) if failure else None})


def new_id(replica: str = "") -> str:
    """An id in the form of the host's (protocol/videos.py, ``VideoResponse.id``).

    Args:
        replica: name of the server among several; stands in the id, so that a balancer finds the job by it.
    """
    return f"video_gen_{replica}{'_' if replica else ''}{uuid.uuid4().hex}"


def wire(job: Job, progress: Mapping[str, Any], expires_at: float | None = None) -> dict[str, Any]:
    """The job as its GET shows it: OpenAI's video object, the host's further fields, and this plugin's.

    Args:
        progress: ``phase``, ``progress`` (percent) and what else is known of the run.
    """
    failed = job.failure is not None
    done = job.status is Status.COMPLETED
    return {
        "id": job.id,
        "object": "video",
        "model": job.model,
        "prompt": job.prompt,
        "created_at": int(job.created_at),
        "started_at": None if job.started_at is None else int(job.started_at),
        "completed_at": None if job.ended_at is None else int(job.ended_at),
        "expires_at": None if expires_at is None else int(expires_at),
        "error": {"code": job.failure.code, "message": job.failure.message} if job.failure else None,
        "remixed_from_video_id": None,
        "media_type": "video/mp4",
        "file_name": f"{job.id}.mp4" if done else None,
        "bytes": job.nbytes if done else None,
        "sha256": job.sha256,
        "inference_time_s": job.ledger.get("run_s"),
        **job.shown,
        **progress,
        "status": Status.FAILED.value if failed else job.status.value,
        "ledger": dict(job.ledger) or None,
    }
