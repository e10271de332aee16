# SPDX-License-Identifier: Apache-2.0
"""Decoded frames as an encoder wants them: yuv420p in bytes, made where the frames are and copied from there once.

The host rounds to 8-bit RGB first and converts that on the CPU; here the VAE's floats become luma and chroma directly,
and half of the bytes travel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# ITU-R BT.601, 8 bits, limited range: Y in 16..235, Cb and Cr in 16..240 about 128, of R, G and B in [0, 1]. What
# libswscale makes of RGB unless told otherwise, and so what the host's clips hold.
_LUMA = (65.481, 128.553, 24.966)
_CB = (-37.797, -74.203, 112.0)
_CR = (112.0, -93.786, -18.214)


# Rows that a CPU converts at once, with what they become: they stay in its cache.
_ROWS = 128


def yuv420p(frames: torch.Tensor) -> torch.Tensor:
    """Convert frames. A chroma sample is the mean of its four pixels.

    Args:
        frames: ``[3, T, H, W]`` RGB, floating in [0, 1] or uint8; H and W even.

    Returns:
        ``[T, 3 H / 2, W]`` uint8 on the same device.
    """
    _, count, height, width = frames.shape
    planes = torch.empty(count, height * 3 // 2, width, dtype=torch.uint8, device=frames.device)
    convert = _by_rows if frames.device.type == "cpu" and _opencv() is not None else _by_frame
    # One frame at a time takes little memory.
    for number in range(count):
        frame = frames[:, number].float()
        if not frames.is_floating_point():
            frame /= 255
        chroma = planes[number, height:].view(2, height // 2, width // 2)
        convert(frame, planes[number, :height], chroma)
    return planes


@cache
def _opencv() -> Any:
    """OpenCV, which the host brings; None where it cannot be loaded: it wants libGL, which a bare machine lacks."""
    try:
        import cv2
    except ImportError:
        return None
    return cv2


def _by_frame(frame: torch.Tensor, luma: torch.Tensor, chroma: torch.Tensor) -> None:
    """A frame ``[3, H, W]`` into its planes, on an accelerator and wherever there is no OpenCV."""
    luma.copy_(_weighted(frame, _LUMA, 16))
    rows = frame[:, 0::2] + frame[:, 1::2]
    mean = (rows[..., 0::2] + rows[..., 1::2]).mul_(0.25)
    chroma[0] = _weighted(mean, _CB, 128)
    chroma[1] = _weighted(mean, _CR, 128)


def _weighted(rgb: torch.Tensor, weights: tuple[float, float, float], offset: int) -> torch.Tensor:
    """The weighted sum, to be cut to whole numbers."""
    total = rgb[0] * weights[0]
    # The half rounds, because the conversion to bytes cuts.
    return total.add_(rgb[1], alpha=weights[1]).add_(rgb[2], alpha=weights[2]).add_(offset + 0.5).clamp_(0, 255)


def _by_rows(frame: torch.Tensor, luma: torch.Tensor, chroma: torch.Tensor) -> None:
    """The same on a CPU. With PyTorch it took 4 times as long beside x264, whose threads its own wait for."""
    cv2, pixels, ys, cs = _opencv(), frame.numpy(), luma.numpy(), chroma.numpy()
    for top in range(0, ys.shape[0], _ROWS):
        rows = pixels[:, top : top + _ROWS]
        _sum_into(ys[top : top + _ROWS], rows, _LUMA, 16)
        size = (rows.shape[2] // 2, rows.shape[1] // 2)
        means = [cv2.resize(colour, size, interpolation=cv2.INTER_AREA) for colour in rows]
        for plane, weights in zip(cs[:, top // 2 : (top + _ROWS) // 2], (_CB, _CR), strict=True):
            _sum_into(plane, means, weights, 128)


def _sum_into(plane: Any, rgb: Any, weights: tuple[float, float, float], offset: int) -> None:
    cv2 = _opencv()
    part = cv2.addWeighted(rgb[0], weights[0], rgb[1], weights[1], offset)
    cv2.addWeighted(part, 1.0, rgb[2], weights[2], 0.0, dst=plane, dtype=cv2.CV_8U)


def on_host(planes: torch.Tensor) -> Callable[[], NDArray[np.uint8]]:
    """Start to copy planes to the host; what is returned waits for them, in whichever thread."""
    if planes.device.type != "cuda":
        array = planes.cpu().numpy()
        return lambda: array
    host = torch.empty(planes.shape, dtype=planes.dtype, pin_memory=True)
    host.copy_(planes, non_blocking=True)
    there = torch.cuda.Event()
    there.record()

    def wait() -> NDArray[np.uint8]:
        there.synchronize()
        return host.numpy()

    return wait
