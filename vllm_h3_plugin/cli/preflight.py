# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 preflight``: is this machine fit to build, start and run H3?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from vllm_h3_plugin.preflight.machine import Machine
    from vllm_h3_plugin.preflight.run import Report

_COLOURS = {"pass": "green", "warn": "yellow", "fail": "bold red"}


def preflight(
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            "-p",
            metavar="NAME|FILE",
            help="Launch profile that will be started here.",
            show_default="VLLM_H3_PROFILE, else spark",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", "-c", help="Checkpoint folder.", show_default="VLLM_H3_CHECKPOINT/FL2VA"),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Precision recipe: a name or a file.", show_default="H3_RECIPE, else the profile's"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="TCP port of the server.", show_default="VLLM_H3_PORT, else 8000"),
    ] = None,
    env_file: Annotated[
        Path | None, typer.Option("--env-file", help="Variables for compose.", show_default="./.env, if it is there")
    ] = None,
    without_docker: Annotated[
        bool,
        typer.Option("--without-docker", help="The server runs outside a container: ask for no engine and no image."),
    ] = False,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Read every shard and compare its SHA-256 with the file that `vllm-h3 checksums` wrote (minutes).",
        ),
    ] = False,
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="Check the machines of the running Ray cluster instead, each by a task on it."),
    ] = False,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --cluster: machines that must be there.", show_default="2, or the profile's devices"
        ),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="With --cluster: every machine answers within this time, or is named.",
            show_default="120; 3600 with --deep",
        ),
    ] = None,
    least_gbit: Annotated[
        float | None,
        typer.Option(
            "--least-gbit",
            min=0,
            metavar="GBIT/S",
            help="With --cluster: what must leave each machine in an all-to-all.",
            show_default="40; 0 on the reference platform",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON line on stdout.")] = False,
) -> None:
    """Check this machine before anything is built or started, or with --cluster all machines that are one server.

    Looks at processor, system, clock, the .env file as compose reads it, settings, licence, docker with compose and
    NVIDIA runtime, the pinned image for this architecture, GPU and driver (or Ascend cards), who else uses them,
    checkpoint, memory and disk against what the recipe needs, swap, /dev/shm and the port. Changes nothing, needs no
    root, takes seconds; the registry is asked for the image and may be out of reach. What stands on a check that
    failed is left out. Exits 1 if one failed; a warning does not stop you. Flags win over variables of the shell, these
    over the .env file, as with compose.

    The licence of the weights is yours to accept: H3_ACCEPT_LICENSE=yes, in .env or in the environment. Values in
    .env are never printed.

    With --cluster (docs/CLUSTER.md) a task on every machine of the Ray cluster says what is there: image, plugin, host,
    recipe, checkpoint, Ray, the interface and HCA that settings name, memory and clock. What differs from this machine
    is named. Then the link is measured through the collectives of a denoise step, in the sizes of a 768p clip.

    \b
    Examples:
      vllm-h3 preflight                                            all from .env
      vllm-h3 preflight -c /models/MiniMax-H3/FL2VA --deep
      vllm-h3 preflight --profile h200 -c ./FL2VA --without-docker --port 8080
      vllm-h3 preflight --cluster --profile spark-2 -c /checkpoint/FL2VA
      vllm-h3 preflight -c ./FL2VA --json | jq '.checks[] | select(.state != "pass")'
    """
    from vllm_h3_plugin.cli.console import emit_json, stderr, stdout
    from vllm_h3_plugin.preflight.check import State
    from vllm_h3_plugin.preflight.run import run_preflight
    from vllm_h3_plugin.preflight.survey import Survey
    from vllm_h3_plugin.preflight.wanted import Flags, resolve

    machine = this_machine()
    if cluster:
        from vllm_h3_plugin.cli.preflight_cluster import preflight_cluster

        flags = Flags(profile, checkpoint, recipe, port, env_file, without_docker=True)
        preflight_cluster(resolve(machine, flags), nodes, deadline, least_gbit, deep=deep, as_json=as_json)
        return
    wanted = resolve(machine, Flags(profile, checkpoint, recipe, port, env_file, without_docker))
    survey = Survey(machine, wanted, _hash_with_bar)
    with stderr().status("looking at this machine") as status:

        def show(name: str) -> None:
            status.update(f"looking at {name}")
            if name == "checksums":
                status.stop()  # it has a bar of its own

        report = run_preflight(survey, deep=deep, on_step=show)
    stdout().print(_table(report))
    for line in _closing(report, wanted.expected.profile):
        stdout().print(line, markup=False)
    if as_json:
        emit_json(
            report.ok,
            profile=wanted.expected.profile,
            checks=[check.as_dict() for check in report.checks],
            skipped=report.skipped,
            **{state.value: report.count(state) for state in State},
        )
    if not report.ok:
        raise typer.Exit(1)


def this_machine() -> Machine:
    """The machine that is asked; tests put another one here."""
    from vllm_h3_plugin.preflight.machine import LocalMachine

    return LocalMachine()


def _hash_with_bar(files):  # type: ignore[no-untyped-def]
    from vllm_h3_plugin.cli.checksums import hash_with_progress

    return hash_with_progress(files)


def _table(report: Report) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("check", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in report.checks:
        word = check.state.value
        table.add_row(Text(check.name), Text(word.upper(), style=_COLOURS[word]), Text(check.detail))
        if check.remedy:
            table.add_row("", "", Text(f"fix: {check.remedy}", style="bold"))
    return table


def _closing(report: Report, profile: str) -> list[str]:
    from vllm_h3_plugin.preflight.check import State

    causes: dict[str, list[str]] = {}
    for name, cause in report.skipped.items():
        causes.setdefault(cause, []).append(name)
    lines = [f"not looked at until {cause} is right: {', '.join(names)}" for cause, names in causes.items()]
    passed, warned, failed = (report.count(state) for state in State)
    verdict = "this machine is ready" if report.ok else "this machine is not ready"
    lines.append(f"{verdict} for profile {profile}: {passed} passed, {warned} to know about, {failed} failed")
    return lines
