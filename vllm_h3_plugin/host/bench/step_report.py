# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-h3 bench step`` says: a row a cell, the figures that are asked for, and ``docs/results/step.json``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from vllm_h3_plugin.checkpoint.configs import DitConfig
from vllm_h3_plugin.host.bench.report import Figure, hardware, versions
from vllm_h3_plugin.host.bench.step_cells import (
    FLOOR,
    LONG_CLIP,
    PLUGIN,
    SHORT_CLIP,
    STOCK_BF16,
    STOCK_FP8,
    STOCK_SDPA,
    Cell,
    Found,
    clip_of,
)
from vllm_h3_plugin.host.bench.step_profile import GROUPS

WORDS = {
    STOCK_BF16: "stock, BF16",
    STOCK_FP8: "stock, FP8",
    STOCK_SDPA: "stock, FP8, SDPA",
    PLUGIN: "plugin",
    FLOOR: "floor",
}
"""Columns for people."""

FIRST_OVER_SECOND = "first_over_second_request"
"""Comes from a real server (`make test-gpu`), and is put in afterwards by ``tools.results.set_ratio``."""

_GIB = 2**30


def step_ms(cell: Cell, layers: int) -> float | None:
    """A step of the whole model: blocks scaled to its depth, and what is outside of them; of the floor blocks alone."""
    if cell.blocks_ms is None:
        return None
    blocks = cell.blocks_ms / cell.layers * layers
    if cell.column == FLOOR:
        return blocks
    return None if cell.outside_ms is None else blocks + cell.outside_ms


def rows(found: Found) -> list[dict[str, Any]]:
    """One row a cell, and one for attention in few bits."""
    table = [_row(found, cell) for cell in found.cells]
    low = found.low_bit
    if low is not None:
        worst = max(low.layer_errors, key=lambda name: low.layer_errors[name])
        errors = ", ".join(f"{name} {error:.4f}" for name, error in low.layer_errors.items())
        clip = _clip(low.size)
        common = {"Clip": clip, "Tokens": low.size.tokens, "Blocks": low.layers}
        table += [
            {**common, "Column": "plugin, cuDNN attention in BF16", "Step, ms": low.exact_ms},
            {
                **common,
                "Column": f"plugin, attention in {low.precision.upper()}",
                "Step, ms": low.low_bit_ms,
                "Note": f"cosine of the step {low.cosine:.6f}; relative error of attention: {errors}; worst: {worst}",
            },
        ]
    return table


def _row(found: Found, cell: Cell) -> dict[str, Any]:
    floor = next((c for c in found.cells if c.size == cell.size and c.column == FLOOR), None)
    below = floor.blocks_ms if floor is not None else None
    row: dict[str, Any] = {
        "Clip": _clip(cell.size),
        "Tokens": cell.size.tokens,
        "Blocks": cell.layers,
        "Column": WORDS[cell.column],
        "Blocks, ms": cell.blocks_ms,
        "Over floor": cell.blocks_ms / below if cell.blocks_ms and below else None,
        "TFLOP/s": cell.flops / cell.blocks_ms / 1e9 if cell.blocks_ms else None,
        "Step, ms": cell.forward_ms,
        "Outside, ms": cell.outside_ms,
        f"Step of {found.config.num_layers}, ms": step_ms(cell, found.config.num_layers),
        "Busy, ms": sum(cell.busy_ms.values()) if cell.busy_ms else None,
    }
    row |= {f"{group}, ms": cell.busy_ms.get(group) for group in GROUPS}
    row["Activations, GiB"] = cell.activation_bytes / _GIB if cell.activation_bytes is not None else None
    row["First step extra, s"] = cell.compile_s
    row["Note"] = cell.note
    return row


def _clip(size: Any) -> str:
    return f"{size.width}x{size.height}, {size.frames} frames"


@dataclass(frozen=True)
class _Figures:
    found: Found

    def ratio(
        self,
        name: str,
        clip: tuple[int, int, int],
        above: str,
        below: str,
        value: Callable[[Cell], float | None],
        asked: str,
        below_value: Callable[[Cell], float | None] | None = None,
    ) -> Figure:
        first, second = self.found.cell(clip, above), self.found.cell(clip, below)
        if first is None or second is None:
            missing = " and ".join(word for word, cell in ((above, first), (below, second)) if cell is None)
            return Figure(name, None, asked, f"{missing} of {clip[0]}x{clip[1]}x{clip[2]} was not measured (yet)")
        top, bottom = value(first), (below_value or value)(second)
        if not top or not bottom:
            reason = "; ".join(f"{cell.column}: {cell.note}" for cell, v in ((first, top), (second, bottom)) if not v)
            return Figure(name, None, asked, reason)
        return Figure(name, round(top / bottom, 4), asked)


