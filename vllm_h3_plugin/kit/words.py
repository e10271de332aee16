# SPDX-License-Identifier: Apache-2.0
"""Numbers and progress in words, the same in every verb."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GIB = 2**30


def gib(nbytes: float) -> str:
    """``12.3 GiB``."""
    return f"{nbytes / GIB:.1f} GiB"


def span(seconds: float) -> str:
    """``45 s``, ``5 min 33 s``, ``2 h 5 min``, ``3 d 2 h``."""
    whole = max(0, round(seconds))
    for unit, size, below, small in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"


def seconds_left(progress: Mapping[str, Any], now: float) -> float | None:
    """Until the last denoise step is done, by the steps measured so far; None before there is one."""
    each, steps = progress.get("seconds_per_step"), progress.get("steps")
    if not each or not steps:
        return None
    since = max(0.0, now - float(progress["time"]))
    return float(max(0.0, (steps - progress["step"]) * each - min(since, each)))


def doing(progress: Mapping[str, Any], now: float) -> str:
    """What a request is at: ``denoising, step 7 of 50, 7.8 s a step, 5 min 33 s left``."""
    parts = [str(progress["phase"])]
    total = progress.get("total_bytes")
    if total:
        parts.append(f"{gib(progress['done_bytes'])} of {gib(total)}")
    elif progress.get("steps"):
        parts.append(f"step {progress['step']} of {progress['steps']}")
    each, left = progress.get("seconds_per_step"), seconds_left(progress, now)
    if each and left is not None:
        parts += [f"{each:.1f} s a step" if each < 100 else f"{span(each)} a step", f"{span(left)} left"]
    return ", ".join(parts)
