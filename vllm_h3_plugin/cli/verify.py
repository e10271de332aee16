# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 verify``: is this clip what was asked for?"""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_h3_plugin.cli.console import emit_json, stderr, stdout
from vllm_h3_plugin.cli.smoke import CLIPS
from vllm_h3_plugin.errors import ClipError, H3Error, UsageError

if TYPE_CHECKING:
    from vllm_h3_plugin.video.verdict import Expectation, Verdict

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def verify(
    files: list[Path] | None = typer.Argument(
        None,
        metavar="[FILE...]",
        help="The clips. [default: the newest of `vllm-h3 smoke`, in clips]",
        show_default=False,
    ),
    frames: int | None = typer.Option(
        None, "--frames", help="Frames asked of the server (its num_frames); 96 is met by a clip of 107."
    ),
    seconds: float | None = typer.Option(
        None, "--seconds", help="Duration asked, in seconds; 4 is met by a clip of 107 frames (4.458 s)."
    ),
    size: str | None = typer.Option(
        None, "--size", metavar="WxH", help="Size asked, in pixels; each side is floored to a multiple of 32."
    ),
    fps: str = typer.Option("24", "--fps", help="Frames a second, a number or a fraction such as 24000/1001."),
    allow_silent: bool = typer.Option(False, "--allow-silent", help="Accept silence, and a clip without sound."),
    strict: bool = typer.Option(False, "--strict", help="Warnings (silent, black, frozen, ...) are failures."),
    sheet: Path | None = typer.Option(
        None,
        "--sheet",
        metavar="PNG",
        help="Write a contact sheet: 12 frames with times, and the waveform. Into a folder: NAME.png for each clip.",
        show_default=False,
    ),
    force: bool = typer.Option(False, "--force", help="Let --sheet replace an existing PNG."),
    write_checksum: bool = typer.Option(
        False, "--write-checksum", help="Write FILE.sha256 beside each good clip; never over a different one."
    ),
    as_json: bool = typer.Option(False, "--json", help="End with one JSON line on stdout instead of tables."),
) -> None:
    """Check clips: container, streams, every frame, sound, length, checksum.

    Picture and sound are decoded twice, by PyAV and by the ffmpeg program, and the two must agree on every picture
    bit for bit. MiniMax-H3 makes 24 fps, 17n+5 frames, and AAC sound at 32 kHz in stereo; the options say what was
    asked, in the words of the request, and the clip is held to what H3 makes of that. Without --frames, --seconds and
    --size a clip of `vllm-h3 smoke` is held to the request in NAME.json beside it. If FILE.sha256 is beside a
    clip, it is checked. (A damaged byte does not always break a decoder; a checksum always tells.)

    \b
    Examples:
      vllm-h3 verify
      vllm-h3 verify clip.mp4
      vllm-h3 verify clip.mp4 --size 768x448 --seconds 5
      vllm-h3 verify out/*.mp4 --frames 96 --strict --json
      vllm-h3 verify clip.mp4 --sheet clip.png --write-checksum

    \b
    Exit codes:
      0  no check of any clip failed (warnings are allowed unless --strict)
      2  an option is wrong, or a file would be overwritten
      8  a check failed
      9  no ffmpeg: install it or imageio-ffmpeg, or set H3_FFMPEG
    """
    expectation = _expectation(frames, seconds, size, fps, allow_silent)
    recorded = frames is None and seconds is None and size is None
    files = files or [_newest(CLIPS)]
    sheets = _sheets(files, sheet, force=force)
    reports = []
    failed = False
    for file in files:
        verdict = _verify(file, _recorded(file, expectation) if recorded else expectation, strict=strict)
        error: H3Error | None = verdict.error()
        written: dict[str, str] = {}
        if not as_json:
            _print(verdict)
        try:
            if file in sheets and verdict.facts is not None:
                from vllm_h3_plugin.video.sheet import write_sheet

                written["sheet"] = str(write_sheet(file, sheets[file], force=force))
            if write_checksum and verdict.ok and verdict.sha256 is not None:
                from vllm_h3_plugin.video.checksum import write_checksum as write

                written["checksum"] = str(write(file, verdict.sha256))
        except ClipError as exc:
            error = error or exc
        if not as_json:
            for what, path in written.items():
                stdout().print(f"{what}: {path}", markup=False)
        failed = failed or error is not None
        reports.append({**verdict.as_dict(), **written, "ok": error is None, "error": error and error.as_dict()})
        if error is not None:
            _print_error(error)
    if as_json:
        emit_json(not failed, clips=reports)
    if failed:
        raise typer.Exit(ClipError.exit_code)


