# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 preflight --cluster``: are these machines fit to be one server?"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from vllm_h3_plugin.preflight.cluster.by_ray import RayCluster
    from vllm_h3_plugin.preflight.cluster.facts import Asked
    from vllm_h3_plugin.preflight.cluster.run import ClusterReport
    from vllm_h3_plugin.preflight.wanted import Wanted
    from vllm_h3_plugin.settings import Settings

STARTED = Path("/tmp/ray/ray_current_cluster")
"""Where ``ray start`` writes its head's address."""
_DEFAULT_ADDRESS = "127.0.0.1:6379"
_DEADLINE_S, _DEEP_DEADLINE_S = 120.0, 3600.0
_LEAST_GBIT = 40.0
"""By arithmetic the exchanges of a 768p step between two machines then take 5.5 s, and 22 s at 10 Gbit/s. In the one
published run a second Spark saved 18.6 s a step."""
_WIDEST = 400
"""Columns that the table may take: a terminal wraps what it has no room for, and nothing is cut off."""
_MARKS = {"pass": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}


def preflight_cluster(
    wanted: Wanted, nodes: int | None, deadline: float | None, least_gbit: float | None, *, deep: bool, as_json: bool
) -> None:
    """Ask every node and print one table with a row for each. Raises ``typer.Exit(1)`` if a check failed."""
    from vllm_h3_plugin import settings
    from vllm_h3_plugin.cli.console import emit_json, stderr, stdout
    from vllm_h3_plugin.preflight.cluster.facts import Asked
    from vllm_h3_plugin.preflight.cluster.run import Limits, check_cluster, exchange_of

    values, profile = settings.load(), wanted.profile
    reference = profile.reference or values.reference
    checkpoint = None if profile.checkpoint is None else Path(os.path.abspath(profile.checkpoint))
    asked = Asked(
        checkpoint=None if checkpoint is None else str(checkpoint),
        task=None if profile.task == "auto" else profile.task,
        recipe=wanted.recipe or values.recipe or profile.recipe,
        interface=values.cluster_interface,
        hca=values.cluster_hca,
        whole=deep,
        cuda=profile.accelerator == "cuda" and not reference,
    )
    limits = Limits(
        nodes=nodes or max(profile.devices, 2),
        wait_s=values.cluster_start_s,
        deadline_s=deadline or (_DEEP_DEADLINE_S if deep else _DEADLINE_S),
        least_gbit=(0.0 if reference else _LEAST_GBIT) if least_gbit is None else least_gbit,
    )
    with stderr().status("connecting to Ray") as status, closing(this_cluster(values, asked)) as found:
        report = check_cluster(
            found, asked, exchange_of(checkpoint), limits, lambda step: status.update(f"looking at {step}")
        )
    console = stdout()
    console.width = max(console.width, _WIDEST)
    console.print(_table(report))
    for line in _notes(report):
        console.print(line, markup=False)
    for name, cause in report.skipped.items():
        console.print(f"not looked at until {cause} is right: {name}", markup=False)
    failed = sum(check.state.value == "fail" for check in report.checks)
    verdict = "these machines are ready" if report.ok else "these machines are not ready"
    console.print(f"{verdict} to be one server: {len(report.nodes)} nodes, {failed} checks failed", markup=False)
    if as_json:
        emit_json(report.ok, profile=wanted.expected.profile, **report.as_dict())
    if not report.ok:
        raise typer.Exit(1)


def this_cluster(values: Settings, asked: Asked) -> RayCluster:
    """The cluster that is asked; tests put another one here."""
    from vllm_h3_plugin.preflight.cluster.by_ray import RayCluster

    return RayCluster(cluster_address(values.cluster_address), values.cluster_bind, asked, connect_s=60)


def cluster_address(named: str | None, started: Path = STARTED) -> str:
    """``HOST:PORT`` of the head: the one that was named, or that ``ray start`` wrote down here, or the default."""
    if named:
        return named
    try:
        return started.read_text(encoding="utf-8").strip() or _DEFAULT_ADDRESS
    except OSError:
        return _DEFAULT_ADDRESS


def _table(report: ClusterReport) -> Table:
    from rich.table import Table
    from rich.text import Text

    names = list(dict.fromkeys(check.name for _, checks in report.nodes for check in checks))
    table = Table(box=None, pad_edge=False)
    table.add_column("node", no_wrap=True)
    for name in names:
        table.add_column(name, no_wrap=True)
    for node, checks in report.nodes:
        states = {check.name: _MARKS[check.state.value] for check in checks}
        cells = [Text(*states[name]) if name in states else Text("–", style="dim") for name in names]
        table.add_row(Text(f"{node}{' *' if node.here else ''}"), *cells)
    return table


def _notes(report: ClusterReport) -> list[str]:
    """What was found, the same in all nodes once; what is not right with its way out, by node."""
    lines = ["* this machine, which the others are compared with"] if report.nodes else []
    told: dict[str, list[str]] = {}
    for node, checks in report.nodes:
        for check in checks:
            if check.state.value == "pass":
                told.setdefault(f"{check.name}: {check.detail}", []).append(node.address)
    everywhere = len(report.nodes)
    for text, addresses in sorted(told.items()):
        lines.append(text if len(addresses) == everywhere else f"{text} [{', '.join(addresses)}]")
    for where, checks in (("", report.whole), *((str(node), checks) for node, checks in report.nodes)):
        for check in checks:
            if check.state.value != "pass":
                lines.append(f"{check.state.value.upper()} {where + ' ' if where else ''}{check.name}: {check.detail}")
                lines.append(f"  fix: {check.remedy}")
    return lines
