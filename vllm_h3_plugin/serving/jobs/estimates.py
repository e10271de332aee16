# SPDX-License-Identifier: Apache-2.0
"""What this server's last clips say about the next ones. Pure."""

from __future__ import annotations

from collections import deque

from vllm_h3_plugin.serving.jobs.job import Job

_LAST = 8


class Estimates:
    """Remembers the last clips that were made."""

    def __init__(self) -> None:
        self._made: deque[Job] = deque(maxlen=_LAST)

    def add(self, job: Job) -> None:
        """A clip was made."""
        self._made.append(job)

    def tail_s(self) -> float | None:
        """Seconds that decoding, encoding and saving took for the last clip; None: there is none."""
        if not self._made:
            return None
        ledger = self._made[-1].ledger
        phases = ledger.get("phases") or {}
        decode = sum(float(seconds) for name, seconds in phases.items() if str(name).startswith("decoding"))
        return decode + float(ledger.get("encode_s") or 0.0) + float(ledger.get("save_s") or 0.0)

    def left_s(self, running: Job, now: float) -> float | None:
        """Seconds until a job ends, if it takes as long as the last ones did; None: there are none."""
        if not self._made:
            return None
        mean = sum(float(job.ledger.get("run_s") or 0.0) for job in self._made) / len(self._made)
        return max(1.0, mean - (now - (running.started_at or now)))
