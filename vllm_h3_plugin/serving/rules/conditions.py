# SPDX-License-Identifier: Apache-2.0
"""Kind of clip, and whether the references are those that it takes.

Sources, vLLM-Omni 0.30.0: ``model_executor/models/minimax_h3/encoder_processing.py`` (``_resolve_task``,
``prepare_encoder_inputs``, ``_validate_ref2va_reference_counts``, ``_resolve_fl2va_keyframe_indices``) and
``reference_video.py`` (seconds in total).
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_h3_plugin.serving.rules.accepted import ReferenceFacts, Task
from vllm_h3_plugin.serving.rules.findings import Findings
from vllm_h3_plugin.serving.rules.limits import Limits

MAX_REFERENCES = 12
MAX_IMAGES, MAX_VIDEOS, MAX_AUDIOS = 9, 3, 3
MAX_TOTAL_S = 15.0
SHORTEST_REFERENCE_S = 2.0
_TOLERANCE_S = 1e-2

_TAKES: dict[Task, str] = {
    "t2va": "no references",
    "fl2va": "1 or 2 pictures",
    "ref2va": f"at least one picture or film, up to {MAX_IMAGES} pictures, {MAX_VIDEOS} films and {MAX_AUDIOS} sounds, "
    f"{MAX_REFERENCES} in all",
}
_INDICES = ((0,), (-1,), (0, -1))


def task_of(found: Findings, limits: Limits, references: Sequence[ReferenceFacts]) -> Task | None:
    """The kind of clip; None with a fault.

    Args:
        references: facts of what was loaded. Where one could not be, what is said about their number is left out:
            its own fault says enough.
    """
    ask = found.ask
    complete = len(references) == len(ask.references)
    task = ask.task or _inferred(found, limits, references)
    if task not in limits.tasks:
        if ask.task is None and not complete:
            return None
        served = ", ".join(limits.tasks)
        why = f"this server's checkpoint makes {served}"
        if ask.task is None:
            why += f", and this request is {task}, which takes {_TAKES[task]}"
            found.fault("task", None, why, "; ".join(f"{name}: {_TAKES[name]}" for name in limits.tasks))
        else:
            found.fault("task", ask.task, why, served, limits.tasks[0] if len(limits.tasks) == 1 else None)
        return None
    if complete:
        _counted(task, found, references)
    return task


def frame_indices(task: Task | None, found: Findings, references: Sequence[ReferenceFacts]) -> tuple[int, ...]:
    """Where each picture of ``fl2va`` stands; empty for other kinds."""
    asked = found.ask.frame_indices
    images = sum(reference.kind == "image" for reference in references)
    if task != "fl2va":
        if asked is not None and task is not None:
            found.snap("frame_indices", list(asked), None, f"{task} has no first and last frame")
        return ()
    default = (0,) if images == 1 else (0, -1)
    if asked is None:
        return default
    if images in (1, 2) and (len(asked) != images or asked not in _INDICES):
        allowed = "[0] or [-1]" if images == 1 else "[0, -1]"
        found.fault("frame_indices", list(asked), f"{images} picture(s) came with it", allowed, list(default))
    return asked


def _inferred(found: Findings, limits: Limits, references: Sequence[ReferenceFacts]) -> Task:
    kinds = {reference.kind for reference in references}
    if _locked(found):
        kinds.discard("audio")
    if kinds & {"video", "audio"}:
        return "ref2va"
    if kinds:
        # A server of Ref2VA alone takes pictures as references, as the host does.
        return "fl2va" if "fl2va" in limits.tasks else "ref2va"
    return "t2va"


def _locked(found: Findings) -> bool:
    """Whether a sound is to be the clip's own, and no reference."""
    return found.ask.extra_params.get("audio_mode") == "lock_source"


def _counted(task: Task, found: Findings, references: Sequence[ReferenceFacts]) -> None:
    images, videos, audios = (
        [reference for reference in references if reference.kind == kind] for kind in ("image", "video", "audio")
    )
    locked = _locked(found)
    if locked and len(audios) != 1:
        found.fault("extra_params.audio_mode", "lock_source", f"{len(audios)} sounds came with it", "exactly one sound")
    sounds = 0 if locked else len(audios)
    fits = {
        "t2va": not (images or videos or sounds),
        "fl2va": 1 <= len(images) <= 2 and not (videos or sounds),
        "ref2va": (images or videos)
        and len(images) <= MAX_IMAGES
        and len(videos) <= MAX_VIDEOS
        and len(audios) <= MAX_AUDIOS
        and len(references) <= MAX_REFERENCES,
    }[task]
    if not fits:
        sent = ", ".join(
            f"{len(kind)} {name}"
            for kind, name in ((images, "picture(s)"), (videos, "film(s)"), (audios, "sound(s)"))
            if kind
        )
        field = references[0].field if references else "input_references"
        found.fault(
            field if found.ask.task is None else "task",
            None if found.ask.task is None else found.ask.task,
            f"{task} takes {_TAKES[task]}, and {sent or 'nothing'} came with it",
            _TAKES[task],
            code="invalid_reference",
        )
    for kind, name in ((videos, "films"), (audios, "sounds")):
        total = sum(reference.seconds for reference in kind)
        if len(kind) > 1 and total > MAX_TOTAL_S + _TOLERANCE_S:
            why = f"{name} last {total:.2f} s in all"
            found.fault(kind[-1].field, None, why, f"up to {MAX_TOTAL_S:g} s in all", code="invalid_reference")
    _start(found, videos)


def _start(found: Findings, videos: Sequence[ReferenceFacts]) -> None:
    start = found.ask.start_time_seconds
    if start is None:
        return
    if not videos:
        found.snap("start_time_seconds", start, None, "no film came with it")
        return
    latest = min(video.seconds for video in videos) - SHORTEST_REFERENCE_S
    if start > latest:
        why = f"at least {SHORTEST_REFERENCE_S:g} s of the film must remain"
        found.fault("start_time_seconds", start, why, f"0 to {max(latest, 0):.2f}", round(max(latest, 0.0), 2))
