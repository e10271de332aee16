# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 inspect CKPT``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from vllm_h3_plugin.checkpoint.inventory import Inventory


def inspect(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CKPT", help="FL2VA or Ref2VA folder, or the root that holds both.")
    ],
    task: Annotated[
        str | None,
        typer.Option(
            help="Check as for serving this task: t2va, fl2va, ref2va or combined.", show_default="whatever is there"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON line on stdout.")] = False,
) -> None:
    """Check a checkpoint's files before any weight is read.

    Looks at the index files, every shard's header, sizes, names, shapes and dtypes, the configs, tokenizer and
    processor. Takes seconds and no memory, also for the 134 GB of the real model. Exits 1 if anything is wrong.

    \b
    Examples:
      vllm-h3 inspect /models/MiniMax-H3/FL2VA
      vllm-h3 inspect /models/MiniMax-H3 --task ref2va
    """
    from vllm_h3_plugin.checkpoint.inventory import ANY_TASK, take_inventory
    from vllm_h3_plugin.cli.console import emit_json, stderr, stdout

    inventory = take_inventory(checkpoint, task or ANY_TASK)
    if inventory.partitions:
        stdout().print(_table(inventory))
        layouts = {part.layout for partition in inventory.partitions for part in partition.parts if part.layout}
        stdout().print(f"DiT layout: {', '.join(sorted(layouts)) or 'unknown'}")
    notes = stderr()
    for number, fault in enumerate(inventory.faults, 1):
        notes.print(f"fault {number}: {fault.what}\n  why: {fault.why}\n  fix: {fault.fix}", markup=False)
    count = len(inventory.faults)
    verdict = f"{count} fault{'s' if count != 1 else ''}" if count else "complete: nothing is missing or out of place"
    stdout().print(f"{checkpoint}: {verdict}", markup=False)
    if as_json:
        emit_json(not inventory.faults, **inventory.as_dict())
    if inventory.faults:
        raise typer.Exit(1)


def _table(inventory: Inventory) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("partition", "part"):
        table.add_column(name, no_wrap=True)
    for name in ("files", "tensors"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("dtypes")
    for name in ("parameters", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for partition in inventory.partitions:
        for part in partition.parts:
            table.add_row(
                partition.name,
                part.name,
                str(len(part.files)),
                str(len(part.tensors)),
                ", ".join(f"{count} {dtype}" for dtype, count in sorted(part.dtypes.items())),
                f"{part.parameters / 1e6:,.2f} M",
                f"{part.nbytes / 2**30:.3f}",
            )
    table.add_row("total", "", "", "", "", f"{inventory.parameters / 1e6:,.2f} M", f"{inventory.nbytes / 2**30:.3f}")
    return table
