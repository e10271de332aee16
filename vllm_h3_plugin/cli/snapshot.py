# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 snapshot``: list, verify and remove quantized snapshots."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_h3_plugin.cli.console import emit_json, stderr, stdout
from vllm_h3_plugin.errors import BusyError, SnapshotError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_h3_plugin.checkpoint.snapshot_store import SnapshotInfo

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)

_CacheDir = Annotated[
    Path | None,
    typer.Option("--cache-dir", metavar="DIR", help="Folder of this project's own files.", show_default="H3_CACHE_DIR"),
]
_Json = Annotated[bool, typer.Option("--json", help="End with one JSON line on stdout instead of the text.")]
_Id = Annotated[
    str | None, typer.Argument(metavar="[ID]", help="A snapshot's id, or its first digits.", show_default=False)
]


@app.callback()
def _group() -> None:
    """List, verify and remove quantized snapshots.

    After its first load, a server keeps the quantized weights below H3_CACHE_DIR; later starts read those instead of
    the checkpoint. A snapshot is used only for the very files, recipe, backend, host and plugin that it was made with.
    Each can be removed: the next start makes it again.
    """


@app.command("list")
def list_(cache_dir: _CacheDir = None, as_json: _Json = False) -> None:
    """List the snapshots: what each holds, what it was made from, and whether it can be used.

    States: ok; damaged (a file is not what the manifest says; bytes of weights are checked by `verify` only);
    half-written (its writer was killed; the next one removes it); other version (of this plugin or of the format);
    being written.

    \b
    Examples:
      vllm-h3 snapshot list
      vllm-h3 snapshot list --cache-dir /data/h3 --json
    """
    from vllm_h3_plugin.checkpoint.snapshot_store import list_snapshots

    folder = _cache_dir(cache_dir)
    found = list_snapshots(folder)
    total = sum(info.nbytes for info in found)
    if as_json:
        emit_json(True, cache_dir=str(folder), bytes=total, snapshots=[info.as_dict() for info in found])
        return
    console = stdout()
    for info in found:
        _describe(info, console)
    count = f"{len(found)} snapshot{'s' if len(found) != 1 else ''}"
    console.print(f"{folder}: {count}, {_size(total)}" if found else f"{folder}: no snapshots", markup=False)


@app.command("verify")
def verify(
    snapshot: _Id = None,
    every: Annotated[bool, typer.Option("--all", help="Verify every snapshot.")] = False,
    cache_dir: _CacheDir = None,
    as_json: _Json = False,
) -> None:
    """Read a snapshot whole and hold every piece against the digest with which it was written.

    Reads at the speed of the disk and leaves nothing in the page cache. Exits 3 if a snapshot is damaged, and names the
    first piece that is.

    \b
    Examples:
      vllm-h3 snapshot verify 3f2a
      vllm-h3 snapshot verify --all
    """
    from vllm_h3_plugin.checkpoint.snapshot_store import BEING_WRITTEN, find_snapshot, list_snapshots

    folder = _cache_dir(cache_dir)
    _one_choice(snapshot=snapshot, all=every)
    chosen = [find_snapshot(folder, snapshot)] if snapshot else list_snapshots(folder)
    results: list[dict[str, Any]] = []
    errors: list[SnapshotError] = []
    for info in chosen:
        if every and info.state == BEING_WRITTEN:
            stderr().print(f"{info.id}: being written, left out", markup=False)
            continue
        try:
            results.append(_verify_one(info))
        except SnapshotError as exc:
            errors.append(exc)
            results.append({"id": info.id, "ok": False, "error": exc.as_dict()})
        else:
            if not as_json:
                _print_verified(results[-1])
    if len(errors) == 1:
        raise errors[0]
    if errors:
        for error in errors:
            stderr().print(error.report(), markup=False)
        raise SnapshotError(
            f"{len(errors)} of {len(results)} snapshots cannot be used",
            why="; ".join(error.what for error in errors),
            fix="Remove them: vllm-h3 snapshot remove ID",
            snapshots=results,
        )
    if as_json:
        emit_json(True, snapshots=results)
    elif not results:
        stdout().print(f"{folder}: no snapshots", markup=False)


