# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 checksums CKPT``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_h3_plugin.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from vllm_h3_plugin.checkpoint.hash_files import Hashed
    from vllm_h3_plugin.checkpoint.inventory import Inventory, ShardFile


def checksums(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CKPT", help="FL2VA or Ref2VA folder, or the root that holds both.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write.", show_default="./<name of CKPT's folder>.sha256"),
    ] = None,
    check: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write nothing: check the files against this one.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file that is written.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON line on stdout.")] = False,
) -> None:
    """Write or check the SHA-256 of every shard of a checkpoint.

    Reads all weight files of all parts, several at a time (H3_READ_THREADS, default 4), and leaves them out of the page
    cache. The file has one line per shard, as sha256sum writes it, with paths relative to the folder that holds FL2VA
    and Ref2VA; run there, `sha256sum -c FILE` checks it too. Write it once, right after a download that you trust.
    With H3_VERIFY_CHECKSUMS=FILE the server holds each shard against it while it loads. Exits 3 if a file is bad,
    missing or not listed.

    \b
    Examples:
      vllm-h3 checksums /models/MiniMax-H3                         writes ./MiniMax-H3.sha256
      vllm-h3 checksums /models/MiniMax-H3/FL2VA --output fl.sha256
      vllm-h3 checksums /models/MiniMax-H3 --check MiniMax-H3.sha256
    """
    from vllm_h3_plugin.checkpoint.inventory import ANY_TASK, take_inventory

    if check is not None and (output is not None or force):
        raise UsageError(
            f"--check with {'--output' if output is not None else '--force'}",
            why="a check writes nothing",
            fix="Give --check FILE alone.",
        )
    inventory = take_inventory(checkpoint, ANY_TASK)
    if check is not None:
        _check(inventory, check, as_json)
    else:
        _write(inventory.require_clean(), output, force, as_json)


def _write(inventory: Inventory, output: Path | None, force: bool, as_json: bool) -> None:
    from vllm_h3_plugin.checkpoint.checksums import refuse_existing, weight_files, write_manifest
    from vllm_h3_plugin.cli.console import emit_json, stdout

    target = output or Path(f"{inventory.path.resolve().name}.sha256")
    refuse_existing(target, force)
    files = weight_files(inventory)
    hashed = hash_with_progress(files.values())
    for found in hashed.values():
        if found.error is not None:
            raise found.error
    digests = {name: hashed[file.path].sha256 for name, file in files.items()}
    write_manifest(target, digests, force=force)
    total = sum(file.size for file in files.values())
    stdout().print(f"{target}: SHA-256 of {len(files)} files, {total / 2**30:.2f} GiB", markup=False)
    if as_json:
        emit_json(True, file=str(target), files=len(files), bytes=total, sha256=digests)


def _check(inventory: Inventory, manifest: Path, as_json: bool) -> None:
    from vllm_h3_plugin.checkpoint.checksums import Verdicts, compare
    from vllm_h3_plugin.cli.console import emit_json, stdout

    verdicts: Verdicts = compare(manifest, inventory, hash_with_progress)
    console = stdout()
    for name, verdict in verdicts.bad.items():
        console.print(f"{name}: {verdict}", markup=False)
    console.print(f"{manifest}: {len(verdicts.good)} of {verdicts.count} files are as listed", markup=False)
    if not verdicts.bad:
        if as_json:
            emit_json(True, file=str(manifest), files=verdicts.count, bad={})
        return
    raise CheckpointError(
        f"{len(verdicts.bad)} of {verdicts.count} files of {inventory.path} are not as {manifest} lists them",
        why="; ".join(f"{name}: {verdict}" for name, verdict in verdicts.bad.items()),
        fix="Download damaged and missing files again. If the list is short, or you replaced files on purpose, write "
        "it anew: `--output FILE --force`.",
        file=str(manifest),
        files=verdicts.count,
        bad=verdicts.bad,
    )


def hash_with_progress(files: Iterable[ShardFile]) -> Mapping[Path, Hashed]:
    """Hash with a bar on stderr: GiB/s and time left."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from vllm_h3_plugin.checkpoint.hash_files import hash_files
    from vllm_h3_plugin.cli.console import stderr
    from vllm_h3_plugin.settings import load

    files = list(files)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[gib]:.2f} of {task.fields[of]:.2f} GiB, {task.fields[rate]:.2f} GiB/s"),
        TimeRemainingColumn(),
    )
    total = sum(file.size for file in files)
    with Progress(*columns, console=stderr(), transient=True) as bar:
        task = bar.add_task("SHA-256", total=total, gib=0.0, of=total / 2**30, rate=0.0)

        def advance(nbytes: int) -> None:
            bar.advance(task, nbytes)
            now = bar.tasks[0]
            bar.update(task, gib=now.completed / 2**30, rate=(now.speed or 0.0) / 2**30)

        return {found.path: found for found in hash_files(files, threads=load().read_threads, progress=advance)}
