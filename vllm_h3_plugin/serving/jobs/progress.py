# SPDX-License-Identifier: Apache-2.0
"""How far a job is: phase, step, percent and seconds left, from what the worker writes down. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_h3_plugin.serving.jobs.job import Job, Status

QUEUED = "queued"
STARTING = "starting"
ENCODING_TEXT = "encoding text"
BUILDING_TABLE = "building table"
DENOISING = "denoising"
DECODING = "decoding"
DECODING_AND_ENCODING = "decoding and encoding"
ENCODING_VIDEO = "encoding video"
IDLE = "idle"

# Phase -> percent at which it begins and ends. Shares of time differ with size and steps; a bar only has to move on.
_SPAN: Mapping[str, tuple[int, int]] = {
    STARTING: (0, 0),
    ENCODING_TEXT: (1, 1),
    BUILDING_TABLE: (2, 4),
    DENOISING: (5, 90),
    DECODING: (91, 91),
    DECODING_AND_ENCODING: (91, 91),
    ENCODING_VIDEO: (96, 96),
}


@dataclass(frozen=True)
class Progress:
    """One look at a job.

    Attributes:
        step, steps: denoise steps done and in all; of a table, tenths.
        percent: never less than at an earlier look.
        seconds_left: None where no step of this job was measured yet. What follows the steps (decoding, encoding) is
            counted once this server has made a clip, by pixels.
    """

    phase: str
    percent: int = 0
    step: int = 0
    steps: int | None = None
    seconds_left: float | None = None
    seconds_per_step: float | None = None
    position: int | None = None

    def as_fields(self) -> dict[str, Any]:
        """Fields of the wire format. ``queue_position`` is 1 for the job that is next."""
        left = self.seconds_left
        return {
            "phase": self.phase,
            "progress": self.percent,
            "step": self.step,
            "steps": self.steps,
            "seconds_left": None if left is None else round(left, 1),
            "seconds_per_step": self.seconds_per_step,
            "queue_position": self.position,
        }


def belongs(worker: Mapping[str, Any] | None, job_id: str) -> bool:
    """Whether what the worker wrote is about this job: the host makes ``JOB-UUID`` of an id (async_omni.py)."""
    return str((worker or {}).get("request") or "").startswith(job_id)


def look(
    job: Job,
    worker: Mapping[str, Any] | None,
    now: float,
    *,
    before: Progress | None = None,
    position: int | None = None,
    tail_s: float | None = None,
) -> Progress:
    """How far a job is.

    Args:
        worker: what the worker last wrote; None where it writes nothing.
        before: the look before, which this one never falls behind.
        position: in the line, from 1.
        tail_s: seconds that decoding, encoding and saving will take, if known.
    """
    if job.status.ended:
        percent = 100 if job.status is Status.COMPLETED else (before.percent if before else 0)
        return Progress(job.status.value, percent)
    if job.status is Status.QUEUED:
        return Progress(QUEUED, position=position)
    seen = _running(worker, now, tail_s) if worker is not None and belongs(worker, job.id) else Progress(STARTING)
    return replace(seen, percent=max(seen.percent, before.percent)) if before else seen


def _running(worker: Mapping[str, Any], now: float, tail_s: float | None) -> Progress:
    phase = str(worker.get("phase"))
    if phase == IDLE:
        # The worker is done with this job, and the job is not: the clip is being encoded.
        return Progress(ENCODING_VIDEO, _SPAN[ENCODING_VIDEO][0])
    first, last = _SPAN.get(phase, (1, 1))
    step, steps, each = int(worker.get("step") or 0), worker.get("steps"), worker.get("seconds_per_step")
    percent = first + int((last - first) * min(1.0, step / steps)) if steps else first
    left = None
    if phase == DENOISING and steps and each and step:
        since = max(0.0, now - float(worker.get("time") or now))
        left = max(0.0, (steps - step) * each - min(since, each)) + (tail_s or 0.0)
    return Progress(phase, percent, step, steps, left, each)