@app.command("remove")
def remove(
    snapshot: _Id = None,
    stale: Annotated[bool, typer.Option("--stale", help="Remove what no server of this version can use.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Remove every snapshot.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    cache_dir: _CacheDir = None,
    as_json: _Json = False,
) -> None:
    """Remove snapshots. One that a living process reads or writes is left alone, and the exit code is then 10.

    \b
    Examples:
      vllm-h3 snapshot remove 3f2a
      vllm-h3 snapshot remove --stale --yes
    """
    from vllm_h3_plugin.checkpoint.snapshot_store import BEING_WRITTEN, find_snapshot, list_snapshots, remove_snapshot

    folder = _cache_dir(cache_dir)
    _one_choice(snapshot=snapshot, stale=stale, all=every)
    if snapshot:
        chosen = [find_snapshot(folder, snapshot)]
    else:
        found = list_snapshots(folder)
        chosen = [info for info in found if every or not (info.usable or info.state == BEING_WRITTEN)]
    if chosen and not yes and not _confirmed(chosen, as_json):
        stdout().print("nothing was removed")
        return
    removed: list[SnapshotInfo] = []
    busy: list[BusyError] = []
    for info in chosen:
        try:
            remove_snapshot(info)
        except BusyError as exc:
            busy.append(exc)
            continue
        removed.append(info)
        if not as_json:
            stdout().print(f"removed {info.id}, {_size(info.nbytes)}", markup=False)
    ids = [info.id for info in removed]
    if busy:
        raise BusyError(
            busy[0].what if len(busy) == 1 else f"{len(busy)} snapshots are in use",
            why="; ".join(exc.why for exc in busy),
            fix=busy[0].fix,
            removed=ids,
        )
    if as_json:
        emit_json(True, removed=ids, bytes=sum(info.nbytes for info in removed))
    elif not chosen:
        stdout().print(f"{folder}: nothing to remove", markup=False)


def _cache_dir(option: Path | None) -> Path:
    if option is not None:
        return option.expanduser()
    from vllm_h3_plugin.settings import load

    return load().cache_dir.expanduser()


def _one_choice(**choices: str | bool | None) -> None:
    given = [name for name, value in choices.items() if value]
    if len(given) != 1:
        words = ["ID" if name == "snapshot" else f"--{name}" for name in choices]
        raise UsageError(
            f"{len(given)} of {', '.join(words)} are given",
            why="exactly one says which snapshots are meant",
            fix="`vllm-h3 snapshot list` shows the ids.",
        )


def _confirmed(chosen: list[SnapshotInfo], as_json: bool) -> bool:
    if as_json or not sys.stdin.isatty():
        raise UsageError(
            f"{len(chosen)} snapshot{'s' if len(chosen) != 1 else ''} would be removed",
            why="there is nobody to ask",
            fix="Add --yes.",
            snapshots=[info.id for info in chosen],
        )
    notes = stderr()
    for info in chosen:
        notes.print(f"{info.id}  {_size(info.nbytes)}  {info.notes.get('checkpoint', '')}  {info.state}", markup=False)
    return typer.confirm(f"Remove {len(chosen)}?", err=True)


def _verify_one(info: SnapshotInfo) -> dict[str, Any]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from vllm_h3_plugin.checkpoint.snapshot import open_folder
    from vllm_h3_plugin.checkpoint.snapshot_store import first_damage
    from vllm_h3_plugin.settings import load

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with open_folder(info.path, mark=False) as snapshot:
        started = time.monotonic()
        with Progress(*columns, TimeRemainingColumn(), console=stderr(), transient=True) as bar:
            task = bar.add_task(f"verifying {info.id}", total=snapshot.nbytes)
            damage = first_damage(
                snapshot, threads=load().read_threads, progress=lambda nbytes: bar.advance(task, nbytes)
            )
        seconds = time.monotonic() - started
        if damage is not None:
            raise damage.error(info.id)
        pieces = sum(len(snapshot.digests(name)) for name in snapshot.parts)
        rate = snapshot.nbytes / 2**30 / max(seconds, 1e-9)
        return {
            "id": info.id,
            "ok": True,
            "pieces": pieces,
            "bytes": snapshot.nbytes,
            "seconds": round(seconds, 3),
            "gib_per_s": round(rate, 3),
        }


def _print_verified(result: dict[str, Any]) -> None:
    stdout().print(
        f"{result['id']}: {result['pieces']} pieces as they were written, {_size(result['bytes'])} in "
        f"{result['seconds']:.1f} s, {result['gib_per_s']:.2f} GiB/s",
        markup=False,
    )


def _describe(info: SnapshotInfo, console: Console) -> None:
    state = f"{info.state} ({info.reason})" if info.reason else info.state
    lines = [f"{info.id}  {_size(info.nbytes)}  {state}{', in use' if info.in_use else ''}"]
    if info.part_bytes:
        lines.append("parts: " + ", ".join(f"{name} {_size(size)}" for name, size in info.part_bytes.items()))
    if info.key is not None:
        recipe = info.notes.get("recipe") or info.key.recipe[:12]
        lines.append(f"checkpoint: {info.notes.get('checkpoint', 'unknown')}")
        lines.append(f"recipe {recipe}, backend {info.key.backend}, host {info.key.host}, plugin {info.key.plugin}")
    lines.append(f"made {_ago(info.created)}, last used {_ago(info.last_use)}")
    console.print("\n  ".join(lines) + "\n", markup=False)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _ago(then: float | None) -> str:
    if then is None:
        return "never"
    seconds = max(0, int(time.time() - then))
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = seconds // length
            return f"{count} {unit}{'s' if count != 1 else ''} ago"
    return "just now"
