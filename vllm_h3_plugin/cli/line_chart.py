# SPDX-License-Identifier: Apache-2.0
"""Lines over a logarithmic axis as a PNG, a panel beside a panel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from vllm_h3_plugin.errors import UsageError

Line = Sequence[tuple[int, float]]
"""(x, y), by x; y above 0."""

# Okabe and Ito's palette, which most colour-blind readers can tell apart.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#555555"
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


def draw_panels(
    panels: Mapping[str, Mapping[str, Line]],
    path: Path,
    *,
    title: str,
    across: str,
    colours: Mapping[str, str],
    floor: str,
) -> None:
    """Write the picture.

    Args:
        panels: heading -> name of a line -> the line. Not empty.
        across: what the x-axis counts.
        colours: of the lines, in the order of the legend.
        floor: the line with a shade under it.
    """
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (_PANEL * len(panels), _HEIGHT), "white")
    canvas, font, small = ImageDraw.Draw(image), ImageFont.load_default(size=20), ImageFont.load_default(size=15)
    canvas.text((20, 12), title, fill="black", font=font)
    for index, (name, panel) in enumerate(panels.items()):
        _panel(canvas, index * _PANEL, name, panel, small, across, colours, floor)
    drawn = BytesIO()
    image.save(drawn, format="PNG")
    path.write_bytes(drawn.getvalue())


def _panel(
    canvas: Any,
    left: int,
    name: str,
    panel: Mapping[str, Line],
    font: Any,
    across: str,
    colours: Mapping[str, str],
    floor: str,
) -> None:
    x0, x1, y0, y1 = left + _LEFT, left + _PANEL - _RIGHT, _HEIGHT - _BOTTOM, _TOP
    points = [point for line in panel.values() for point in line]
    ticks = _ticks(min(value for _, value in points), max(value for _, value in points))
    low, high = math.log(ticks[0]), math.log(ticks[-1])
    most = max(x for x, _ in points)

    def place(x: float, value: float) -> tuple[float, float]:
        return x0 + (x1 - x0) * x / most, y0 - (y0 - y1) * (math.log(value) - low) / (high - low)

    canvas.text((x0, y1 - 28), name, fill="black", font=font)
    for tick in ticks:
        y = place(0, tick)[1]
        canvas.line((x0, y, x1, y), fill="#DDDDDD")
        canvas.text((left + 12, y - 9), f"{tick:g}", fill="black", font=font)
    for count in sorted({x for x, _ in points}):
        x = place(count, ticks[0])[0]
        canvas.line((x, y0, x, y0 + 6), fill="black")
        canvas.text((x - 12, y0 + 8), str(count), fill="black", font=font)
    canvas.text((x0, y0 + 28), across, fill="black", font=font)
    for row, (column, colour) in enumerate((c, colour) for c, colour in colours.items() if c in panel):
        dots = [place(*point) for point in panel[column]]
        if column == floor and len(dots) > 1:
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
