# SPDX-License-Identifier: Apache-2.0
"""Which timesteps a request's forwards see, step by step, known before the first of them.

A step of the host's denoise loop (vLLM-Omni 0.30.0 minimax_h3/denoise_loop.py, ``fill_timesteps`` and the loop's head;
0.28.0 alike) gives each packed row one of four timesteps and hands the model the sorted distinct values:

    video      1 - sigma_video         target video rows, text rows, padding
    audio      1 - sigma_audio         target audio rows; 1 where the audio is locked to a source
    image      max(video, 0.999)       rows of given frames and reference pictures
    reference  max(audio, 1.0)         rows of reference audio

The values of one step are its *group*. AdaLN is projected in one GEMM a group, and a GEMM of other rows or another
number of them may round differently, so a table keeps the rows of a group together.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Group = tuple[float, ...]
"""Sorted distinct FP32 timesteps of one step."""

IMAGE_TIMESTEP = 0.999
"""MINIMAX_H3_IMGVID_COND_TIMESTEP of the host's denoise_loop.py."""

REFERENCE_AUDIO_TIMESTEP = 1.0
"""MINIMAX_H3_AUDIO_REF_COND_TIMESTEP of the host's denoise_loop.py."""


@dataclass(frozen=True)
class Roles:
    """Which kinds of rows a request packs beside target video and text.

    Attributes:
        audio: target audio rows; every task of H3 has them.
        image: given frames or reference pictures.
        reference_audio: reference audio rows.
        locked_audio: target audio is held to a source, so that its timestep is 1.
    """

    audio: bool = True
    image: bool = False
    reference_audio: bool = False
    locked_audio: bool = False

    @property
    def name(self) -> str:
        """For people and file names."""
        given = [word for word in ("image", "reference_audio", "locked_audio") if getattr(self, word)]
        return "+".join(given) or "text"


@dataclass(frozen=True)
class Schedule:
    """The distinct groups of a request, in the order of their first use.

    Attributes:
        groups: without repetitions.
        label: for logs: steps and roles.
    """

    groups: tuple[Group, ...]
    label: str = ""

    @property
    def rows(self) -> int:
        """Rows of its table."""
        return sum(len(group) for group in self.groups)

    @property
    def digest(self) -> str:
        """SHA-256 of the groups' FP32 bytes: equal for equal groups in equal order, whatever the label."""
        digest = hashlib.sha256()
        for group in self.groups:
            digest.update(struct.pack(f"<I{len(group)}f", len(group), *group))
        return digest.hexdigest()


def group_of(timesteps: Sequence[float]) -> Group:
    """Sorted distinct values after rounding to FP32, as ``torch.unique`` of the packed rows gives them."""
    return tuple(torch.tensor(list(timesteps), dtype=torch.float32).unique(sorted=True).tolist())


def schedule(sigmas_video: Sequence[float], sigmas_audio: Sequence[float], roles: Roles) -> Schedule:
    """The groups of a denoise loop over two sigma schedules.

    Args:
        sigmas_video: descending, one more than there are steps (the last is 0 and never evaluated).
        sigmas_audio: of the same length.
        roles: what the request packs.
    """
    groups: dict[Group, None] = {}
    for sigma_video, sigma_audio in zip(sigmas_video[:-1], sigmas_audio[:-1], strict=True):
        video, audio = 1.0 - sigma_video, 1.0 - sigma_audio
        values = [video]
        if roles.audio:
            values.append(1.0 if roles.locked_audio else audio)
        if roles.image:
            values.append(max(video, IMAGE_TIMESTEP))
        if roles.reference_audio:
            values.append(max(audio, REFERENCE_AUDIO_TIMESTEP))
        groups[group_of(values)] = None
    return Schedule(tuple(groups), f"{len(sigmas_video) - 1} steps, {roles.name}")
