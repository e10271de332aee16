# SPDX-License-Identifier: Apache-2.0
"""Whether a worker that should be busy still moves. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_h3_plugin.serving.jobs.progress import DENOISING, IDLE

PATIENCE_S = 120.0
"""No phase is called stuck sooner: a first step warms up, and a disk may be slow for once."""


def move(worker: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """What differs from one move of the worker to the next. How long it stays the same is for a clock that nobody sets:
    by the times in it, a clock that is set forward would make every worker stuck."""
    return tuple((worker or {}).get(name) for name in ("request", "phase", "step", "time"))


def stuck(worker: Mapping[str, Any] | None, still: float, *, factor: float, phase_s: float) -> str | None:
    """Why the worker counts as stuck; None: it moves, or has nothing to do.

    Args:
        worker: what it last wrote.
        still: seconds since its last move.
        factor: times its measured length that a step may take.
        phase_s: seconds that anything else may take without a move.
    """
    if worker is None or worker.get("phase") == IDLE or worker.get("busy_since") is None:
        return None
    each = worker.get("seconds_per_step")
    # One step is only measured together with what it warms up; from the second on it is known.
    measured = worker.get("phase") == DENOISING and each and int(worker.get("step") or 0) > 1
    most = max(PATIENCE_S, factor * float(each)) if measured and each else max(PATIENCE_S, phase_s)
    if still <= most:
        return None
    what = f"step {int(worker.get('step') or 0) + 1} of {worker.get('steps')}" if measured else worker.get("phase")
    usual = f", {still / float(each):.0f} times what a step takes here" if measured and each else ""
    return f"{what} has not moved for {still:.0f} s{usual}"
