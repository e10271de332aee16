# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: the process they run in, their tables, and the file that they keep."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_h3_plugin.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from vllm_h3_plugin.host.bench.report import Figure

# Columns that the tables need, also where stdout is no terminal.
_WIDTH = 150


def check_output(output: Path | None) -> None:
    """Refuse to write over the results of an earlier run.

    Raises:
        UsageError: the file is there.
    """
    if output is not None and output.exists():
        raise UsageError(f"--output {output}", why="a file of that name is there", fix="Give another, or move it away.")


def check_positive(**options: int | None) -> None:
    """Refuse numbers with which nothing would be measured; names are the options', with underscores.

    Raises:
        UsageError: names the option.
    """
    for name, value in options.items():
        if value is not None and value < 1:
            raise UsageError(
                f"--{name.replace('_', '-')} = {value}", why="nothing would be measured", fix="Use at least 1."
            )


def host_environment() -> None:
    """Make this process one that the host can run in, and that can be stopped.

    Raises:
        UsageError: there is no accelerator, and the CPU was not asked for.
    """
    from vllm_h3_plugin.serving.command import HOST_ENVIRONMENT

    # What a benchmark leaves behind is taken away when it is stopped, as it is on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for name, value in HOST_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # The host logs to stdout unless told otherwise; stdout is for the result.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import torch

    from vllm_h3_plugin.settings import reference_requested

    if not (reference_requested() or torch.accelerator.is_available()):
        raise UsageError(
            "there is no accelerator here to measure",
            why=f"torch {torch.__version__} finds none, and H3_REFERENCE is not set",
            fix="Set H3_REFERENCE=1 to run on the CPU reference platform, or run this on the GPU machine.",
        )


def write_outcome(output: Path | None, outcome: Mapping[str, Any]) -> None:
    """Write what there is so far: a run that is stopped keeps what it had."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(outcome, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def show(*tables: Table) -> None:
    """Print tables in their width."""
    from vllm_h3_plugin.cli.console import stdout

    console = stdout()
    console.width = max(console.width, _WIDTH)
    for table in tables:
        console.print(table)


def table_of(rows: Sequence[Mapping[str, Any]], *, last: str = "Note", title: str | None = None) -> Table:
    """Rows as a table; a column that any of them has, and ``last`` behind the others."""
    from rich.table import Table

    columns = list(dict.fromkeys(column for row in rows for column in row))
    columns = [column for column in columns if column != last] + [last] * (last in columns)
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(column, "")) for column in columns))
    return table


def figures_table(figures: Sequence[Figure]) -> Table:
    """Figures, what is asked of them, and whether it is met."""
    words = {None: "", True: "ok", False: "MISSED"}
    return table_of(
        [
            {
                "figure": figure.name,
                "value": figure.reason if figure.value is None else figure.value,
                "asked": figure.asked,
                "": words[figure.met],
            }
            for figure in figures
        ]
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
