# SPDX-License-Identifier: Apache-2.0
"""Holds a request against H3 and against this server."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from vllm_h3_plugin.memory.requests import FPS
from vllm_h3_plugin.serving.rules.accepted import Accepted, ReferenceFacts
from vllm_h3_plugin.serving.rules.ask import CHOSEN_SEED_BITS, VideoAsk
from vllm_h3_plugin.serving.rules.fault import Fault
from vllm_h3_plugin.serving.rules.limits import Limits
from vllm_h3_plugin.video.geometry import snap_frames, snap_size


def check(
    ask: VideoAsk, limits: Limits, references: Sequence[ReferenceFacts] = (), found: Sequence[Fault] = ()
) -> Accepted | list[Fault]:
    """What will be made of a request, or everything that is wrong with it.

    Args:
        ask: what :func:`.read.read` understood.
        limits: this server's.
        references: facts of the references that were loaded, in order.
        found: faults so far, from reading fields and references; they come first in the answer.
    """
    faults = [*found]
    if not ask.prompt.strip():
        faults.append(Fault("prompt", ask.prompt or None, "it is empty", "text", code="missing_parameter"))
    if ask.fps is not None and ask.fps != FPS:
        faults.append(Fault("fps", ask.fps, f"H3 makes {FPS} frames a second", str(FPS), FPS))
    if faults:
        return faults
    width, height = snap_size(*(int(side) for side in (ask.size or "1344x768").split("x")))
    return Accepted(
        ask.prompt,
        ask.task or "t2va",
        width,
        height,
        snap_frames(ask.num_frames or 209),
        ask.num_inference_steps or limits.steps,
        secrets.randbits(CHOSEN_SEED_BITS) if ask.seed is None else ask.seed,
        seed_chosen=ask.seed is None,
        references=tuple(references),
    )
