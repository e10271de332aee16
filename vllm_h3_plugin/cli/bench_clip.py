# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 bench clip``: whole clips through the running server, and where their time goes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_h3_plugin.errors import H3Error, UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from vllm_h3_plugin.serving.client import VideoClient
    from vllm_h3_plugin.serving.clip_matrix import Cell, Row

OUT = Path("bench-clip")
_FPS, _INTERRUPTED = 24, 130
_PROMPT = "a red kite over a harbour at dusk, gulls crying"


def clip(
    url: Annotated[
        str | None,
        typer.Option(
            help="Address of the server.", show_default="the container's by .env of this folder, else 127.0.0.1:8000"
        ),
    ] = None,
    sizes: Annotated[str, typer.Option(help="WIDTHxHEIGHT, comma-separated.")] = "832x480",
    seconds: Annotated[
        str | None, typer.Option(help="Lengths, comma-separated.", show_default="5, unless --frames is given")
    ] = None,
    frames: Annotated[str | None, typer.Option(help="Lengths in frames instead, as 56,124,362.")] = None,
    steps: Annotated[str, typer.Option(help="Denoise steps, comma-separated.")] = "50",
    repeat: Annotated[int, typer.Option(min=1, max=100, help="Clips of each kind; the first warms up.")] = 1,
    prompt: Annotated[str, typer.Option(help="Prompt of all clips.")] = _PROMPT,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first of each kind; the next has the next.")] = 1,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of clips and cells.")] = OUT,
    plot: Annotated[Path | None, typer.Option(help="PNG of seconds a step against tokens, with FLOPs beside.")] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds for each clip.", show_default="what the server predicts")
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="Ask no server: show what is in --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON line on stdout.")] = False,
) -> None:
    """Make a clip of every size, length and number of steps through the running server, and show where the time went.

    The recipe is the server's. To compare recipes, start one server after the other and give the same --out: the table
    shows every cell in that folder. Each clip is verified, as `vllm-h3 smoke` does it, and NAME.cell.json beside it
    keeps the job's ledger. The same command goes on where an earlier one ended; a clip that is there is not made again.

    Seconds are the worker's: text encoder, AdaLN table of a new schedule, denoise, decode, and what was left to encode
    then. With --repeat they are medians of the clips after the first. `grows` is seconds a step over those of the
    fewest tokens of that recipe, `FLOPs` the same of floating-point operations: where the first is below the second,
    small clips do not fill the device; where it is above, something else than arithmetic grows.

    \b
    Examples:
      vllm-h3 bench clip --sizes 832x480,1344x768 --steps 8,50
      vllm-h3 bench clip --sizes 1344x768 --frames 56,124,362 --plot growth.png
      vllm-h3 bench clip --sizes 256x256 --steps 4 --repeat 3        a server on the reference platform
      vllm-h3 bench clip --report --json

    \b
    Exit codes:
      0    every clip is here and verified
      2    an option is wrong, or a file cannot be written
      5    the server runs without this plugin
      7    the server cannot be reached, or a clip failed; the table says which and why
      130  interrupted; the same command goes on
    """
    from vllm_h3_plugin.cli.console import emit_json, stderr
    from vllm_h3_plugin.serving.clip_matrix import read_cells, rows

    if plot is not None:
        from vllm_h3_plugin.cli.line_chart import check_target

        check_target(plot)
    failed: list[Cell] = []
    if not report:
        try:
            failed = _measure(url, sizes, seconds, frames, steps, repeat, prompt, seed, out, timeout, stderr())
        except KeyboardInterrupt:
            stderr().print("interrupted: the same command goes on from here", markup=False)
            raise typer.Exit(_INTERRUPTED) from None
    cells = read_cells(out)
    if not cells:
        raise UsageError(f"{out} has no cells", why="no clip was made there yet", fix="Run it without --report.")
    found = rows(cells)
    _show(found)
    if plot is not None:
        from vllm_h3_plugin.cli.bench_clip_chart import draw

        draw(found, plot)
    if as_json:
        emit_json(not failed, cells=[cell.model_dump() for cell in cells], rows=[_as_dict(row) for row in found])
    sys.exit(7 if failed else 0)


