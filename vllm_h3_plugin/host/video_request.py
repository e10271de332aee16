# SPDX-License-Identifier: Apache-2.0
"""An accepted request in the host's terms, and what this server can accept.

Both hosts: names are those of ``VideoGenerationRequest`` (entrypoints/openai/protocol/videos.py) and of what H3 reads
from ``extra_args`` (model_executor/models/minimax_h3/encoder_processing.py; 0.28: diffusion/models/minimax_h3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_h3_plugin import settings
from vllm_h3_plugin.host import admission, run_state
from vllm_h3_plugin.host.asked import Asked
from vllm_h3_plugin.host.schedules import DEFAULT_STEPS, host_steps
from vllm_h3_plugin.memory.requests import LONGEST_S, PROMPT_TOKENS, api_clip_lengths
from vllm_h3_plugin.pins import installed_host
from vllm_h3_plugin.quantization.footprint import GIB
from vllm_h3_plugin.serving.adapters import AdapterRules
from vllm_h3_plugin.serving.references.media import Media
from vllm_h3_plugin.serving.rules.accepted import Accepted, Lora, Task
from vllm_h3_plugin.serving.rules.ask import MAX_STEPS
from vllm_h3_plugin.serving.rules.limits import EXTRA, Limits, Misfit
from vllm_h3_plugin.video.geometry import FPS, SIZE_MULTIPLE

TASKS: tuple[Task, ...] = ("t2va", "fl2va", "ref2va")
_EXTRA_028 = frozenset({"force_refresh_step_hint", "force_refresh_step_policy"})


def request_fields(accepted: Accepted, output: int = 0) -> dict[str, Any]:
    """Arguments of the host's ``VideoGenerationRequest`` for one of a request's clips.

    Args:
        accepted: the request.
        output: which clip, from 0. The host returns the first of several alone, so each is a generation of its own; it
            would have made them with the same seeds (``_minimax_h3_output_seeds``).
    """
    extra: dict[str, Any] = {**accepted.extra, "task": accepted.task}
    if not _is_028() and settings.load().encoder != "host":
        # The pipeline's own encoder (host/clips.py) is reached by the host's name for one in the worker.
        extra.setdefault("preencode_mp4", True)
    if accepted.audio_flow_shift is not None:
        extra["audio_flow_shift"] = usable_shift(accepted.audio_flow_shift)
    if accepted.frame_indices:
        extra["frame_indices"] = list(accepted.frame_indices)
    lora = accepted.lora
    fields = {
        "prompt": accepted.prompt,
        "width": accepted.width,
        "height": accepted.height,
        # The host holds what is asked, and not what it makes of it, against its longest clip.
        "num_frames": min(accepted.frames, LONGEST_S * FPS),
        "aspect_ratio": accepted.aspect_ratio,
        "num_inference_steps": host_steps(accepted.steps, pinned=accepted.steps_pinned),
        "seed": accepted.seed + output,
        "flow_shift": None if accepted.flow_shift is None else usable_shift(accepted.flow_shift),
        "quality": accepted.quality,
        "start_time_seconds": accepted.start_time_seconds,
        "user": accepted.user,
        "lora": None if lora is None else _host_lora(lora),
        "return_stage_metrics": None if _is_028() else accepted.return_stage_metrics,
        "extra_params": extra,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _host_lora(lora: Lora) -> dict[str, Any]:
    """What the host's ``parse_lora_request`` reads."""
    named = {"name": lora.name, "path": lora.path, "scale": lora.scale}
    return named if lora.identity is None else {**named, "int_id": lora.identity}


def usable_shift(shift: float) -> float:
    """The shift, or the one next to it whose first sigma is not above 1.

    The first sigma is s / (1 + (s - 1)), which the host computes in FP32 (minimax_h3/time_request.py:72). For one value
    in a hundred, such as 1.32 or 4.03, that is 1.0000001, and the host refuses its own schedule: "timestep must be in
    [0, 1]" (scheduling_minimax_h3_euler_ancestral.py:23).
    """
    one, value = np.float32(1), np.float32(shift)
    if value / (one + np.float32(shift - 1)) <= one:
        return shift
    while value / (one + np.float32(float(value) - 1)) > one:
        value = np.nextafter(value, np.float32(0))
    return float(value)


def generation_request(accepted: Accepted, output: int = 0) -> Any:
    """The host's ``VideoGenerationRequest``; arguments as for :func:`request_fields`."""
    from vllm_omni.entrypoints.openai.protocol.videos import VideoGenerationRequest

    return VideoGenerationRequest(**request_fields(accepted, output))


def host_references(media: Media) -> dict[str, Any]:
    """Arguments of the host's ``generate_video_bytes``. ``media`` keeps its files, which the caller removes."""
    from vllm_omni.entrypoints.openai.serving_video import ReferenceAudio, ReferenceImage, ReferenceVideo

    images, videos, audios = media.images, _names(media.videos), _names(media.audios)
    return {
        "reference_image": ReferenceImage(images if len(images) > 1 else images[0]) if images else None,
        "reference_video": ReferenceVideo(videos) if videos else None,
        "reference_audio": ReferenceAudio(audios if len(audios) > 1 else audios[0]) if audios else None,
    }


