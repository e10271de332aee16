# SPDX-License-Identifier: Apache-2.0
"""Seconds a step against tokens as a PNG, a line a recipe, with the FLOPs of a step beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_h3_plugin.cli.line_chart import GREY, PALETTE, Line, draw_panels
from vllm_h3_plugin.errors import UsageError

if TYPE_CHECKING:
    from vllm_h3_plugin.serving.clip_matrix import Row

_FLOPS = "by FLOPs"


def lines(found: Sequence[Row]) -> dict[str, Line]:
    """A line a recipe, and what the FLOPs of the steps predict from the fastest recipe's clip of the fewest tokens."""
    points: dict[str, dict[int, float]] = {}
    flops: dict[int, int] = {}
    for row in found:
        step = row.median("step")
        if step and row.measured[0].tokens:
            cell = row.measured[0]
            tokens = cell.tokens
            assert tokens is not None
            known = points.setdefault(cell.recipe, {})
            known[tokens] = min(step, known.get(tokens, step))
            if cell.flops:
                flops[tokens] = cell.flops
    drawn: dict[str, Line] = {recipe: sorted(known.items()) for recipe, known in points.items()}
    if len(flops) > 1:
        least = min(flops)
        base = min(known[least] for known in points.values() if least in known)
        drawn[_FLOPS] = [(tokens, base * flops[tokens] / flops[least]) for tokens in sorted(flops)]
    return drawn


def draw(found: Sequence[Row], path: Path) -> None:
    """Write the picture.

    Raises:
        UsageError: there is nothing to draw.
    """
    panel = lines(found)
    if not panel:
        raise UsageError(f"--plot {path}", why="no cell has the time of a step", fix="See the notes in the table.")
    recipes = [name for name in panel if name != _FLOPS]
    colours = {name: PALETTE[number % len(PALETTE)] for number, name in enumerate(recipes)} | {_FLOPS: GREY}
    title = "One denoise step, seconds (logarithmic)"
    draw_panels({"": panel}, path, title=title, across="tokens", colours=colours, floor=_FLOPS)