def _expectation(
    frames: int | None, seconds: float | None, size: str | None, fps: str, allow_silent: bool
) -> Expectation:
    from vllm_h3_plugin.video.verdict import Expectation

    width: int | None = None
    height: int | None = None
    if size is not None:
        try:
            width, height = (int(side) for side in size.lower().split("x"))
        except ValueError as exc:
            raise UsageError(f"--size {size}", why="it is not WxH", fix="Give pixels, such as 768x448.") from exc
    try:
        rate = Fraction(fps)
    except (ValueError, ZeroDivisionError) as exc:
        raise UsageError(f"--fps {fps}", why="it is not a number", fix="Give 24 or 24000/1001.") from exc
    return Expectation(
        width=width, height=height, frames=frames, seconds=seconds, fps=rate, audio_required=not allow_silent
    )


def _newest(folder: Path) -> Path:
    clips = sorted(folder.glob("*.mp4"), key=lambda path: path.stat().st_mtime_ns)
    if not clips:
        raise UsageError(
            f"no clip in {folder.absolute()}",
            why="no FILE was named, and the newest clip is looked for there",
            fix="Make one with `vllm-h3 smoke`, or name a file: `make verify FILE=clip.mp4`.",
        )
    stderr().print(f"the newest of {len(clips)} in {folder}: {clips[-1].name}", markup=False)
    return clips[-1]


def _recorded(file: Path, expectation: Expectation) -> Expectation:
    """What the record beside a clip says was asked; else the expectation as it is."""
    from vllm_h3_plugin.serving.clip_record import read_record

    if not file.is_file():
        return expectation  # what is wrong with it is told by the verification itself
    record = read_record(file.with_suffix(".json"))
    if record is None or record.name != file.stem:
        return expectation
    asked = record.request
    return replace(expectation, width=asked.width, height=asked.height, frames=asked.frames)


def _sheets(files: list[Path], sheet: Path | None, *, force: bool) -> dict[Path, Path]:
    """The PNG of each clip, refused before the first clip is decoded if it could not be written."""
    if sheet is None:
        return {}
    from vllm_h3_plugin.video.sheet import check_output

    if sheet.is_dir():
        wanted = {file: sheet / f"{file.stem}.png" for file in files}
    elif len(files) == 1:
        wanted = {files[0]: sheet}
    else:
        raise UsageError(
            f"--sheet {sheet}", why=f"one PNG cannot show {len(files)} clips", fix="Give a folder that exists."
        )
    if len(set(wanted.values())) < len(wanted):
        raise UsageError(
            f"--sheet {sheet}", why="two clips have the same name", fix="Verify them one at a time, or rename one."
        )
    for out in wanted.values():
        check_output(out, force=force)
    return wanted


def _verify(file: Path, expectation: Expectation, *, strict: bool) -> Verdict:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from vllm_h3_plugin.video.verify import verify as verify_clip

    console = stderr()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("frames"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks = {name: bar.add_task(f"{file.name}: {name}", total=None) for name in ("PyAV", "ffmpeg")}

        def show(decoder: str, done: int, total: int) -> None:
            bar.update(tasks[decoder], completed=done, total=total or None)

        return verify_clip(file, expectation, strict=strict, progress=show)


def _print(verdict: Verdict) -> None:
    from rich.table import Table
    from rich.text import Text

    # Text, not markup: file names may hold square brackets.
    table = Table(title=Text(str(verdict.path)), title_justify="left", show_edge=False, pad_edge=False)
    for heading in ("check", "", "seen", "wanted"):
        table.add_column(heading, overflow="fold")
    for check in verdict.checks:
        status = Text(check.status, style=_COLOURS[check.status])
        table.add_row(Text(check.name), status, Text(check.seen), Text(check.wanted))
    console = stdout()
    console.print(table)
    for check in verdict.warnings:
        console.print(Text(f"warning: {check.name}: {check.why}. {check.fix}"))


def _print_error(error: H3Error) -> None:

    sys.stdout.flush()
    print(error.report(), file=sys.stderr)