def server_limits(model: str | None, outputs: int = 1) -> Limits:
    """What this server accepts, from what its workers reported, its settings and its host.

    Args:
        model: the served model's name.
        outputs: clips that one request may ask for.
    """
    values = settings.load()
    workers = run_state.read_workers()
    served = {task for worker in workers for task in worker.get("supported_tasks", ())}
    pinned = next((worker["pinned_steps"] for worker in workers if worker.get("pinned_steps")), None)
    adapters = next((worker["adapters"] for worker in workers if worker.get("adapters")), None)
    return Limits(
        tasks=tuple(task for task in TASKS if task in served) or TASKS,
        model=model,
        outputs=outputs,
        steps=pinned or DEFAULT_STEPS,
        steps_fixed=pinned is not None,
        # 0.28 is told one more than it makes, and takes as many as 0.30.
        most_steps=MAX_STEPS - (host_steps(1) - 1),
        adapters=None if adapters is None else AdapterRules.from_dict(adapters),
        max_pixels=values.max_pixels,
        # 0.28 fits pictures to the clip and then takes none below 256 (pipeline_minimax_h3.py:2231).
        least_with_pictures=256 if _is_028() else SIZE_MULTIPLE,
        lora_dir=values.lora_dir,
        extra=_EXTRA_028 if _is_028() else EXTRA,
        misfit=_either(_measured_size(workers), budget()),
    )


def _either(*rules: Callable[[Accepted], Misfit | None]) -> Callable[[Accepted], Misfit | None]:
    """What the first rule says that says something."""
    return lambda accepted: next((misfit for rule in rules if (misfit := rule(accepted)) is not None), None)


def _measured_size(workers: Sequence[Mapping[str, Any]]) -> Callable[[Accepted], Misfit | None]:
    """Says whether a clip has more tokens than the recipe's attention in few bits was measured on, however short its
    prompt is. What its prompt and references add is known in the worker, which refuses for it too."""
    allowed = [worker["most_tokens"] for worker in workers if worker.get("most_tokens")]

    def misfit(accepted: Accepted) -> Misfit | None:
        if not allowed or (tokens := _tokens(accepted, prompt=1)) <= min(allowed):
            return None
        frames, fits = None, ""
        for size in dict.fromkeys([(accepted.width, accepted.height), (768, 448)]):
            like = replace(accepted, width=size[0], height=size[1])
            fitting = [length for length in api_clip_lengths() if _tokens(replace(like, frames=length)) <= min(allowed)]
            if fitting:
                frames = fitting[-1] if like == accepted else None
                fits = f"{like.size} with up to {fitting[-1]} frames ({fitting[-1] / FPS:.1f} s)"
                break
        why = f"it has at least {tokens} tokens, and this recipe's attention was measured on {min(allowed)} at most"
        return Misfit(why, fits, frames, "invalid_value")

    return misfit


def _tokens(accepted: Accepted, prompt: int = PROMPT_TOKENS) -> int:
    """Packed rows of a clip without references."""
    return replace(accepted.request_size, images=0, audio_seconds=0.0, text_tokens=prompt).tokens


def budget() -> Callable[[Accepted], Misfit | None]:
    """Says whether a request can never run here: its predicted peak, what is resident and what must remain free are
    more than the memory there is. Whether it can run *now* is :mod:`.admission`'s question."""

    def misfit(accepted: Accepted) -> Misfit | None:
        workers = {int(worker.get("rank", 0)): worker for worker in run_state.read_workers()}
        for rank, guard in enumerate(admission.read_guards()):
            if not guard["active"]:
                continue
            model = admission.model_of(*(guard[name] for name in admission.FACTS))
            if model is None:
                return None
            resident = sum(workers.get(rank, {}).get("memory", {}).get("parts", {}).values())
            room = guard["total_bytes"] - resident - guard["floor_bytes"]
            asked = asked_of(accepted)
            peak = max(model.forecast(asked).values(), default=0)
            if peak > room:
                why = f"its peak takes {peak / GIB:.1f} GiB, and {max(room, 0) / GIB:.1f} GiB are there when idle"
                return Misfit(why, model.what_fits(asked, room), _longest(accepted, model, room))
        return None

    return misfit


def asked_of(accepted: Accepted) -> Asked:
    """The request in the quantities of the memory forecast. Clips are made one after the other."""
    return Asked(accepted.request_size, sum(reference.kind == "video" for reference in accepted.references))


def _longest(accepted: Accepted, model: Any, room: int) -> int | None:
    """Frames of the longest clip of this size that fits."""
    fitting = None
    for frames in api_clip_lengths():
        if max(model.forecast(asked_of(replace(accepted, frames=frames))).values(), default=0) > room:
            break
        fitting = frames
    return fitting


def _names(paths: list[Path]) -> list[str]:
    return [str(path) for path in paths]


def _is_028() -> bool:
    return installed_host().vllm_omni == "0.28.0"
