# SPDX-License-Identifier: Apache-2.0
"""What the runner needs of the server around it: something that makes clips, a way to stop it, someone who counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_h3_plugin.serving.jobs.job import Failure, Job


@dataclass(frozen=True)
class Made:
    """A clip in memory.

    Attributes:
        data: the MP4 file.
        shown: fields for the job's wire format, as ``stage_durations`` and ``peak_memory_mb``.
    """

    data: bytes
    shown: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """A request as a job keeps it.

    Attributes:
        fingerprint: equal for equal requests; what an ``Idempotency-Key`` is held against.
        shown: fields of the wire format known beforehand, as ``size`` and ``num_frames``.
        most_waiting: refuse it if more wait already; None: the server's own limit alone.
    """

    model: str
    prompt: str
    shown: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    fingerprint: str | None = None
    sync: bool = False
    most_waiting: int | None = None


class Order(Protocol):
    """A request that is ready to be made."""

    async def make(self, job_id: str) -> Made:
        """Make the clip; returns or raises only when nothing works on it any more."""

    def close(self) -> None:
        """Drop what was kept for it, as reference files. May be called again."""


class Worker(Protocol):
    """What makes clips, seen from outside."""

    def progress(self) -> Mapping[str, Any] | None:
        """What it last wrote about where it is; None where it writes nothing."""

    def ledger(self, job_id: str) -> Mapping[str, Any]:
        """Where the time and memory of a job that it has ended with went; empty if it told nothing."""

    def stop(self, job_id: str) -> bool:
        """Tell it to stop working on a job; :meth:`Order.make` raises at its next look. May be called again.

        Returns:
            False: it cannot be told, and the order must be cancelled.
        """

    def explain(self, error: Exception) -> Failure:
        """What an error of :meth:`Order.make` means to the caller."""


class Observer:
    """Is told what happens to jobs. This one does not listen."""

    def line(self, length: int) -> None:
        """The line has this length now."""

    def started(self, job: Job) -> None:
        """A job left the line."""

    def ended(self, job: Job) -> None:
        """A job ended; its ledger is whole."""
