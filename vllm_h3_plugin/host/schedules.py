# SPDX-License-Identifier: Apache-2.0
"""The timesteps of a request, from what the host prepared for its denoise loop; and what cannot be served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_omni.diffusion.models.minimax_h3 import time_request
from vllm_omni.errors import OmniClientError

from vllm_h3_plugin.attention.low_bit import check_tokens
from vllm_h3_plugin.conditioning.schedule import Roles, Schedule, schedule
from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.pins import installed_host
from vllm_h3_plugin.quantization.recipe import Recipe
from vllm_h3_plugin.serving.adapters import RESIDENT_HINT

DEFAULT_STEPS = 50
"""Steps of a request that names none (pipeline_minimax_h3.py ``_resolve_sigma_positions``)."""


def host_steps(evaluations: int, *, pinned: bool = False) -> int:
    """What the host is told for a number of denoise evaluations.

    0.28 counts the points of the schedule, of which there is one more; 0.30 counts evaluations (time_request.py of
    each). A schedule that comes with the weights or an adapter is counted by its intervals on both.

    Args:
        pinned: such a schedule.
    """
    return evaluations + 1 if installed_host().vllm_omni == "0.28.0" and not pinned else evaluations


def evaluations(num_steps: int, *, pinned: bool = False) -> int:
    """DiT evaluations that the host makes of a request of ``num_steps``; the inverse of :func:`host_steps`."""
    return max(1, num_steps - (host_steps(1, pinned=pinned) - 1))


def schedule_of(inputs: Mapping[str, Any]) -> Schedule:
    """The schedule of a request.

    Args:
        inputs: what the host's ``_build_denoise_inputs`` returns.

    Raises:
        OmniClientError: a latent-mask edit, which gives each row a timestep of its own.
    """
    if inputs.get("video_edit") is not None or inputs.get("audio_edit") is not None:
        error = UsageError(
            "a latent-mask edit",
            why="it gives every row a timestep of its own, and AdaLN is kept as a table of the schedule's timesteps",
            fix=RESIDENT_HINT,
        )
        raise OmniClientError(str(error)) from error
    branch = inputs["branch"]
    roles = Roles(
        audio=bool(branch.audio_update_mask.any()),
        image=not bool(branch.update_mask.all()),
        reference_audio=not bool(branch.audio_update_mask.all()),
        locked_audio=getattr(branch, "locked_audio_rows", None) is not None,
    )
    return schedule(inputs["sigmas_video"], inputs["sigmas_audio"], roles)


def default_schedule(pipeline: Any, dit: str, steps: int | None = None) -> Schedule:
    """The schedule of a request that names nothing but a prompt.

    Args:
        pipeline: the host's, built.
        dit: ``transformer`` or ``transformers_ref``.
        steps: or of one that also names this many; a distilled release has a number of its own, and so has an adapter
            that was loaded at start.
    """
    reference_only = dit == "transformers_ref" or "t2va" not in pipeline.supported_tasks
    positions = pipeline._base_schedule_for_task("ref2va" if reference_only else "t2va")
    ladder = None if positions is None else positions.base_schedule
    shifts = [pipeline.default_video_shift, pipeline.default_audio_shift]
    fusion, own = getattr(pipeline, "_fasth3", None), getattr(pipeline, "own_adapter", None)
    if fusion is not None and dit == "transformer":
        ladder = fusion.base_schedule
    elif steps is None and own is not None and own.steps is not None and dit == "transformer":
        steps = own.steps
        shifts = [own.video_shift or shifts[0], own.audio_shift or shifts[1]]
    sigmas = [
        time_request.minimax_h3_time_shift_sigmas(
            num_steps=len(ladder) - 1 if ladder is not None else host_steps(steps or DEFAULT_STEPS),
            shift_scale=shift,
            base_schedule=ladder,
        )
        for shift in shifts
    ]
    return schedule(sigmas[0], sigmas[1], Roles(image=reference_only))


def refuse_too_many_tokens(recipe: Recipe, tokens: int) -> None:
    """Stop a request before it is denoised where the recipe's attention was not measured on as many tokens.

    Raises:
        OmniClientError: see :func:`check_tokens`.
    """
    try:
        check_tokens(recipe.attention, tokens)
    except UsageError as error:
        raise OmniClientError(str(error)) from error


def refuse_what_tables_cannot_serve(od_config: Any) -> None:
    """Stop before anything is built where the server was asked to mix requests within one forward.

    Raises:
        UsageError: step-wise execution, whose forwards pack rows of several schedules.
    """
    if getattr(od_config, "step_execution", False):
        raise UsageError(
            "step-wise execution (--step-execution) with AdaLN as a table",
            why="a forward would pack rows of several requests, each at its own step",
            fix=f"Serve without it. {RESIDENT_HINT}",
        )