def _measure(
    url: str | None,
    sizes: str,
    seconds: str | None,
    frames: str | None,
    steps: str,
    repeat: int,
    prompt: str,
    seed: int,
    out: Path,
    timeout: float | None,
    console: Console,
) -> list[Cell]:
    """Make what is not there; returns the cells that failed."""
    from vllm_h3_plugin.cli.asked_server import find_server, parse_size, prove
    from vllm_h3_plugin.cli.serve import stop_on_sigterm
    from vllm_h3_plugin.serving.client import VideoClient
    from vllm_h3_plugin.serving.clip_matrix import matrix
    from vllm_h3_plugin.serving.clip_record import server_facts
    from vllm_h3_plugin.serving.limits import Limits
    from vllm_h3_plugin.video.tools import find_ffmpeg

    if seconds is not None and frames is not None:
        raise UsageError("--seconds with --frames", why="both are lengths", fix="Give one of them.")
    wanted = [parse_size(text.strip(), "--sizes") for text in sizes.split(",")]
    lengths = _numbers(frames, "--frames") if frames is not None else _lengths(seconds or "5")
    evaluations = _numbers(steps, "--steps")
    find_ffmpeg()
    url, key = find_server(url)
    stop_on_sigterm()
    failed = []
    with VideoClient(url, api_key=key, limits=Limits(total_s=timeout)) as client:
        info = prove(client)
        cells = matrix(info, server_facts(info), wanted, lengths, evaluations, repeat)
        for number, cell in enumerate(cells, start=1):
            console.print(f"{number} of {len(cells)}: {cell.name}", markup=False)
            made = _made(client, cell, prompt, seed, out, console)
            if made.failed is not None:
                console.print(f"  {made.failed}", markup=False)
                failed.append(made)
    return failed


def _made(client: VideoClient, cell: Cell, prompt: str, seed: int, out: Path, console: Console) -> Cell:
    """The cell with its ledger, or with why there is no clip."""
    from vllm_h3_plugin.cli.making import make_shown
    from vllm_h3_plugin.serving.clip_matrix import fetch_ledger, read_cells
    from vllm_h3_plugin.serving.clip_record import require_record

    try:
        clip = make_shown(client, cell.order(prompt, seed), out, console, server=cell.server)
    except H3Error as exc:
        if not exc.details.get("answered", True) or not out.is_dir():
            raise  # there is no server; the next cell would wait for it as well
        return cell.model_copy(update={"failed": str(exc)}).write(out)
    if clip.existing:
        kept = [other for other in read_cells(out) if other.name == cell.name and other.ledger]
        if kept and kept[0].failed is None:
            return kept[0]
    record = require_record(clip.record)
    ledger = None if record.job is None else fetch_ledger(client, record.job)
    return cell.model_copy(update={"ledger": ledger}).write(out)


def _numbers(text: str, option: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError as exc:
        raise UsageError(f"{option} {text}", why="it is no list of numbers", fix="Give for example 8,50.") from exc
    if min(found) < 1:
        raise UsageError(f"{option} {text}", why="nothing would be made", fix="Use at least 1.")
    return found


def _lengths(text: str) -> list[int]:
    try:
        return [max(1, round(float(word) * _FPS)) for word in text.split(",")]
    except (ValueError, OverflowError) as exc:
        raise UsageError(f"--seconds {text}", why="it is no list of numbers", fix="Give for example 5,10.") from exc


def _show(found: Sequence[Row]) -> None:
    from vllm_h3_plugin.cli.bench_shared import show

    show(_table(found))
    for row in found:
        for cell in row.cells:
            if cell.failed is not None:
                show_note(f"{cell.name}: {cell.failed}")
            elif cell.ledger is None:
                show_note(f"{cell.name}: the server no longer knew where its time went")


def show_note(text: str) -> None:
    """A line below the table."""
    from vllm_h3_plugin.cli.console import stdout

    stdout().print(text, markup=False)


def _table(found: Sequence[Row]) -> Table:
    from rich.table import Table

    from vllm_h3_plugin.serving.clip_matrix import PHASES

    table = Table(box=None, pad_edge=False)
    for heading in ("recipe", "clip", "steps", "clips", "tokens", *PHASES, "s/step", "grows", "FLOPs"):
        table.add_column(heading, justify="left" if heading in ("recipe", "clip") else "right")
    for row in found:
        cell = row.measured[0] if row.measured else row.first
        table.add_row(
            cell.recipe,
            f"{cell.width}x{cell.height}, {cell.frames} frames",
            str(cell.steps),
            f"{sum(one.failed is None for one in row.cells)} of {len(row.cells)}",
            "-" if cell.tokens is None else str(cell.tokens),
            *(_figure(row.median(name)) for name in (*PHASES, "step")),
            _figure(row.growth),
            _figure(row.predicted),
        )
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _as_dict(row: Row) -> dict[str, object]:
    from vllm_h3_plugin.serving.clip_matrix import PHASES

    recipe, width, height, frames, steps = row.first.kind
    seconds = {name: row.median(name) for name in (*PHASES, "step")}
    return {
        "recipe": recipe,
        "width": width,
        "height": height,
        "frames": frames,
        "steps": steps,
        "clips": len(row.measured),
        "seconds": seconds,
        "growth": row.growth,
        "flops_growth": row.predicted,
    }
