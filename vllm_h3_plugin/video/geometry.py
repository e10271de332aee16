# SPDX-License-Identifier: Apache-2.0
"""What length and size MiniMax-H3 delivers for what was asked.

Sources, vLLM-Omni 0.30.0 (0.28.0 is equal): ``vllm_omni/diffusion/models/minimax_h3/time_request.py``
(``_align_frame_count``, ``_audio_latent_t``), ``vllm_omni/model_executor/models/minimax_h3/encoder_processing.py``
(``resolve_minimax_h3_shape``) and ``vllm_omni/diffusion/models/minimax_h3/vae.py`` (32 kHz).
"""

from __future__ import annotations

import math

from vllm_h3_plugin.errors import UsageError

FPS = 24
"""Frames a second; the host refuses every other rate."""

FRAME_PERIOD = 17
FRAME_OFFSET = 5
"""A clip has 17n + 5 frames: the video VAE's causal blocks (5 latent frames each) plus the first one."""

SIZE_MULTIPLE = 32
"""Pixels; width and height are floored to a multiple of it."""

AUDIO_CODEC = "aac"
AUDIO_RATE = 32_000
"""Samples a second and channel."""
AUDIO_CHANNELS = 2

AUDIO_LATENT_RATE = 40
"""Audio latents a second; the sound's length is rounded to this grid, so it may miss the picture's by 1/80 s."""


def snap_frames(frames: int) -> int:
    """Frames delivered for ``frames`` asked: the next 17n + 5 that is not below it (96 -> 107).

    Raises:
        UsageError: ``frames`` is below 1. (The host turns those into one frame; a clip of one frame is no clip.)
    """
    if frames < 1:
        raise UsageError(f"frames={frames}", why="a clip has at least one frame", fix="Ask for 1 frame or more.")
    return frames + (FRAME_OFFSET - frames) % FRAME_PERIOD


def frames_of_seconds(seconds: float) -> int:
    """Frames delivered for a duration in seconds: rounded to 24 fps as the host does, then snapped (4 s -> 107).

    Raises:
        UsageError: ``seconds`` is not a positive number of at least half a frame.
    """
    if not math.isfinite(seconds) or round(seconds * FPS) < 1:
        raise UsageError(
            f"seconds={seconds:g}", why="it is shorter than one frame", fix="Give a duration such as --seconds 5."
        )
    return snap_frames(round(seconds * FPS))


def snap_size(width: int, height: int) -> tuple[int, int]:
    """(width, height) in pixels delivered for the size asked: each floored to a multiple of 32 (770x450 -> 768x448).

    Raises:
        UsageError: a side is below 32 pixels.
    """
    if min(width, height) < SIZE_MULTIPLE:
        raise UsageError(
            f"size {width}x{height}",
            why=f"each side is at least {SIZE_MULTIPLE} pixels",
            fix="Give width x height in pixels, for example 768x448.",
        )
    return width // SIZE_MULTIPLE * SIZE_MULTIPLE, height // SIZE_MULTIPLE * SIZE_MULTIPLE
