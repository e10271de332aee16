# SPDX-License-Identifier: Apache-2.0
"""Two clips beside each other as one PNG: frames of both, what differs, and the metrics over time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from av.video.frame import VideoFrame
from PIL import Image, ImageDraw, ImageFont

from vllm_h3_plugin.video.decode import decoded_frames
from vllm_h3_plugin.video.difference import Difference, Metric
from vllm_h3_plugin.video.sheet import check_output, save

_GAP, _LABEL, _TILE, _CHART = 8, 20, 240, 130
_BACKGROUND, _INK, _FAINT = "#181818", "#f0f0f0", "#303030"
_LINES = {"psnr": ("#66ccff", "PSNR, dB"), "ssim": ("#ffcc66", "SSIM"), "vmaf": ("#99dd99", "VMAF")}
GAIN = 4
"""Differences are drawn so many times as large; full black is equal."""


def write_difference_sheet(apart: Difference, out: Path, *, columns: int = 6, force: bool = False) -> Path:
    """Draw evenly spaced frames: the first clip's, the second's, and their difference; and a chart a metric.

    Args:
        columns: number of frames, at least 1.

    Raises:
        UsageError: ``out`` exists and ``force`` is not set, or its folder does not exist.
    """
    check_output(out, force=force)
    count = min(columns, apart.compared)
    chosen = sorted({round(n * (apart.compared - 1) / max(count - 1, 1)) for n in range(count)})
    height = max(round(_TILE * apart.first.height / apart.first.width), 1)
    rows = [_tiles(path, chosen, height) for path in (apart.first.path, apart.second.path)]
    differences = [_amplified(one, other) for one, other in zip(*rows, strict=True)]
    shown = [metric for metric in apart.metrics.values() if metric.frames]
    width = _GAP + len(chosen) * (_TILE + _GAP)
    top = _GAP + 3 * (_LABEL + height + _GAP)
    sheet = Image.new("RGB", (width, top + len(shown) * (_LABEL + _CHART + _GAP)), _BACKGROUND)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    titles = (_name(apart.first.path), _name(apart.second.path), f"difference, x{GAIN}")
    for row, (title, tiles) in enumerate(zip(titles, (*rows, differences), strict=True)):
        y = _GAP + row * (_LABEL + height + _GAP)
        for column, (number, tile) in enumerate(zip(chosen, tiles, strict=True)):
            x = _GAP + column * (_TILE + _GAP)
            draw.text((x, y + 4), f"{title}   frame {number}" if column == 0 else f"frame {number}", _INK, font)
            sheet.paste(tile, (x, y + _LABEL))
    for row, metric in enumerate(shown):
        _chart(draw, font, metric, top + row * (_LABEL + _CHART + _GAP), width)
    save(sheet, out, force=force)
    return out


def _tiles(path: Path, chosen: list[int], height: int) -> list[Image.Image]:
    tiles: list[Image.Image] = []
    number = 0
    for frame in decoded_frames(path):
        if not isinstance(frame, VideoFrame):
            continue
        if number in chosen:
            tiles.append(frame.reformat(width=_TILE, height=height, format="rgb24").to_image())
        if number == chosen[-1]:
            break
        number += 1
    return tiles


def _amplified(one: Image.Image, other: Image.Image) -> Image.Image:
    apart = np.abs(np.asarray(one, np.int16) - np.asarray(other, np.int16)) * GAIN
    return Image.fromarray(apart.clip(0, 255).astype(np.uint8))


def _chart(draw: Any, font: Any, metric: Metric, top: int, width: int) -> None:
    colour, title = _LINES[metric.name]
    finite = [value for value in metric.frames if math.isfinite(value)]
    draw.text((_GAP, top + 4), f"{title}: {_words(metric, finite)}", _INK, font)
    left, right, low, high = _GAP, width - _GAP - 1, top + _LABEL + _CHART - 1, top + _LABEL
    draw.rectangle((left, high, right, low), fill=_FAINT)
    if not finite:
        return
    least, most = min(finite), max(finite)
    span = (most - least) or 1.0

    def place(number: int, value: float) -> tuple[float, float]:
        share = 1.0 if math.isinf(value) else (value - least) / span
        x = left + (right - left) * number / max(len(metric.frames) - 1, 1)
        return x, low - 4 - (low - high - 8) * share

    draw.line([place(number, value) for number, value in enumerate(metric.frames)], fill=colour, width=2)


def _words(metric: Metric, finite: list[float]) -> str:
    if not finite:
        return "every frame is equal"
    mean = "equal" if metric.mean is None or math.isinf(metric.mean) else f"{metric.mean:.4g}"
    return f"mean {mean}, from {min(finite):.4g} to {max(finite):.4g} over {len(metric.frames)} frames"


def _name(path: Path) -> str:
    # The built-in font may lack what a file name holds; a sheet must not fail for that.
    return path.name.encode("ascii", "replace").decode("ascii")
