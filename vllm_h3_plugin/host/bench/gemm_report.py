# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-h3 bench gemm`` says: a row a cell, what is wrong with a slow one, and ``docs/results/gemm.json``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any

from vllm_h3_plugin.host.bench.gemm import BLOCK_LAYERS, Cell, Found
from vllm_h3_plugin.host.bench.gemm_kernels import BF16, CUTLASS_CHANNEL, SAMPLE_ROWS, SCALED_MM, dtype_of
from vllm_h3_plugin.host.bench.report import hardware, versions

POOR_SHARE = 0.5
"""Below this share of the roofline a row says what is wrong."""

ERROR_BOUND = 0.005
"""The same FP8 bytes multiplied by CUTLASS and by plain torch differ by 0.0037 on Hopper, whose tensor cores sum in
fewer bits than FP32; both round to BF16 once, which alone is 0.0017."""

_TILE = 128  # the side of an output tile that a multiprocessor works on, in most kernels of either library


def is_wrong(cell: Cell) -> bool:
    """Whether a kernel ran and computed something else."""
    return cell.error is not None and not cell.error < ERROR_BOUND


def verdict(cell: Cell, found: Found) -> str:
    """What is wrong with a cell, in words; empty: nothing is."""
    if cell.failed:
        return cell.failed
    if is_wrong(cell):
        return f"WRONG: relative error {cell.error:.2g}, and rounding explains {ERROR_BOUND}"
    share = found.roofline.share(cell)
    if share is None or share >= POOR_SHARE:
        return ""
    better = _better(cell, found)
    if better is not None:
        return f"the kernel: {better.kernel} takes {better.ms:.3g} ms at the same shape"
    shape = cell.shape
    tiles = -(-shape.m // _TILE) * -(-shape.n // _TILE)
    if found.multiprocessors and tiles < found.multiprocessors:
        return f"the shape: {tiles} tiles of {_TILE} x {_TILE} leave some of {found.multiprocessors} SMs idle"
    arithmetic, memory = found.roofline.bounds_ms(cell) or (0.0, 0.0)
    if memory > arithmetic:
        return f"bound by memory, and {memory / (cell.ms or 1):.0%} of the bytes a second of a copy"
    return f"no kernel here does better: none is tuned for {found.architecture} at this shape"


def _better(cell: Cell, found: Found) -> Cell | None:
    """The fastest other kernel of the same shape and dtype that is no poor one itself."""
    others = [
        other
        for other in found.cells
        if other.shape == cell.shape
        and dtype_of(other.kernel) == dtype_of(cell.kernel)
        and other.ms
        and other.ms < 0.8 * (cell.ms or 0)
        and (found.roofline.share(other) or 0) >= POOR_SHARE
    ]
    return min(others, key=lambda other: other.ms or 0, default=None)


def rows(found: Found) -> list[dict[str, Any]]:
    """One row a cell."""
    return [
        {
            "Layer": cell.shape.layer,
            "M": cell.shape.m,
            "N": cell.shape.n,
            "K": cell.shape.k,
            "Kernel": cell.kernel,
            "ms": cell.ms,
            "TFLOP/s": cell.tflops,
            "Of roofline": found.roofline.share(cell),
            "Relative error": cell.error,
            "What is wrong": verdict(cell, found),
        }
        for cell in found.cells
    ]


def roofline_words(found: Found) -> str:
    """The roofline in a line."""
    line = found.roofline
    peaks = [f"{dtype.upper()} {line.tflops[dtype]:.0f} TFLOP/s ({line.source[dtype]})" for dtype in line.tflops]
    return f"Roofline, measured in this run: {', '.join(peaks)}; copy {line.gb_s:.0f} GB/s."


def ratios(found: Found) -> tuple[dict[str, float | None], dict[str, str]]:
    """Figures by name, and why some are null; ``cutlass_*`` are of the blocks' layers, which take a step's time."""
    line = found.roofline
    cutlass = [cell for cell in found.cells if cell.kernel == CUTLASS_CHANNEL and cell.shape.layer in BLOCK_LAYERS]
    shares = [share for cell in cutlass if (share := line.share(cell)) is not None]
    errors = [cell.error for cell in found.cells if cell.error is not None and dtype_of(cell.kernel) == "fp8"]
    failed = next((cell.failed for cell in found.cells if cell.kernel == CUTLASS_CHANNEL and cell.failed), "")
    values: dict[str, float | None] = {
        "roofline_fp8_tflops": line.tflops.get("fp8"),
        "roofline_bf16_tflops": line.tflops.get("bf16"),
        "roofline_copy_gb_s": line.gb_s,
        "cutlass_least_share": min(shares, default=None),
        "bf16_over_cutlass": _ratio(found.cells, BF16, cutlass),
        "scaled_mm_over_cutlass": _ratio(found.cells, SCALED_MM, cutlass),
        "fp8_worst_relative_error": max(errors, default=None),
    }
    reasons = {}
    for name, value in values.items():
        if value is None:
            reasons[name] = failed or "; ".join(line.failed.values()) or "not measured (yet)"
    return values, reasons


def _ratio(cells: Iterable[Cell], kernel: str, cutlass: Sequence[Cell]) -> float | None:
    """Time of all block shapes on a kernel over theirs on CUTLASS, of shapes that both computed."""
    other = {cell.shape: cell.ms for cell in cells if cell.kernel == kernel and cell.ms}
    pairs = [(other[cell.shape], cell.ms) for cell in cutlass if cell.ms and cell.shape in other]
    return sum(above for above, _ in pairs) / sum(below for _, below in pairs) if pairs else None


def result(found: Found, *, command: str) -> dict[str, Any]:
    """The measurement with the fields of ``docs/results/*.json``."""
    values, reasons = ratios(found)
    return {
        "title": "Matrix multiplications of the model, by kernel",
        "command": command,
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "rows": rows(found),
        "ratios": values,
        "reasons": reasons,
        "notes": f"{roofline_words(found)} A share is the larger of FLOPs over peak and bytes over the copy's rate, "
        "over the time. Operands are given quantized; weights come from memory. Relative error is against plain torch "
        f"on the same operands, on {SAMPLE_ROWS} rows.",
    }
