# SPDX-License-Identifier: Apache-2.0
"""Milliseconds a step against frames as a PNG, a panel a picture size, with the floor under the lines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_h3_plugin.cli.line_chart import GREY, Line, draw_panels
from vllm_h3_plugin.errors import UsageError

if TYPE_CHECKING:
    from vllm_h3_plugin.host.bench.step_cells import Found

_COLOURS = {
    "stock-sdpa": "#CC79A7",
    "stock-bf16": "#E69F00",
    "stock-fp8": "#D55E00",
    "plugin": "#0072B2",
    "floor": GREY,
}


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
    panels = lines(found)
    if not panels:
        raise UsageError(f"--plot {path}", why="no column gave a time", fix="See the notes in the table.")
    title = f"One denoise step of {found.config.num_layers} blocks, ms, blocks scaled (logarithmic)"
    draw_panels(panels, path, title=title, across="frames", colours=_COLOURS, floor="floor")
