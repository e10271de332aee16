# SPDX-License-Identifier: Apache-2.0
"""What this server accepts, in the few numbers that a form needs: told at ``/v1/h3/info``."""

from __future__ import annotations

from typing import Any

from vllm_h3_plugin.serving.references.limits import ReferenceLimits
from vllm_h3_plugin.serving.rules.ask import MAX_PROMPT_CHARACTERS, SEED_MAX, SEED_MIN
from vllm_h3_plugin.serving.rules.canvas import FLATTEST, canvas
from vllm_h3_plugin.serving.rules.length import DEFAULT_FRAMES, longest_frames, shortest_frames
from vllm_h3_plugin.serving.rules.limits import Limits
from vllm_h3_plugin.serving.rules.ratios import RATIOS
from vllm_h3_plugin.video.geometry import FPS, FRAME_OFFSET, FRAME_PERIOD, SIZE_MULTIPLE


def offered(limits: Limits) -> dict[str, Any]:
    """The limits of a server as JSON; :func:`~vllm_h3_plugin.serving.rules.openapi.schema` says all of it.

    Args:
        limits: the server's.

    Returns:
        By field: ``min``, ``max`` and ``default``; sizes in pixels, lengths in seconds and frames. Seeds are text: a
        double does not hold them. ``size.canvases`` is what each ratio makes where no size is given.
    """
    pictures = ReferenceLimits()
    return {
        "tasks": list(limits.tasks),
        "prompt": {"max": MAX_PROMPT_CHARACTERS},
        "size": {
            "min": SIZE_MULTIPLE,
            "multiple": SIZE_MULTIPLE,
            "flattest": FLATTEST,
            "max_pixels": limits.max_pixels,
            "canvases": {name: "{}x{}".format(*canvas(ratio)) for name, ratio in RATIOS.items()},
        },
        "fps": FPS,
        "seconds": {"min": limits.shortest_s, "max": limits.longest_s},
        "num_frames": {
            "min": shortest_frames(limits),
            "max": longest_frames(limits),
            "period": FRAME_PERIOD,
            "offset": FRAME_OFFSET,
            "default": {task: min(DEFAULT_FRAMES[task], longest_frames(limits)) for task in limits.tasks},
        },
        "num_inference_steps": dict(zip(("min", "max", "default"), limits.usual_steps, strict=True)),
        "seed": {"min": str(SEED_MIN), "max": str(SEED_MAX)},
        "n": {"min": 1, "max": limits.outputs},
        "picture": {
            "max_bytes": pictures.nbytes["image"],
            "min_side": pictures.shortest_side,
            "max_side": pictures.longest_side,
        },
    }