def figures(found: Found) -> list[Figure]:
    """Every figure that is asked for; null where the model is not of the real width."""
    if found.config.hidden_size != DitConfig.hidden_size:
        reason = "not the real width: this run tries the code, not the machine"
        return [Figure(figure.name, None, figure.asked, reason) for figure in _figures(found)]
    return _figures(found)


def _figures(found: Found) -> list[Figure]:
    of, layers = _Figures(found), found.config.num_layers

    def blocks(cell: Cell) -> float | None:
        return cell.blocks_ms

    def forward(cell: Cell) -> float | None:
        return cell.forward_ms

    def whole(cell: Cell) -> float | None:
        return step_ms(cell, layers)

    def activations(cell: Cell) -> float | None:
        return cell.activation_bytes

    plugin = found.cell(SHORT_CLIP, PLUGIN)
    outside = plugin.outside_ms if plugin is not None else None
    low, low_reason = found.low_bit, found.low_bit_reason
    if low is not None and clip_of(low.size) != LONG_CLIP:
        low_reason, low = f"measured at {_clip(low.size)} only", None
    dram = found.dram.get(PLUGIN), found.dram.get(STOCK_FP8)
    missing = "plugin was not measured (yet)" if plugin is None else plugin.note
    return [
        of.ratio("wall_over_floor_6016", SHORT_CLIP, PLUGIN, FLOOR, blocks, "<= 1.08"),
        of.ratio("wall_over_floor_38k", LONG_CLIP, PLUGIN, FLOOR, blocks, "<= 1.02"),
        of.ratio("stock_fp8_over_plugin_6016", SHORT_CLIP, STOCK_FP8, PLUGIN, forward, ">= 1.15"),
        of.ratio("stock_sdpa_over_plugin_6016", SHORT_CLIP, STOCK_SDPA, PLUGIN, forward, ">= 2"),
        of.ratio("stock_fp8_over_plugin_6016_all_blocks", SHORT_CLIP, STOCK_FP8, PLUGIN, whole, ""),
        of.ratio("stock_fp8_over_plugin_38k_all_blocks", LONG_CLIP, STOCK_FP8, PLUGIN, whole, ""),
        of.ratio("activations_over_stock_38k", LONG_CLIP, PLUGIN, STOCK_FP8, activations, ""),
        Figure(
            "dram_bytes_over_stock",
            round(dram[0] / dram[1], 4) if dram[0] and dram[1] else None,
            "<= 0.5",
            found.dram_reason,
        ),
        Figure("outside_blocks_ms", None if outside is None else round(outside, 4), "<= 2", missing),
        Figure(
            "lowbit_attention_speedup_38k",
            None if low is None else round(low.speedup, 4),
            ">= 1.3",
            low_reason,
        ),
        Figure("lowbit_attention_cosine", None if low is None else round(low.cosine, 6), ">= 0.999", low_reason),
        Figure(FIRST_OVER_SECOND, None, "<= 2", "measured with a real server: `make test-gpu`"),
    ]


def failures(found: Found) -> dict[str, str]:
    """Cells of the plugin and of the floor without a time, and why: what this command is about did not run."""
    return {
        f"{WORDS[cell.column]}, {_clip(cell.size)}": cell.note
        for cell in found.cells
        if cell.column in (PLUGIN, FLOOR) and cell.blocks_ms is None
    }


def result(found: Found, *, command: str) -> dict[str, Any]:
    """The measurement with the fields of ``docs/results/*.json``."""
    every = figures(found)
    return {
        "title": "One denoise step, beside the floor of its own kernels",
        "command": command,
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "rows": rows(found),
        "ratios": {figure.name: figure.value for figure in every},
        "reasons": {figure.name: figure.reason or "not measured" for figure in every if figure.value is None},
        "notes": _notes(found, every),
    }


def _notes(found: Found, every: Sequence[Figure]) -> str:
    words = [
        "Random weights of one seed, a request of text alone, medians of turns; `Blocks` of "
        f"{found.config.num_layers} are built and timed, and `Step of {found.config.num_layers}` scales their time. "
        "The floor is the GEMM and attention kernels alone, as one CUDA graph. `Outside` is a step without blocks, "
        "within a request. `Busy` is kernel time of one profiled step, of the floor one replay. "
        "`6016` and `38k` stand for 768x448 with 56 frames and 1344x768 with 124.",
    ]
    missed = [f"`{figure.name}` ({figure.value}, asked {figure.asked})" for figure in every if figure.met is False]
    words += [f"Missed: {', '.join(missed)}."] if missed else []
    if found.dram:
        sizes = ", ".join(f"{column} {value / 1e6:.1f} MB" for column, value in found.dram.items())
        words.append(f"Memory traffic a block outside GEMM and attention: {sizes}.")
    return " ".join(words)
