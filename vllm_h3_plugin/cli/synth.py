# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 synth DIR``."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vllm_h3_plugin.errors import UsageError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


class PartitionChoice(StrEnum):
    """Which checkpoints of a release to write."""

    FL2VA = "fl2va"
    REF2VA = "ref2va"
    BOTH = "both"


class LayoutChoice(StrEnum):
    """How the DiT's tensors are named and cut."""

    NATIVE = "native"
    DIFFUSERS = "diffusers"


class VideoVaeChoice(StrEnum):
    """What makes pictures of latents."""

    CODEC = "codec"
    TINY = "tiny"
    TRUE = "true"


def parse_size(text: str) -> int:
    """``5GB``, ``512 MiB`` or ``1000000`` -> bytes.

    Raises:
        UsageError: not a size, or zero.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B?\s*", text.upper())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise UsageError(f"--shard-size {text!r}", why="it is no size", fix="Write it like 5GB, 512MiB or 1000000.")
    return size


def synth(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write. It must not exist, or be empty.")],
    partition: Annotated[
        PartitionChoice, typer.Option(help="fl2va: text and first/last frame. ref2va: references.")
    ] = PartitionChoice.FL2VA,
    layout: Annotated[LayoutChoice, typer.Option(help="Names and cuts of the DiT's tensors.")] = LayoutChoice.NATIVE,
    layers: Annotated[int, typer.Option(help="DiT blocks (50 in the real model).")] = 2,
    refiner_layers: Annotated[
        int | None, typer.Option(help="Token refiner blocks.", show_default="1, or 2 with --true-width")
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(help="DiT width, a multiple of 16.", show_default="64, or 5376 with --true-width")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="Attention heads.", show_default="4, or 56 with --true-width")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Width of a head.", show_default="16, or 128 with --true-width")
    ] = None,
    ffn: Annotated[
        int | None, typer.Option(help="Feed-forward width.", show_default="128, or 14336 with --true-width")
    ] = None,
    text_layers: Annotated[int, typer.Option(help="Text encoder layers (50 are used by the real model).")] = 1,
    true_width: Annotated[
        bool, typer.Option("--true-width", help="Real widths everywhere; choose the depth with --layers.")
    ] = False,
    outliers: Annotated[
        bool,
        typer.Option("--outliers", help="Multiply one in 64 rows of each quantizable linear by 30."),
    ] = False,
    shard_size: Annotated[
        str | None, typer.Option(help="Largest shard, e.g. 2MB.", show_default="5GB, and at least two shards")
    ] = None,
    video_vae: Annotated[
        VideoVaeChoice,
        typer.Option(
            help="codec: a small one, whose clips look like something. tiny, true: the released network, narrow or of "
            "real width (10 GB), with random weights, so that clips are noise; it needs diffusers when it is served."
        ),
    ] = VideoVaeChoice.CODEC,
    seed: Annotated[int, typer.Option(help="Same seed and options, same bytes.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON line on stdout.")] = False,
) -> None:
    """Write a small random checkpoint of the real layout.

    It has every file that the real release has: sharded DiT and text encoder with indexes, both VAEs, tokenizer and
    processor. Its clips are coloured clouds with a circling disc and a humming chord. Serve DIR/FL2VA or DIR/Ref2VA.

    \b
    Examples:
      vllm-h3 synth /tmp/h3                          14 MB, for a laptop
      vllm-h3 synth /tmp/h3 --partition both         both partitions below one root
      vllm-h3 synth /tmp/h3w --true-width --layers 4 9 GB, real GEMM shapes for a GPU
      vllm-h3 synth /tmp/h3v --video-vae true        10 GB, decoding as long as the real one
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from vllm_h3_plugin.checkpoint.synthetic import (
        SynthSpec,
        VitVae,
        planned_bytes,
        tiny_dit,
        tiny_text,
        tiny_vit,
        true_width_text,
        write_checkpoint,
    )
    from vllm_h3_plugin.cli.console import emit_json, stderr, stdout

    if text_layers < 1:
        raise UsageError(f"--text-layers = {text_layers}", why="too small for an H3", fix="Use at least 1.")

    def pick(value: int | None, tiny: int, true: int) -> int:
        return value if value is not None else (true if true_width else tiny)

    spec = SynthSpec(
        partition=partition.value,
        layout=layout.value,  # type: ignore[arg-type]
        dit=tiny_dit(
            layers=layers,
            refiner_layers=pick(refiner_layers, 1, 2),
            hidden=pick(hidden, 64, 5376),
            heads=pick(heads, 4, 56),
            head_dim=pick(head_dim, 16, 128),
            ffn=pick(ffn, 128, 14336),
        ),
        text=true_width_text(layers=text_layers) if true_width else tiny_text(layers=text_layers),
        outliers=outliers,
        shard_bytes=None if shard_size is None else parse_size(shard_size),
        seed=seed,
        video_vae={VideoVaeChoice.TINY: tiny_vit(), VideoVaeChoice.TRUE: VitVae()}.get(video_vae),
    )
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=stderr(), transient=True) as bar:
        task = bar.add_task(f"writing {directory}", total=planned_bytes(spec))
        result = write_checkpoint(directory, spec, lambda written: bar.advance(task, written))
    console = stdout()
    for folder in result.partitions:
        console.print(str(folder))
    console.print(
        f"{result.bytes / 1e6:,.1f} MB: DiT {result.dit_parameters / 1e6:,.2f} M parameters, "
        f"text encoder {result.text_parameters / 1e6:,.2f} M, {layout.value} layout, seed {seed}"
    )
    if as_json:
        emit_json(
            True,
            root=str(result.root),
            partitions=[str(folder) for folder in result.partitions],
            layout=layout.value,
            bytes=result.bytes,
            dit_parameters=result.dit_parameters,
            text_parameters=result.text_parameters,
            seed=seed,
        )
