# SPDX-License-Identifier: Apache-2.0
"""How far two decodings of one clip are apart, where tiles overlap and elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Apart:
    """Frames in bytes of two columns, compared.

    Attributes:
        worst: levels of 255 between two values at most.
        share: of values that differ.
        psnr: in dB; None: they are equal.
        seams, elsewhere: mean levels where tiles overlap, and where they do not.
    """

    worst: int
    share: float
    psnr: float | None
    seams: float
    elsewhere: float


def compare(one: torch.Tensor, other: torch.Tensor, seams: torch.Tensor) -> Apart:
    """Two clips in bytes, ``[3, T, H, W]`` on the CPU; frame by frame, which takes little memory.

    Args:
        seams: ``[H, W]``, where tiles overlap.
    """
    worst, differing, squares, on, off = 0, 0, 0.0, 0.0, 0.0
    count = one.shape[1]
    for number in range(count):
        levels = (one[:, number].short() - other[:, number].short()).abs()
        worst = max(worst, int(levels.max()))
        differing += int(levels.count_nonzero())
        squares += float((levels.float() ** 2).sum())
        on += float(levels[:, seams].float().sum())
        off += float(levels[:, ~seams].float().sum())
    error = squares / one.numel()
    psnr = 10 * math.log10(255**2 / error) if error else None
    inside, outside = (max(1, 3 * count * int(mask.sum())) for mask in (seams, ~seams))
    return Apart(worst, differing / one.numel(), psnr, on / inside, off / outside)
