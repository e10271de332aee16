# SPDX-License-Identifier: Apache-2.0
"""The adapter of a request, and what it asks of the request: a distilled one has its own steps, shifts and tasks."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from pathlib import Path

from vllm_h3_plugin.checkpoint.adapter import Adapter
from vllm_h3_plugin.errors import AdapterError
from vllm_h3_plugin.serving.rules.accepted import Lora, Task
from vllm_h3_plugin.serving.rules.ask import MAX_STEPS
from vllm_h3_plugin.serving.rules.findings import Findings
from vllm_h3_plugin.serving.rules.limits import Limits


@dataclass(frozen=True)
class Sampling:
    """How a request is denoised.

    Attributes:
        lora: what the host is told; None where there is no adapter, or it is a part of the weights.
        adapter: file name of the one that takes effect.
        steps: denoise evaluations.
        pinned: the schedule comes with the weights or the adapter, and the host counts its intervals on both versions.
        flow_shift, audio_flow_shift: None means the checkpoint's.
    """

    lora: Lora | None
    adapter: str | None
    steps: int
    pinned: bool
    flow_shift: float | None
    audio_flow_shift: float | None


def resolve(found: Findings, limits: Limits, task: Task | None) -> Sampling:
    """The adapter that a request is made with, and its steps and shifts. What does not fit becomes a fault.

    Args:
        task: None where it is at fault itself.
    """
    lora, active = _chosen(found, limits)
    ask = found.ask
    name = None if active is None else active.file.name
    if active is None or name is None or active.steps is None:
        steps, shifts = _steps(found, limits), (ask.flow_shift, ask.audio_flow_shift)
        return Sampling(lora, name, steps, limits.steps_fixed, *shifts)
    if task is not None and active.tasks and task not in active.tasks:
        allowed = ", ".join(active.tasks)
        found.fault("task", task, f"the adapter {name} was made for {allowed}", allowed, active.tasks[0])
    steps = active.steps
    if ask.num_inference_steps not in (None, steps):
        why = f"the adapter {name} was distilled to {steps} steps"
        found.fault("num_inference_steps", ask.num_inference_steps, why, str(steps), steps)
    pinned = active.kind in ("fasth3", "flashgen")
    video = _shift(found, "flow_shift", ask.flow_shift, active.video_shift, name, pinned)
    audio = _shift(found, "audio_flow_shift", ask.audio_flow_shift, active.audio_shift, name, pinned)
    return Sampling(lora, name, steps, pinned, video, audio)


def _shift(
    found: Findings, field: str, asked: float | None, made_for: float | None, name: str, pinned: bool
) -> float | None:
    if made_for is None and not (pinned and asked is not None):
        return asked
    if asked is not None and (made_for is None or not math.isclose(asked, made_for)):
        allowed = "leave it out" if made_for is None else f"{made_for:g}"
        found.fault(field, asked, f"the adapter {name} was distilled at its own shift", allowed, made_for)
    return made_for


def _steps(found: Findings, limits: Limits) -> int:
    asked = found.ask.num_inference_steps
    if asked is None:
        return limits.steps
    if limits.steps_fixed and asked != limits.steps:
        why = "this checkpoint is distilled to one number of steps"
        found.fault("num_inference_steps", asked, why, str(limits.steps), limits.steps)
    elif not limits.steps_fixed:
        found.within("num_inference_steps", asked, 1, min(limits.most_steps, MAX_STEPS))
    return asked


def _chosen(found: Findings, limits: Limits) -> tuple[Lora | None, Adapter | None]:
    """What the host is told, and the adapter that takes effect. A scale of 0 is none."""
    asked, rules = found.ask.lora, limits.adapters
    own = rules.own if rules is not None else None
    if asked is None:
        if rules is None or own is None or own.fused:
            return None, own
        return Lora(own.file.stem, str(own.path), rules.scale), own if rules.scale != 0 else None
    path = _path(found, limits)
    if path is None:
        return None, None
    if own is not None and path.resolve() == own.path.resolve() and not own.fused:
        return Lora(asked.name, str(own.path), asked.scale), None if asked.scale == 0 else own
    adapter = None
    if rules is not None:
        try:
            adapter = rules.check(path)
        except AdapterError as error:
            what = error.what.removeprefix(f"adapter {path}").lstrip(": /")
            why = ": ".join(part for part in (what, error.why) if part)
            found.fault("lora.path", asked.path, f"{why}. {error.fix}".rstrip(". "))
            return None, None
    identity = None if adapter is None else int(adapter.identity, 16) >> 1 or 1
    return Lora(asked.name, str(path), asked.scale, identity), None if asked.scale == 0 else adapter


def _path(found: Findings, limits: Limits) -> Path | None:
    """Where a request's adapter lies; None, and a fault, where there is none that may be used."""
    asked = found.ask.lora
    assert asked is not None
    path = Path(asked.path)
    if limits.lora_dir is None:
        if path.exists():
            return path
        found.fault("lora.path", asked.path, "there is no such file or folder on the server")
        return None
    folder = limits.lora_dir.resolve()
    path = (folder / path).resolve()
    if path.is_relative_to(folder) and path.exists():
        return path
    there = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    near = difflib.get_close_matches(Path(asked.path).name, there, n=1, cutoff=0.5)
    why = "the server has no such adapter"
    found.fault("lora.path", asked.path, why, ", ".join(there[:20]) or "none", near[0] if near else None)
    return None
