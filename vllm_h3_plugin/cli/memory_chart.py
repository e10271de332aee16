# SPDX-License-Identifier: Apache-2.0
"""How ``vllm-h3 memory`` shows its numbers: tables, a stacked bar in text, and the same bar as a PNG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_h3_plugin.cli.console import stdout
from vllm_h3_plugin.errors import H3Error, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from vllm_h3_plugin.memory.prediction import Prediction

# Okabe and Ito's palette, which most colour-blind readers can tell apart; and a letter for terminals without colour.
_STYLES: dict[str, tuple[str, str]] = {
    "dit": ("#0072B2", "D"),
    "refiner": ("#56B4E9", "R"),
    "adaln": ("#E69F00", "A"),
    "text_encoder": ("#009E73", "T"),
    "vision": ("#8FD4B5", "V"),
    "video_vae": ("#CC79A7", "v"),
    "audio_vae": ("#E3B5CE", "a"),
    "vaes": ("#CC79A7", "v"),
    "transformer_ref": ("#4B3F72", "2"),
    "adapter": ("#F0E442", "L"),
    "request": ("#D55E00", "q"),
}
_TEXT_WIDTH = 64
_GIB, _MIB = 2**30, 2**20


def show(prediction: Prediction, memory_gib: float | None) -> None:
    """Print the parts, the request by phase, what fits, and the bar."""
    from vllm_h3_plugin.memory.weights import PARTS

    console, resident, peak = stdout(), prediction.resident, prediction.peak
    unit, size = _unit(resident.nbytes)
    where = f", one of {resident.tp} ranks" if resident.tp > 1 else ""
    console.print(f"{prediction.shapes.name}: recipe {prediction.recipe.name}{where}\n", markup=False)
    table = _table("resident", (unit,), "what it is")
    for name, nbytes in resident.parts.items():
        note = PARTS[name]
        if name == "adaln":
            note = "projections, BF16" if resident.table is None else f"table of {resident.table.rows} rows, BF16"
        table.add_row(name, f"{nbytes / size:.2f}", note)
    table.add_row("total", f"{resident.nbytes / size:.2f}", "stays from start to end", style="bold")
    table.add_row("while loading", f"{resident.load_peak_bytes / size:.2f}", "with the largest BF16 layer, at most")
    console.print(table)
    request = peak.request
    condition = f", {request.images} pictures" if request.images else ""
    condition += f", {request.audio_seconds:g} s of sound" if request.audio_seconds else ""
    console.print(
        f"\nrequest: {request.width}x{request.height}, {request.frames} frames, {request.steps} steps{condition}: "
        f"{request.tokens} tokens",
        markup=False,
    )
    table = _table("phase, on top", ("device MiB", "host MiB"), "largest term")
    for phase in peak.phases:
        terms = {**phase.device, **phase.host}
        largest = max(terms, key=lambda name: terms[name])
        style = "bold" if phase is peak.widest else None
        table.add_row(
            phase.name, f"{phase.device_bytes / _MIB:.0f}", f"{phase.host_bytes / _MIB:.0f}", largest, style=style
        )
    console.print(table)
    _show_fits(prediction)
    console.print()
    _print_bar(_segments(prediction), memory_gib)


def _show_fits(prediction: Prediction) -> None:
    from vllm_h3_plugin.memory.coefficients import DEFAULT

    console = stdout()
    console.print(
        f"\nlongest clip of 4 to 15 s in unified memory, {DEFAULT.process_bytes / _GIB:g} GiB for the server's "
        f"processes and {prediction.floor_gib:g} GiB left free:",
        markup=False,
    )
    sizes = [f"{fit.width}x{fit.height}" for fit in next(iter(prediction.fits.values()))]
    table = _table("memory", sizes)
    for memory_gib, fits in prediction.fits.items():
        cells = [
            f"none: {fit.missing_bytes / _GIB:.1f} GiB short" if fit.longest is None else f"{fit.seconds:.1f} s"
            for fit in fits
        ]
        table.add_row(f"{memory_gib:g} GiB", *cells)
    console.print(table)
    if prediction.resident.table is not None:
        console.print(
            "The memory guard also keeps room for the AdaLN table of another schedule (H3_ADALN_DEVICE_GIB).",
            markup=False,
        )


def show_measured(rows: Sequence[tuple[str, int, int, float | None]], worker: dict[str, Any]) -> None:
    """Print prediction and measurement of one worker side by side."""
    console, memory = stdout(), worker["memory"]
    unit, size = _unit(int(memory["resident_bytes"]))
    console.print(f"\nmeasured on {memory.get('device', 'an unnamed device')}", markup=False)
    table = _table("part", (f"predicted {unit}", f"measured {unit}", "difference"))
    for name, ours, theirs, off in rows:
        cells = (f"{ours / size:.2f}", f"{theirs / size:.2f}", "-" if off is None else f"{off:+.2f} %")
        table.add_row(name, *cells, style="bold" if name == "total" else None)
    console.print(table)
    for key, label in (
        ("load_peak_bytes", "peak while loading"),
        ("peak_bytes", "peak since"),
        ("rss_bytes", "process, RSS"),
    ):
        if key in memory:
            console.print(f"{label}: {int(memory[key]) / size:.2f} {unit}", markup=False)


def check_target(path: Path) -> None:
    """Refuse a picture that cannot be written, before anything is computed.

    Raises:
        UsageError: it exists, is no ``.png``, or its folder is missing.
    """
    if path.suffix.lower() != ".png":
        raise UsageError(f"--picture {path}", why="the picture is a PNG", fix="Give a name that ends in .png.")
    if path.exists():
        raise UsageError(f"{path} exists", why="nothing is overwritten", fix="Give another name or move it away.")
    if not path.parent.is_dir():
        raise UsageError(f"--picture {path}", why=f"there is no folder {path.parent}", fix="Make it or give another.")


def draw(prediction: Prediction, path: Path, memory_gib: float | None) -> None:
    """Write the bar with its legend as a PNG of 1200 x 300 pixels.

    Raises:
        UsageError: the file exists.
    """
    from PIL import Image, ImageDraw, ImageFont

    segments = _segments(prediction)
    need = sum(size for _, size in segments)
    whole = max(need, round((memory_gib or 0) * _GIB))
    unit, divisor = _unit(need)
    image = Image.new("RGB", (1200, 300), "white")
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default(size=20)
    limit = f" of {memory_gib:g} GiB" if memory_gib else ""
    request = prediction.peak.request
    title = (
        f"{prediction.recipe.name}: {need / divisor:.2f} {unit}{limit} with a request of "
        f"{request.width}x{request.height}, {request.frames} frames"
    )
    canvas.text((40, 20), title, fill="black", font=font)
    canvas.rectangle((40, 60, 1160, 140), outline="#888888", width=2)
    left = 40.0
    for index, (name, size) in enumerate(segments):
        right = left + 1120 * size / whole
        colour = _STYLES[name][0]
        canvas.rectangle((left, 60, right, 140), fill=colour)
        x, y = 40 + index % 3 * 380, 165 + index // 3 * 40
        canvas.rectangle((x, y, x + 22, y + 22), fill=colour)
        canvas.text((x + 32, y), f"{name}  {size / divisor:.2f} {unit}", fill="black", font=font)
        left = right
    if memory_gib and need > memory_gib * _GIB:
        end = 40 + 1120 * memory_gib * _GIB / whole
        canvas.line((end, 50, end, 150), fill="red", width=4)
    drawn = BytesIO()
    image.save(drawn, format="PNG")
    try:
        with path.open("xb") as file:
            try:
                file.write(drawn.getvalue())
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                path.unlink(missing_ok=True)
                raise
    except FileExistsError:
        check_target(path)
        raise
    except OSError as exc:
        raise H3Error(f"--picture {path}", why=exc.strerror or str(exc), fix="Free space, or name another.") from exc


def _segments(prediction: Prediction) -> list[tuple[str, int]]:
    return [*prediction.resident.parts.items(), ("request", prediction.peak.unified_bytes)]


def _print_bar(segments: Sequence[tuple[str, int]], memory_gib: float | None) -> None:
    from rich.text import Text

    need = sum(size for _, size in segments)
    whole = max(need, round((memory_gib or 0) * _GIB))
    bar, legend = Text(), Text()
    done = drawn = 0
    for name, size in segments:
        done += size
        cells = round(_TEXT_WIDTH * done / whole) - drawn
        drawn += cells
        colour, letter = _STYLES[name]
        bar.append(letter * cells, style=f"black on {colour}")
        legend.append(f" {letter} ", style=f"black on {colour}")
        legend.append(f" {name}  ")
    bar.append("." * (_TEXT_WIDTH - drawn))
    unit, size = _unit(need)
    limit = f" of {memory_gib:g} GiB" if memory_gib else ""
    over = " (does not fit)" if memory_gib and need > memory_gib * _GIB else ""
    bar.append(f" {need / size:.2f} {unit}{limit}{over}")
    stdout().print(bar)
    stdout().print(legend)


def _table(first: str, numeric: Sequence[str], last: str | None = None) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in numeric:
        table.add_column(name, justify="right", no_wrap=True)
    if last is not None:
        table.add_column(last, no_wrap=True)
    return table


def _unit(nbytes: int) -> tuple[str, int]:
    return ("GiB", _GIB) if nbytes >= _GIB else ("MiB", _MIB)
