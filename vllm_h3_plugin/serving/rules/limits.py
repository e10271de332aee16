# SPDX-License-Identifier: Apache-2.0
"""What this server makes, beside what H3 can: facts that are known once it has loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_h3_plugin.memory.requests import LONGEST_S, SHORTEST_S
from vllm_h3_plugin.memory.table import DEFAULT_STEPS
from vllm_h3_plugin.serving.rules.accepted import Accepted, Task


@dataclass(frozen=True)
class Misfit:
    """A request that this server has not the memory for, even when it is idle.

    Attributes:
        why: needed and present, in words.
        fits: what would fit, in words; empty if nothing of the kind does.
        frames: longest clip of this size that fits; None if none does.
    """

    why: str
    fits: str = ""
    frames: int | None = None


@dataclass(frozen=True)
class Limits:
    """The server's own limits.

    Attributes:
        tasks: kinds of clip that the loaded checkpoint makes (``workers[].supported_tasks``).
        model: the served model's name; a request that names another is refused. None: any name is taken.
        outputs: clips that one request may ask for, every one of which is delivered.
        shortest_s, longest_s: seconds.
        max_pixels: largest area, width times height.
        steps: denoise steps of a request that names none.
        misfit: the memory budget: says why a request can never run here; None if it can.
    """

    tasks: tuple[Task, ...] = ("t2va", "fl2va")
    model: str | None = None
    outputs: int = 1
    shortest_s: float = SHORTEST_S
    longest_s: float = LONGEST_S
    max_pixels: int = 1920 * 1088
    steps: int = DEFAULT_STEPS
    misfit: Callable[[Accepted], Misfit | None] | None = None
