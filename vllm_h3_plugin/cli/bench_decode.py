# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 bench decode``: the video VAE, tile by tile and in batches."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_h3_plugin.cli.bench_shared import (
    check_output,
    check_positive,
    figures_table,
    host_environment,
    show,
    table_of,
    write_outcome,
)
from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.settings import reference_requested

if TYPE_CHECKING:
    from vllm_h3_plugin.memory.requests import RequestSize

_CLIP, _TINY_CLIP = "1344x768x124", "160x96x22"


def decode(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(metavar="[CKPT]", help="A checkpoint's folder, such as FL2VA: its own video VAE is measured."),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="WIDTHxHEIGHTxFRAMES.", show_default=f"{_CLIP}, on the CPU {_TINY_CLIP}")
    ] = None,
    batches: Annotated[
        str, typer.Option(help="Tiles at once, comma-separated; auto: as many as the memory prediction allows.")
    ] = "auto",
    repeat: Annotated[int, typer.Option(help="Rounds in which all columns take turns.")] = 3,
    work_dir: Annotated[
        Path | None, typer.Option(help="Folder for the synthetic VAE, 10 GB.", show_default="here, for this run")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON line on stdout.")] = False,
) -> None:
    """Measure the decoding of one clip: the stock host's way, tile by tile, and tiles in batches.

    Without a checkpoint a video VAE of the released network and width is written with random weights. Both sides run
    the same one in turns; what comes out is compared, where tiles overlap and elsewhere. Seconds are of decode_latent
    alone, and from latents to frames in host memory as each side brings them there.

    On a GPU it takes minutes and up to 30 GiB; on the CPU set H3_REFERENCE=1 to try the code with a narrow network.
    Exit code 1 if a column of the plugin did not run.

    \b
    Examples:
      vllm-h3 bench decode --output decode.json
      vllm-h3 bench decode /models/H3/FL2VA --batches auto,1,4,14
      H3_REFERENCE=1 vllm-h3 bench decode --json
    """
    check_output(output)
    check_positive(repeat=repeat)
    wanted = _batches(batches)
    clip = None if size is None else _clip(size)
    host_environment()
    from vllm_h3_plugin.cli.console import emit_json, stderr
    from vllm_h3_plugin.host.bench.decode import Options, measure
    from vllm_h3_plugin.host.bench.decode_report import failures, figures, result, rows
    from vllm_h3_plugin.host.register import register
    from vllm_h3_plugin.host.standalone import single_rank

    clip = clip or _clip(_TINY_CLIP if reference_requested() else _CLIP)
    words = ["vllm-h3 bench decode", *["CKPT"] * (checkpoint is not None)]
    words += [f"--size {clip.width}x{clip.height}x{clip.frames} --batches {batches} --repeat {repeat}"]
    register()
    with (
        _folder(checkpoint, work_dir) as (folder, subject),
        stderr().status("starting") as status,
        single_rank() as device,
    ):
        found = measure(Options(folder, clip, wanted, repeat), device, starts=status.update)
    outcome: dict[str, Any] = result(found, command=" ".join(words), subject=subject)
    write_outcome(output, outcome)
    show(table_of(rows(found)), figures_table(figures(found)))
    failed = failures(found)
    if as_json:
        emit_json(not failed, errors=failed, **outcome)
    sys.exit(1 if failed else 0)


def _batches(text: str) -> tuple[int | None, ...]:
    found: list[int | None] = []
    for word in text.split(","):
        batch = None if word.strip() == "auto" else int(word) if word.strip().isdigit() else 0
        if batch == 0:
            raise UsageError(
                f"--batches {text}", why=f"{word.strip()!r} is no number of tiles", fix="Write for example auto,1,7,14."
            )
        found.append(batch)
    return tuple(dict.fromkeys(found))


def _clip(text: str) -> RequestSize:
    from vllm_h3_plugin.memory.requests import RequestSize

    try:
        width, height, frames = map(int, text.strip().lower().split("x"))
    except ValueError:
        raise UsageError(
            f"--size {text}", why="a size is three numbers", fix=f"Write WIDTHxHEIGHTxFRAMES, such as {_CLIP}."
        ) from None
    return RequestSize(width, height, frames)


@contextmanager
def _folder(checkpoint: Path | None, work_dir: Path | None) -> Iterator[tuple[Path, str]]:
    """The ``video_vae/`` folder, and what it is in words."""
    if checkpoint is not None:
        folder = checkpoint / "video_vae"
        if not (folder / "config.json").is_file():
            raise UsageError(
                f"{checkpoint} has no video_vae/config.json",
                why="a checkpoint's folder is wanted, not its root",
                fix="Give its FL2VA or Ref2VA folder.",
            )
        yield folder, "The checkpoint's own video VAE"
        return
    from vllm_h3_plugin.checkpoint.synthetic import VitVae, tiny_vit
    from vllm_h3_plugin.host.bench.checkpoint import require_room, write_video_vae

    true = not reference_requested()
    vae = VitVae() if true else tiny_vit(tile=64, overlap=16)
    subject = f"diffusers' H3 video VAE, random weights, decoder of {vae.layers} layers, width {vae.width}"
    with tempfile.TemporaryDirectory(prefix="h3-bench-", dir=work_dir or Path.cwd()) as made:
        folder = Path(made) / "video_vae"
        require_room(folder, 11 * 10**9 if true else 10**7)
        write_video_vae(folder, vae)
        yield folder, subject
