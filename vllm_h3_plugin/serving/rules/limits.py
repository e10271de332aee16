# SPDX-License-Identifier: Apache-2.0
"""What this server makes, beside what H3 can: facts that are known once it has loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_h3_plugin.memory.requests import LONGEST_S, SHORTEST_S
from vllm_h3_plugin.memory.table import DEFAULT_STEPS
from vllm_h3_plugin.serving.adapters import AdapterRules
from vllm_h3_plugin.serving.rules.accepted import Accepted, Task
from vllm_h3_plugin.serving.rules.ask import MAX_STEPS
from vllm_h3_plugin.serving.rules.fault import Code
from vllm_h3_plugin.video.geometry import SIZE_MULTIPLE

MAX_PIXELS = 1920 * 1088
"""Default of the largest area: 1080p. The host has none for an explicit size; H3 itself was made for 1344x768."""

EXTRA = frozenset(
    {
        "audio_mode",
        "force_refresh_step_hint",
        "force_refresh_step_policy",
        "pad_seq_len",
        "preencode_batch_frames",
        "preencode_mp4",
    }
)
"""What vLLM-Omni 0.30.0's H3 reads from ``extra_args`` beside what has a field (minimax_h3/pipeline_minimax_h3.py)."""


@dataclass(frozen=True)
class Misfit:
    """A clip that this server can never make: it has not the memory even when idle, or a kernel is not for its size.

    Attributes:
        why: needed and present, in words.
        fits: what would fit, in words; empty if nothing of the kind does.
        frames: longest clip of this size that fits; None if none does.
        code: kind of fault, for programs.
    """

    why: str
    fits: str = ""
    frames: int | None = None
    code: Code = "too_large_for_memory"


@dataclass(frozen=True)
class Limits:
    """The server's own limits.

    Attributes:
        tasks: kinds of clip that the loaded checkpoint makes (``workers[].supported_tasks``).
        model: the served model's name; a request that names another is refused. None: any name is taken.
        outputs: clips that one request may ask for, every one of which is delivered.
        shortest_s, longest_s: seconds.
        max_pixels: largest area, width times height.
        least_with_pictures: shortest side in pixels of a clip that pictures come with.
        steps: denoise steps of a request that names none.
        most_steps: denoise steps that a request may ask for at most.
        steps_fixed: the checkpoint is distilled to that number, and makes no other.
        adapters: what decides about a request's adapter, and the one that was loaded at start; None: not known.
        lora_dir: folder in which a request's adapter must lie; None: anywhere on the server.
        extra: names of ``extra_params`` that the host's model takes beside those that have a field.
        misfit: says why a request can never run here (memory, attention in few bits); None if it can.
    """

    tasks: tuple[Task, ...] = ("t2va", "fl2va")
    model: str | None = None
    outputs: int = 1
    shortest_s: float = SHORTEST_S
    longest_s: float = LONGEST_S
    max_pixels: int = MAX_PIXELS
    least_with_pictures: int = SIZE_MULTIPLE
    steps: int = DEFAULT_STEPS
    most_steps: int = MAX_STEPS
    steps_fixed: bool = False
    adapters: AdapterRules | None = None
    lora_dir: Path | None = None
    extra: frozenset[str] = EXTRA
    misfit: Callable[[Accepted], Misfit | None] | None = None

    @property
    def usual_steps(self) -> tuple[int, int, int]:
        """(least, most, default) of a request that names no adapter. A Turbo file that was loaded at start has a number
        of its own, and a request may do without it."""
        own = self.adapters.own if self.adapters is not None and self.adapters.scale != 0 else None
        default = own.steps if own is not None and own.steps is not None else self.steps
        if self.steps_fixed or (own is not None and own.fused):
            return default, default, default
        return 1, self.most_steps, default
