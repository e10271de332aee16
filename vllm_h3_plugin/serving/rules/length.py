# SPDX-License-Identifier: Apache-2.0
"""Frames of a clip: asked in seconds or in frames, made as 17n + 5 at 24 a second."""

from __future__ import annotations

import math

from vllm_h3_plugin.memory.requests import SHORTEST_S
from vllm_h3_plugin.serving.rules.accepted import Task
from vllm_h3_plugin.serving.rules.findings import Findings
from vllm_h3_plugin.serving.rules.limits import Limits
from vllm_h3_plugin.video.geometry import FPS, FRAME_OFFSET, FRAME_PERIOD, frames_of_seconds, snap_frames

DEFAULT_FRAMES: dict[Task, int] = {"t2va": 209, "fl2va": 209, "ref2va": 124}
"""Where no length is given (vLLM-Omni 0.30.0 and 0.28.0, ``resolve_minimax_h3_shape``)."""

_WHY = f"a clip has {FRAME_PERIOD}n+{FRAME_OFFSET} frames at {FPS} a second"


def shortest_frames(limits: Limits) -> int:
    """Fewest frames that may be asked for: those of the shortest clip, before they are snapped."""
    return math.ceil(max(limits.shortest_s, SHORTEST_S) * FPS)


def longest_frames(limits: Limits) -> int:
    """Frames of the longest clip as it is delivered."""
    return frames_of_seconds(limits.longest_s)


def resolve(task: Task | None, found: Findings, limits: Limits) -> int | None:
    """Frames that will be made; None with a fault."""
    ask = found.ask
    if ask.fps is not None and ask.fps != FPS:
        found.fault("fps", ask.fps, f"H3 makes {FPS} frames a second", str(FPS), FPS)
    lengths = [made for made in (_seconds(found, limits), _frames(found, limits)) if made is not None]
    if 0 in lengths:
        return None
    if not lengths:
        return min(DEFAULT_FRAMES[task or "t2va"], longest_frames(limits))
    if len(set(lengths)) > 1:
        found.fault(
            "num_frames",
            ask.num_frames,
            f"{found.name('seconds')}={ask.seconds:g} makes {lengths[0]} frames",
            "one of the two",
            lengths[0],
        )
        return None
    return lengths[0]


def _seconds(found: Findings, limits: Limits) -> int | None:
    """Frames for the seconds asked; None if none are; 0 with a fault."""
    asked = found.ask.seconds
    if asked is None:
        return None
    longest = longest_frames(limits)
    # Up to what the longest clip lasts: that is what was told to whoever asked for 15 s.
    snapped = limits.longest_s < asked and round(asked * FPS) <= longest
    if not snapped and not found.within("seconds", asked, limits.shortest_s, limits.longest_s, " seconds"):
        return 0
    made = min(frames_of_seconds(asked), longest)
    if made != round(asked * FPS):
        found.snap("seconds", asked, round(made / FPS, 4), _WHY)
    return made


def _frames(found: Findings, limits: Limits) -> int | None:
    """Frames for the frames asked; None if none are; 0 with a fault."""
    asked = found.ask.num_frames
    if asked is None:
        return None
    if not found.within("num_frames", asked, shortest_frames(limits), longest_frames(limits)):
        return 0
    made = snap_frames(asked)
    if made != asked:
        found.snap("num_frames", asked, made, _WHY)
    return made
