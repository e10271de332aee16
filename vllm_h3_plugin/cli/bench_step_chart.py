# SPDX-License-Identifier: Apache-2.0
"""Milliseconds a step against frames as a PNG, a panel a picture size, with the floor under the lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_h3_plugin.errors import UsageError

if TYPE_CHECKING:
    from vllm_h3_plugin.host.bench.step_cells import Found

Line = Sequence[tuple[int, float]]
"""(frames, milliseconds), by frames."""

# Okabe and Ito's palette, which most colour-blind readers can tell apart.
_COLOURS = {
    "stock-sdpa": "#CC79A7",
    "stock-bf16": "#E69F00",
    "stock-fp8": "#D55E00",
    "plugin": "#0072B2",
    "floor": "#555555",
}
_PANEL, _HEIGHT, _TOP, _BOTTOM, _LEFT, _RIGHT = 640, 560, 80, 130, 90, 30


def check_target(path: Path) -> None:
    """Refuse a picture that cannot be written, before anything is measured.

    Raises:
        UsageError: it exists, is no ``.png``, or its folder is missing.
    """
    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot {path}", why="the plot is a PNG", fix="Give a name that ends in .png.")
    if path.exists():
        raise UsageError(f"--plot {path}", why="a file of that name is there", fix="Give another, or move it away.")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}", why=f"there is no folder {path.parent}", fix="Make it or give another.")


def lines(found: Found) -> dict[str, dict[str, Line]]:
    """Picture size -> column -> its line; columns without a figure are left out."""
    from vllm_h3_plugin.host.bench.step_report import step_ms

    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for cell in found.cells:
        value = step_ms(cell, found.config.num_layers)
        if value is not None:
            panel = panels.setdefault(f"{cell.size.width}x{cell.size.height}", {})
            panel.setdefault(cell.column, []).append((cell.size.frames, value))
    return {name: {column: sorted(line) for column, line in panel.items()} for name, panel in panels.items()}


def draw(found: Found, path: Path) -> None:
    """Write the picture.

    Raises:
        UsageError: there is nothing to draw.
    """
    from PIL import Image, ImageDraw, ImageFont

    panels = lines(found)
    if not panels:
        raise UsageError(f"--plot {path}", why="no column gave a time", fix="See the notes in the table.")
    image = Image.new("RGB", (_PANEL * len(panels), _HEIGHT), "white")
    canvas, font, small = ImageDraw.Draw(image), ImageFont.load_default(size=20), ImageFont.load_default(size=15)
    depth = found.config.num_layers
    canvas.text(
        (20, 12), f"One denoise step of {depth} blocks, ms, blocks scaled (logarithmic)", fill="black", font=font
    )
    for index, (name, panel) in enumerate(panels.items()):
        _panel(canvas, index * _PANEL, name, panel, small)
    drawn = BytesIO()
    image.save(drawn, format="PNG")
    path.write_bytes(drawn.getvalue())


def _panel(canvas: Any, left: int, name: str, panel: dict[str, Line], font: Any) -> None:
    x0, x1, y0, y1 = left + _LEFT, left + _PANEL - _RIGHT, _HEIGHT - _BOTTOM, _TOP
    points = [point for line in panel.values() for point in line]
    ticks = _ticks(min(value for _, value in points), max(value for _, value in points))
    low, high = math.log(ticks[0]), math.log(ticks[-1])
    frames = max(frame for frame, _ in points)

    def place(frame: float, value: float) -> tuple[float, float]:
        return x0 + (x1 - x0) * frame / frames, y0 - (y0 - y1) * (math.log(value) - low) / (high - low)

    canvas.text((x0, y1 - 28), name, fill="black", font=font)
    for tick in ticks:
        y = place(0, tick)[1]
        canvas.line((x0, y, x1, y), fill="#DDDDDD")
        canvas.text((left + 12, y - 9), f"{tick:g}", fill="black", font=font)
    for frame in sorted({frame for frame, _ in points}):
        x = place(frame, ticks[0])[0]
        canvas.line((x, y0, x, y0 + 6), fill="black")
        canvas.text((x - 12, y0 + 8), str(frame), fill="black", font=font)
    canvas.text((x0, y0 + 28), "frames", fill="black", font=font)
    for row, (column, colour) in enumerate((c, colour) for c, colour in _COLOURS.items() if c in panel):
        dots = [place(*point) for point in panel[column]]
        if column == "floor" and len(dots) > 1:
            canvas.polygon([(dots[0][0], y0), *dots, (dots[-1][0], y0)], fill="#EEEEEE")
        if len(dots) > 1:
            canvas.line(dots, fill=colour, width=3)
        for x, y in dots:
            canvas.ellipse((x - 4, y - 4, x + 4, y + 4), fill=colour)
        x, y = x0 + row % 3 * 170, y0 + 56 + row // 3 * 26
        canvas.rectangle((x, y, x + 16, y + 16), fill=colour)
        canvas.text((x + 22, y - 1), column, fill="black", font=font)


def _ticks(least: float, most: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from the last below the least value to the first above the largest."""
    first = math.floor(math.log10(least)) - 1
    every = [step * 10.0**power for power in range(first, math.ceil(math.log10(most)) + 2) for step in (1, 2, 5)]
    start = max(index for index, tick in enumerate(every) if tick < least)
    end = min(index for index, tick in enumerate(every) if tick > most)
    return every[start : end + 1]
