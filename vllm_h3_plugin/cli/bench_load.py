# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 bench load``: loading, restart and table build."""

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

if TYPE_CHECKING:
    from vllm_h3_plugin.host.bench.load import Measured


def load(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(metavar="[CKPT]", help="FL2VA or Ref2VA folder, or a root of both. Without: a synthetic one."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="DiT blocks of the synthetic one.", show_default="2, or 20 with --true-width")
    ] = None,
    text_layers: Annotated[
        int | None, typer.Option(help="Its text encoder layers.", show_default="1, or 4 with --true-width")
    ] = None,
    true_width: Annotated[bool, typer.Option("--true-width", help="Real widths: 1.3 GB a DiT block.")] = False,
    work_dir: Annotated[
        Path | None,
        typer.Option(help="Folder on the disk to measure.", show_default="a temporary one in the current folder"),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the synthetic checkpoint in --work-dir.")] = False,
    recipe: Annotated[str, typer.Option(help="Precision recipe.")] = "fp8",
    repeat: Annotated[int, typer.Option(help="Times that each step is measured.")] = 2,
    threads: Annotated[int | None, typer.Option(help="Reading threads.", show_default="H3_READ_THREADS, or 4")] = None,
    threads_sweep: Annotated[
        bool, typer.Option("--threads-sweep", help="Also read and load with 1, 4, 8 and 16 threads.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="JSON file for {load, memory}; written anew after every step.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON line on stdout.")] = False,
) -> None:
    """Measure loading, restart and table build beside reading the same bytes.

    Steps alternate, and each begins with its files out of the page cache: read the files and do nothing else; load
    the checkpoint, quantizing it; load it and write a snapshot; read the snapshot's files; restart from the snapshot;
    read the AdaLN weights; build the table of a new 50-step schedule. How much of the files was still cached is
    measured and shown. Times are seconds, sizes GiB (2^30 bytes), figures are ratios of medians.

    On a GPU it runs as it is; on the CPU set H3_REFERENCE=1. Exit code 1 if a step failed. A figure that misses its
    bound is shown and is no failure.

    \b
    Examples:
      H3_REFERENCE=1 vllm-h3 bench load --json
      vllm-h3 bench load --true-width --layers 20 --text-layers 4 --output load.json
      vllm-h3 bench load /models/H3/FL2VA --work-dir /nvme/bench --repeat 3 --threads-sweep
    """
    check_output(output)
    _check(checkpoint, layers=layers, text_layers=text_layers, repeat=repeat, threads=threads, keep=keep, work=work_dir)
    depth = (layers or (20 if true_width else 2), text_layers or (4 if true_width else 1))
    host_environment()
    command = _command(checkpoint, true_width, depth, recipe, repeat, threads, threads_sweep)
    with _folder(work_dir) as folder:
        source = checkpoint or _synthetic(folder, true_width, depth, recipe, repeat)
        try:
            found, outcome = _measure(source, folder, recipe, repeat, threads, threads_sweep, output, command)
        finally:
            if checkpoint is None and not keep:
                _remove(folder / "checkpoint")
    from vllm_h3_plugin.cli.console import emit_json
    from vllm_h3_plugin.host.bench.report import load_figures, load_rows, memory_figures

    show(table_of(load_rows(found)), figures_table([*load_figures(found), *memory_figures(found)]))
    if as_json:
        emit_json(not found.errors, errors=found.errors, **outcome)
    sys.exit(1 if found.errors else 0)


def _measure(
    checkpoint: Path,
    folder: Path,
    recipe: str,
    repeat: int,
    threads: int | None,
    sweep: bool,
    output: Path | None,
    command: str,
) -> tuple[Measured, dict[str, Any]]:
    from vllm_h3_plugin.cli.console import stderr
    from vllm_h3_plugin.host.bench.load import Options, measure
    from vllm_h3_plugin.host.bench.report import results

    console = stderr()
    subject = _subject(checkpoint)
    outcome: dict[str, Any] = {}

    with console.status("starting") as status:

        def ends(step: str, words: str, measured: Measured) -> None:
            console.print(f"{step}: {words}")
            sys.stderr.flush()
            outcome.update(results(measured, command=command, subject=subject))
            write_outcome(output, outcome)

        options = Options(checkpoint, folder, recipe, repeat, threads, sweep)
        found = measure(options, starts=status.update, ends=ends)
    return found, outcome


def _check(
    checkpoint: Path | None,
    *,
    layers: int | None,
    text_layers: int | None,
    repeat: int,
    threads: int | None,
    keep: bool,
    work: Path | None,
) -> None:
    check_positive(layers=layers, text_layers=text_layers, repeat=repeat, threads=threads)
    if checkpoint is not None and (layers or text_layers or keep):
        raise UsageError(
            f"--layers, --text-layers and --keep beside {checkpoint}",
            why="they are about the synthetic checkpoint that is written without one",
            fix="Leave them out, or leave the checkpoint out.",
        )
    if keep and work is None:
        raise UsageError(
            "--keep without --work-dir", why="the temporary folder is removed", fix="Name a folder with --work-dir."
        )


@contextmanager
def _folder(work_dir: Path | None) -> Iterator[Path]:
    if work_dir is not None:
        work_dir.mkdir(parents=True, exist_ok=True)
        yield work_dir
        return
    # Not /tmp, which may be memory.
    with tempfile.TemporaryDirectory(prefix="h3-bench-", dir=Path.cwd()) as folder:
        yield Path(folder)


def _synthetic(folder: Path, true_width: bool, depth: tuple[int, int], recipe: str, repeat: int) -> Path:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from vllm_h3_plugin.cli.console import stderr
    from vllm_h3_plugin.host.bench.checkpoint import planned_bytes, require_room, spec_of, write
    from vllm_h3_plugin.host.bench.load import bytes_of

    spec = spec_of(true_width=true_width, layers=depth[0], text_layers=depth[1])
    root = folder / "checkpoint"
    if root.exists():
        raise UsageError(f"{root} is in the way", why="nothing is overwritten", fix="Remove it, or give it as CKPT.")
    total = planned_bytes(spec)
    require_room(folder, bytes_of(spec, recipe, repeat))
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    try:
        with Progress(*columns, TimeRemainingColumn(), console=stderr(), transient=True) as bar:
            task = bar.add_task("writing the checkpoint", total=total)
            return write(root, spec, lambda written: bar.advance(task, written))
    except BaseException:
        _remove(root)
        raise


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _command(
    checkpoint: Path | None,
    true_width: bool,
    depth: tuple[int, int],
    recipe: str,
    repeat: int,
    threads: int | None,
    sweep: bool,
) -> str:
    """The command that measures this again, without the folders of this machine."""
    words = ["vllm-h3 bench load"]
    if checkpoint is not None:
        words.append("CKPT")
    else:
        words += ["--true-width"] * true_width + [f"--layers {depth[0]} --text-layers {depth[1]}"]
    words += [f"--recipe {recipe}", f"--repeat {repeat}"]
    words += [f"--threads {threads}"] if threads else []
    return " ".join([*words, *["--threads-sweep"] * sweep])


def _subject(checkpoint: Path) -> str:
    from vllm_h3_plugin.checkpoint.inventory import take_inventory

    partition = take_inventory(checkpoint, None).require_clean().partitions[0]
    assert partition.dit is not None and partition.text is not None  # the inventory is clean
    size = sum(part.nbytes for part in partition.parts) / 2**30
    return (
        f"{size:.2f} GiB: {partition.dit.num_layers} DiT blocks of width {partition.dit.hidden_size}, "
        f"{partition.text.num_hidden_layers} text encoder layers"
    )
