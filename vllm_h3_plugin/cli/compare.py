# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 compare``: how far are two clips apart?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vllm_h3_plugin.cli.console import emit_json, stderr, stdout

if TYPE_CHECKING:
    from vllm_h3_plugin.serving.clip_record import Record
    from vllm_h3_plugin.video.difference import Difference

_ASKED = ("prompt", "width", "height", "frames", "steps", "seed", "references")


def compare(
    first: Path = typer.Argument(..., metavar="A.mp4", help="The clip that the other is held against."),
    second: Path = typer.Argument(..., metavar="B.mp4", help="The other clip."),
    sheet: Path | None = typer.Option(
        None,
        "--sheet",
        metavar="PNG",
        help="Write frames of both, their difference, and the metrics over time.",
        show_default=False,
    ),
    force: bool = typer.Option(False, "--force", help="Let --sheet replace an existing PNG."),
    vmaf: bool = typer.Option(True, "--vmaf/--no-vmaf", help="Also VMAF, where ffmpeg has it; most of the time."),
    as_json: bool = typer.Option(
        False, "--json", help="End with one JSON line, which also holds every frame's values."
    ),
) -> None:
    """Compare two clips of one size: PSNR, SSIM and VMAF of every frame, log-spectral distance of the sound.

    PSNR is in dB and infinite for equal frames, SSIM ends at 1, VMAF at 100 (of equal frames a little below). The
    sound's distance is in dB, 0 for equal sound; 1 dB is hard to hear. Clips of one seed on two recipes drift apart
    step by step: a PSNR of 20 may be a clip that is as good and differs in a leaf. Look at the sheet.

    If both clips have the NAME.json of `vllm-h3 smoke` beside them, what differs in the requests is told. Clips of
    different seeds are different clips, and then no figure says anything about recipes.

    \b
    Examples:
      vllm-h3 compare bf16.mp4 fp8.mp4
      vllm-h3 compare bf16.mp4 fp8.mp4 --sheet apart.png
      vllm-h3 compare bf16.mp4 fp8.mp4 --no-vmaf --json

    \b
    Exit codes:
      0  compared, whatever came out
      2  sizes differ, or the sheet cannot be written
      8  a file is no clip or breaks off
      9  no ffmpeg: install it or imageio-ffmpeg, or set H3_FFMPEG
    """
    from vllm_h3_plugin.video import difference
    from vllm_h3_plugin.video.sheet import check_output
    from vllm_h3_plugin.video.tools import find_ffmpeg

    if sheet is not None:
        check_output(sheet, force=force)
    program = find_ffmpeg()
    with stderr().status(f"comparing {first.name} and {second.name}"):
        apart = difference.compare(first, second, program, vmaf=vmaf)
    requests = _requests(first, second)
    if not as_json:
        _print(apart, requests)
    written = {}
    if sheet is not None:
        from vllm_h3_plugin.video.difference_sheet import write_difference_sheet

        written["sheet"] = str(write_difference_sheet(apart, sheet, force=force))
        if not as_json:
            stdout().print(f"sheet: {sheet}", markup=False)
    if as_json:
        emit_json(True, **apart.as_dict(), requests=requests, **written)


def _requests(first: Path, second: Path) -> dict[str, Any]:
    """What the records say of both requests: whether they are known, and what differs."""
    one, other = _record(first), _record(second)
    if one is None or other is None:
        return {"known": False, "seeds": "unknown", "differing": {}}
    asked = [record.request.model_dump() for record in (one, other)]
    differing: dict[str, list[Any]] = {
        name: [a[name] for a in asked] for name in _ASKED if asked[0][name] != asked[1][name]
    }
    recipes = [record.server.get("recipes") for record in (one, other)]
    if recipes[0] != recipes[1]:
        differing["recipes"] = recipes
    return {"known": True, "seeds": "differ" if "seed" in differing else "equal", "differing": differing}


def _record(clip: Path) -> Record | None:
    from vllm_h3_plugin.serving.clip_record import read_record

    record = read_record(clip.with_suffix(".json"))
    return record if record is not None and record.name == clip.stem else None


def _print(apart: Difference, requests: dict[str, Any]) -> None:
    from rich.table import Table

    console = stdout()
    if apart.equal_files:
        console.print("the files are equal, byte for byte")
    table = Table(box=None, pad_edge=False)
    for heading in ("metric", "mean", "furthest apart", ""):
        table.add_column(heading)
    for metric in apart.metrics.values():
        worst = metric.worst
        at = "" if worst is None else f"{_figure(worst[1])} at frame {worst[0]}"
        table.add_row(metric.name.upper(), "-" if metric.mean is None else _figure(metric.mean), at, metric.reason)
    sound = "-" if apart.sound_db is None else f"{apart.sound_db:.3g} dB"
    table.add_row("sound", sound, "", apart.sound_reason or "log-spectral distance")
    console.print(table)
    for note in apart.notes:
        console.print(f"note: {note}", markup=False)
    if not requests["known"]:
        console.print("note: no record beside both clips says what was asked: whether the seeds are equal is not known")
    for name, (one, other) in requests["differing"].items():
        console.print(f"asked differently: {name}: {one} and {other}", markup=False)
    if requests["seeds"] == "differ":
        console.print("the seeds differ: these are two different clips, and no figure above tells of recipes")


def _figure(value: float) -> str:
    return "equal" if math.isinf(value) else f"{value:.4g}"
