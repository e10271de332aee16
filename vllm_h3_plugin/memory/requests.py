# SPDX-License-Identifier: Apache-2.0
"""A request in the quantities that memory follows from: tokens, latents, pixels. Imports no torch.

Sources, vLLM-Omni 0.30.0 (0.28.0 is equal): ``minimax_h3/time_request.py`` (``_video_latent_t``, ``_audio_latent_t``)
and ``minimax_h3/packed_sequence.py`` (rows, alignment to 64).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.memory.table import DEFAULT_STEPS, Role

FPS = 24
PATCH_PIXELS = 32
"""Pixels along a side of one token: the VAE's 16 times the DiT's patch of 2. The vision tower's merged patch too."""

# The VAE codes 17 frames in 5 latent frames, and the first 5 in 2; a clip therefore has 17 n + 5 frames.
_BLOCK_FRAMES, _FIRST_FRAMES = 17, 5
_BLOCK_LATENTS, _FIRST_LATENTS = 5, 2

_ROW_ALIGN = 64
_AUDIO_LATENTS_PER_S = 40
_AUDIO_CHANNELS = 2

SHORTEST_S, LONGEST_S = 4, 15
"""Seconds that the API takes (vLLM-Omni 0.30.0 encoder_processing.py:164)."""

PROMPT_TOKENS = 512
"""Tokens that a prompt and its template are taken to have where nothing better is known: a long paragraph."""


@dataclass(frozen=True)
class RequestSize:
    """What a request makes, as it is delivered: sides are multiples of 32, frames are 17 n + 5.

    ``video.geometry.snap_size`` and ``snap_frames`` turn what was asked into this.

    Attributes:
        width, height: pixels.
        frames: at 24 a second.
        steps: denoiser evaluations.
        images: pictures that condition it, each taken to be as large as the clip.
        audio_seconds: seconds of sound that condition it.
        text_tokens: tokens of the prompt and its template, pictures apart.

    Raises:
        UsageError: a size or length that no request has.
    """

    width: int
    height: int
    frames: int
    steps: int = DEFAULT_STEPS
    images: int = 0
    audio_seconds: float = 0.0
    text_tokens: int = PROMPT_TOKENS

    def __post_init__(self) -> None:
        if min(self.width, self.height) < PATCH_PIXELS or self.width % PATCH_PIXELS or self.height % PATCH_PIXELS:
            raise UsageError(
                f"size {self.width}x{self.height}",
                why=f"H3 makes sides that are multiples of {PATCH_PIXELS}",
                fix="Give for example 768x448.",
            )
        if self.frames < _FIRST_FRAMES or self.frames % _BLOCK_FRAMES != _FIRST_FRAMES:
            raise UsageError(
                f"frames={self.frames}",
                why=f"a clip has {_BLOCK_FRAMES} n + {_FIRST_FRAMES} frames",
                fix="Give for example 107 or 124.",
            )
        if min(self.steps, self.text_tokens) < 1 or self.images < 0 or self.audio_seconds < 0:
            raise UsageError(
                f"steps={self.steps}, text_tokens={self.text_tokens}, images={self.images}, "
                f"audio_seconds={self.audio_seconds:g}",
                why="a request has at least one step and one token, and no negative number of anything",
                fix="Correct the number that is too small.",
            )

    @property
    def roles(self) -> frozenset[Role]:
        """Kinds of conditions that it carries."""
        roles: set[Role] = set()
        if self.images:
            roles.add("image")
        if self.audio_seconds:
            roles.add("audio")
        return frozenset(roles)

    @property
    def latent_frames(self) -> int:
        """Frames of the video latent: 5 for each 17 frames, 2 for the first 5."""
        return (self.frames - _FIRST_FRAMES) // _BLOCK_FRAMES * _BLOCK_LATENTS + _FIRST_LATENTS

    @property
    def frame_tokens(self) -> int:
        """Tokens of one latent frame, and of one picture for the text encoder."""
        return (self.width // PATCH_PIXELS) * (self.height // PATCH_PIXELS)

    @property
    def text_rows(self) -> int:
        """Tokens that the text encoder reads and the DiT's refiner gets: prompt and pictures."""
        return self.text_tokens + self.images * self.frame_tokens

    @property
    def video_rows(self) -> int:
        """Video rows of the packed sequence: the clip's and its pictures'."""
        return (self.latent_frames + self.images) * self.frame_tokens

    @property
    def audio_rows(self) -> int:
        """Sound rows of the packed sequence: two channels of 40 latents a second, the clip's and the reference's."""
        seconds = (self.frames / FPS, self.audio_seconds)
        return _AUDIO_CHANNELS * sum(round(value * _AUDIO_LATENTS_PER_S) for value in seconds)

    @property
    def tokens(self) -> int:
        """Rows of the packed sequence, rounded up to 64: the S of every formula."""
        rows = self.text_rows + self.video_rows + self.audio_rows
        return -(-rows // _ROW_ALIGN) * _ROW_ALIGN

    @property
    def pixels(self) -> int:
        """Pixels of all frames."""
        return self.width * self.height * self.frames


def api_clip_lengths() -> Iterator[int]:
    """Frame counts that the API can deliver, shortest first: 107 (4 s asked) to 362 (15 s asked)."""
    for asked in range(SHORTEST_S * FPS, LONGEST_S * FPS + _BLOCK_FRAMES):
        if asked % _BLOCK_FRAMES == _FIRST_FRAMES:
            yield asked
