# SPDX-License-Identifier: Apache-2.0
"""Which finished jobs go, record and file together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_h3_plugin.serving.jobs.job import Job


@dataclass(frozen=True)
class Retention:
    """How long and how much is kept.

    Attributes:
        ttl_s: seconds after its end that a job is kept; None: without end.
        quota_bytes: bytes of clips that are kept; None: whatever the disk holds.
    """

    ttl_s: float | None = None
    quota_bytes: int | None = None

    def expires_at(self, job: Job) -> float | None:
        """When a job goes, in seconds since 1970; None: not by age."""
        return None if self.ttl_s is None or job.ended_at is None else job.ended_at + self.ttl_s

    def gone(self, ended: Sequence[Job], now: float) -> list[str]:
        """Ids of jobs that must go.

        Args:
            ended: jobs that came to an end, oldest first. The newest clip stays even if it alone is over the quota.
        """
        old = [job.id for job in ended if (end := self.expires_at(job)) is not None and end <= now]
        if self.quota_bytes is None:
            return old
        expired = set(old)
        clips = [job for job in ended if job.nbytes and job.id not in expired]
        over = sum(job.nbytes for job in clips) - self.quota_bytes
        for job in clips[:-1]:
            if over <= 0:
                break
            old.append(job.id)
            over -= job.nbytes
        return old
