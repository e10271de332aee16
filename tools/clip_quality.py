# SPDX-License-Identifier: Apache-2.0
"""How close a clip comes to the frames that it was made of."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray


def clouds(frames: int, height: int, width: int, seed: int = 0) -> Any:
    """``[1, 3, T, H, W]`` FP32 in [0, 1]: clouds of several sizes that drift, with a little grain."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    margin = 2 * frames
    wide = torch.zeros(3, height + margin, width + margin)
    for octave in range(2, 8):
        size = ((height + margin) >> octave, (width + margin) >> octave)
        coarse = torch.randn(1, 3, *size, generator=generator)
        wide += torch.nn.functional.interpolate(coarse, wide.shape[1:], mode="bicubic")[0] * 2**octave
    wide = wide / wide.std() * 0.2 + 0.5
    clip = torch.empty(1, 3, frames, height, width)
    for number in range(frames):
        clip[0, :, number] = wide[:, number : number + height, 2 * number : 2 * number + width]
    clip += torch.randn(clip.shape[2:], generator=generator) * 0.01
    return clip.clamp_(0, 1)


def measure(clip: bytes, want: NDArray[np.float32]) -> tuple[float, float]:
    """PSNR in RGB (dB) and SSIM of luma (7x7 windows) over all frames.

    Args:
        want: ``[T, H, W, 3]`` in 0..255, not rounded.
    """
    import av

    squares, similar, count = 0.0, 0.0, 0
    with av.open(io.BytesIO(clip), "r") as container:
        for frame in container.decode(video=0):
            seen = frame.to_ndarray(format="rgb24").astype(np.float32)
            squares += float(np.mean((seen - want[count]) ** 2))
            similar += _ssim(_luma(seen), _luma(want[count]))
            count += 1
    if count != len(want):
        raise ValueError(f"{count} frames of {len(want)}")
    return float(10 * np.log10(255**2 / (squares / count))), similar / count


def _luma(rgb: NDArray[np.float32]) -> NDArray[np.float32]:
    return (rgb @ np.array([0.299, 0.587, 0.114], np.float32)).astype(np.float32)


def _ssim(one: NDArray[np.float32], two: NDArray[np.float32]) -> float:
    """Wang et al. 2004, with uniform windows; constants as there."""
    import cv2

    def mean(values: NDArray[np.float32]) -> Any:
        return cv2.blur(values, (7, 7))

    first, second = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    a, b = mean(one), mean(two)
    spread = mean(one * one) - a * a + mean(two * two) - b * b
    both = mean(one * two) - a * b
    return float(np.mean((2 * a * b + first) * (2 * both + second) / ((a * a + b * b + first) * (spread + second))))
