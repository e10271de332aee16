# SPDX-License-Identifier: Apache-2.0
"""Holds a request against H3 and against this server."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from vllm_h3_plugin.serving.rules import adapter, canvas, conditions, length
from vllm_h3_plugin.serving.rules.accepted import Accepted, ReferenceFacts
from vllm_h3_plugin.serving.rules.ask import CHOSEN_SEED_BITS, SEED_MAX, VideoAsk
from vllm_h3_plugin.serving.rules.extra import check_extra
from vllm_h3_plugin.serving.rules.fault import Fault
from vllm_h3_plugin.serving.rules.findings import Findings, strict_faults
from vllm_h3_plugin.serving.rules.limits import Limits
from vllm_h3_plugin.serving.rules.names import UNUSED


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
    findings = Findings(ask, list(found))
    missing = any(fault.field == "prompt" for fault in found)
    if not ask.prompt.strip() and not missing:
        findings.fault("prompt", ask.prompt or None, "it is empty", "text", code="missing_parameter")
    if ask.model is not None and limits.model is not None and ask.model != limits.model:
        findings.fault("model", ask.model, f"this server serves {limits.model}", limits.model, limits.model)
    task = conditions.task_of(findings, limits, references)
    indices = conditions.frame_indices(task, findings, references)
    size = canvas.resolve(task, findings, limits, references)
    frames = length.resolve(task, findings, limits)
    sampling = adapter.resolve(findings, limits, task)
    findings.within("n", ask.n, 1, limits.outputs)
    seed = secrets.randbits(CHOSEN_SEED_BITS) if ask.seed is None else ask.seed
    if seed + ask.n - 1 > SEED_MAX:
        findings.fault("seed", seed, f"the {ask.n} clips take as many seeds", nearest=SEED_MAX - ask.n + 1)
    extra = check_extra(findings, limits)
    for name, value in ask.unused:
        findings.snap(name, value, None, f"it has no effect: {UNUSED[name.rpartition('.')[2]]}")
    faults = [*findings.faults, *(strict_faults(findings.snaps) if ask.strict else ())]
    if faults or task is None or size is None or frames is None:
        return faults
    accepted = Accepted(
        prompt=ask.prompt,
        task=task,
        width=size[0],
        height=size[1],
        frames=frames,
        steps=sampling.steps,
        steps_pinned=sampling.pinned,
        seed=seed,
        outputs=ask.n,
        aspect_ratio=size[2],
        flow_shift=sampling.flow_shift,
        audio_flow_shift=sampling.audio_flow_shift,
        frame_indices=indices,
        quality=ask.quality,
        lora=sampling.lora,
        adapter=sampling.adapter,
        model=ask.model,
        user=ask.user,
        start_time_seconds=ask.start_time_seconds if any(ref.kind == "video" for ref in references) else None,
        extra=extra,
        references=tuple(references),
        seed_chosen=ask.seed is None,
        return_stage_metrics=ask.return_stage_metrics,
        snaps=tuple(findings.snaps),
    )
    return _fits(accepted, findings, limits)


def _fits(accepted: Accepted, findings: Findings, limits: Limits) -> Accepted | list[Fault]:
    """Whether this server can make it at all: last, since that takes the clip as it will be made."""
    misfit = limits.misfit(accepted) if limits.misfit is not None else None
    if misfit is None:
        return accepted
    ask = findings.ask
    field = "seconds" if ask.seconds is not None else "num_frames"
    nearest: float | int | None = misfit.frames
    if misfit.frames is not None and misfit.frames >= accepted.frames:
        nearest = None  # It is not the length that is too much.
    if nearest is not None and field == "seconds":
        nearest = round(nearest / length.FPS, 4)
    if nearest is None:
        field = "size" if ask.width is None else "width"
    value = {"seconds": ask.seconds, "num_frames": ask.num_frames, "size": ask.size, "width": ask.width}[field]
    findings.fault(
        field,
        value,
        f"{accepted.size} with {accepted.frames} frames: {misfit.why}",
        misfit.fits,
        nearest,
        misfit.code,
    )
    return findings.faults
