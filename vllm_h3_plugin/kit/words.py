# SPDX-License-Identifier: Apache-2.0
"""Numbers and progress in words, the same in every verb."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from typing import Any

GIB = 2**30

# ECMA-48: control sequences, strings that a terminal takes as title or clipboard, two-character escapes.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]).*?(?:\x07|\x1b\\|\x9c|$)|\x1b[ -/]*[0-~]?",
    re.DOTALL,
)
# What is left of control characters, what turns the direction of text, and what cannot be printed as UTF-8.
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """Text of a server, a log or an engine without what a terminal would obey. Lines and tabs stay."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text)).replace("\r\n", "\n").replace("\r", "\n")


def plain_line(line: str) -> str:
    """One line of a log as a terminal shows it in the end: a bar that overwrites itself leaves its last state."""
    return plain(_ESCAPES.sub("", line).rstrip().rpartition("\r")[2])


def call(verb: str, *words: str) -> str:
    """A verb as its reader calls it: by make where make started this process, for its user has no ``vllm-h3`` on PATH.

    Args:
        words: flags; each may hold several, or none.
    """
    flags = " ".join(word.strip() for word in words if word.strip())
    if not os.environ.get("MAKELEVEL"):
        return f"vllm-h3 {verb} {flags}".rstrip()
    return f"make {verb}" + (f" ARGS={shlex.quote(flags)}" if flags else "")


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
    each, steps, moved = progress.get("seconds_per_step"), progress.get("steps"), progress.get("time")
    if not each or not steps or moved is None:
        return None
    since = max(0.0, now - float(moved))
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
