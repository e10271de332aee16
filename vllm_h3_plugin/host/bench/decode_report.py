# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-h3 bench decode`` says: a row a column, and the figures that are asked for."""

from __future__ import annotations

from datetime import date
from typing import Any

from vllm_h3_plugin.host.bench.decode import STOCK, Column, Found, column_name
from vllm_h3_plugin.host.bench.report import Figure, hardware, versions

SPEEDUP = "vae_decode_speedup"
ASKED_CLIP = (1344, 768, 124)
_GIB = 2**30


def rows(found: Found) -> list[dict[str, Any]]:
    """One row a column."""
    size = found.size
    return [
        {
            "Decode": f"{size.width}x{size.height}, {size.frames} frames",
            "Column": "stock host, tile by tile" if column.name == STOCK else f"plugin, {column.name}",
            "Tiles of a clip": found.tiles,
            "At once": 1 if column.decoded is None else column.decoded["batch"],
            "decode_latent, s": _seconds(column.decode_ms),
            "Until bytes, s": _seconds(column.bytes_ms),
            "Activations, GiB": None if column.peak_bytes is None else round(column.peak_bytes / _GIB, 3),
            "Differing values, %": None if column.apart is None else round(100 * column.apart.share, 4),
            "Worst, levels": None if column.apart is None else column.apart.worst,
            "PSNR, dB": None if column.apart is None or column.apart.psnr is None else round(column.apart.psnr, 2),
            "Mean on seams, levels": None if column.apart is None else round(column.apart.seams, 5),
            "Mean elsewhere, levels": None if column.apart is None else round(column.apart.elsewhere, 5),
            "Note": column.note,
        }
        for column in found.columns
    ]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds / 1e3, 4)


def figures(found: Found) -> list[Figure]:
    """What is asked for; null where the decoder or the clip is not the one that it is asked of."""
    size = found.size
    stock, ours = found.column(STOCK), found.column(column_name(None))
    reason = ""
    if not found.true_width:
        reason = "not the real width: this run tries the code, not the machine"
    elif (size.width, size.height, size.frames) != ASKED_CLIP:
        reason = f"asked of {ASKED_CLIP[0]}x{ASKED_CLIP[1]}, {ASKED_CLIP[2]} frames"
    elif stock is None or ours is None:
        reason = "the column was not measured"
    elif stock.note or ours.note:
        reason = stock.note or ours.note

    def ratio(name: str, field: str, asked: str) -> Figure:
        top, bottom = getattr(stock, field, None), getattr(ours, field, None)
        if reason or not top or not bottom:
            return Figure(name, None, asked, reason or "a time is missing")
        return Figure(name, round(top / bottom, 4), asked)

    return [
        ratio(SPEEDUP, "bytes_ms", ">= 1.4"),
        ratio("vae_decode_latent_speedup", "decode_ms", ""),
        _psnr(ours, reason),
        Figure("vae_decode_batch", _batch(ours), "", "no batch was told"),
    ]


def _psnr(column: Column | None, reason: str) -> Figure:
    if reason or column is None or column.apart is None:
        return Figure("vae_decode_psnr_db", None, ">= 50", reason or "nothing to compare")
    # Two equal clips are infinitely near; 100 dB stands for that.
    psnr = 100.0 if column.apart.psnr is None else column.apart.psnr
    return Figure("vae_decode_psnr_db", round(psnr, 2), ">= 50")


def _batch(column: Column | None) -> float | None:
    return None if column is None or column.decoded is None else float(column.decoded["batch"])


def failures(found: Found) -> dict[str, str]:
    """Columns of the plugin without a time, and why."""
    return {column.name: column.note for column in found.columns if column.name != STOCK and column.note}


def result(found: Found, *, command: str, subject: str) -> dict[str, Any]:
    """The measurement with the fields of ``docs/results/*.json``."""
    every = figures(found)
    own = (
        "put its own operators into the decoder" if found.optimized else "has no operators of its own for this decoder"
    )
    return {
        "title": "Decoding one clip, tiles in batches beside tile by tile",
        "command": command,
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "rows": rows(found),
        "ratios": {figure.name: figure.value for figure in every},
        "reasons": {figure.name: figure.reason for figure in every if figure.value is None},
        "notes": f"{subject}; the stock host {own}, the plugin's runs with {found.steps}. Medians of turns, both in "
        "one process, FP16 autocast as in the pipeline. *Until bytes* is from latents to frames in host memory: of the "
        "stock host RGB bytes after the last clip, of the plugin luma and chroma bytes clip by clip. Differences are "
        "in levels of 255, of `decode_latent` against the stock host's.",
    }
