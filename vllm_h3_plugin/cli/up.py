# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 up``: from a checked machine to a server that is ready and proved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_h3_plugin.cli.kit_shared import HERE, AsJson, Cards, Directory, Engine, Line
from vllm_h3_plugin.errors import H3Error

if TYPE_CHECKING:
    from vllm_h3_plugin.kit.outside import Outside
    from vllm_h3_plugin.kit.project import Project
    from vllm_h3_plugin.preflight.run import Report
    from vllm_h3_plugin.preflight.wanted import Wanted

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

# A program that only stands in for docker describes itself in words of its own: these checks then warn.
_OF_DOCKER = frozenset({"docker", "compose", "NVIDIA runtime", "image"})


def up(
    cards: Cards = None,
    engine: Engine = "docker",
    directory: Directory = HERE,
    env_file: Annotated[
        Path | None, typer.Option("--env-file", help="Variables for compose.", show_default=".env of that folder")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds to wait for ready.", show_default="ready_timeout_s of the profile, 1800"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine, start the server's container and wait until it is ready.

    Runs the checks of `vllm-h3 preflight` and stops at a failed one. Then `docker compose up`, and progress on stderr
    until the server answers and the plugin is proved active in it: starting container, loading (GiB of GiB), warm-up.
    A server that ends while it starts is named with the cause from its log and its restarts are stopped; the exit code
    is that of the error (3 for a checkpoint, 7 for a server, 9 for an engine that cannot be used). After a timeout it
    is left running. A server that runs already is waited for; one of another configuration is left alone, with exit
    code 10. Ctrl-C leaves the container as it is.

    \b
    vllm-h3 up                              Spark: compose.yaml and .env of this folder
    vllm-h3 up --cards 4                    Ascend: compose.ascend.yaml, role of four cards
    vllm-h3 up -C "/srv/my checkout" --timeout 3600
    """
    from vllm_h3_plugin.cli.console import emit_json, stderr, stdout
    from vllm_h3_plugin.cli.kit_shared import this_outside
    from vllm_h3_plugin.kit.answers import find_key
    from vllm_h3_plugin.kit.project import open_project
    from vllm_h3_plugin.kit.start import Look, Starter
    from vllm_h3_plugin.kit.words import call, span

    outside = this_outside()
    project = open_project(outside, directory, cards=cards, engine=engine, env_file=env_file)
    wanted = _wanted(outside, project)
    limit = timeout or float(wanted.profile.ready_timeout_s)
    key, no_key = find_key(outside, project)
    console = stderr()
    line = Line(console)

    def look(seen: Look) -> None:
        line.show(seen.phase, seen.detail, f" ({span(seen.seconds)})")

    starter = Starter(outside, project, key, look, limit)
    try:
        with line.shown():
            done = starter.bring_up(lambda: _preflight(outside, wanted, project, line))
    except KeyboardInterrupt:
        flags = project.flags
        console.print(
            f"interrupted; the container was left as it is. Follow it: `{call('up', flags)}` or "
            f"`{call('logs', '-f', flags)}`; stop it: `{call('down', flags)}`",
            markup=False,
        )
        raise typer.Exit(INTERRUPTED) from None
    if done.already:
        same = "with this configuration" if done.compared else "already; its configuration could not be compared"
        console.print(f"it runs {same}", markup=False)
    if not done.info:
        why = f": {no_key}" if no_key else ""
        console.print(f"it asks for a key that is not known here{why}; what it runs was not looked at", markup=False)
    how = "already running" if done.already else f"after {span(done.seconds)}"
    stdout().print(f"ready {how}: {done.url}{_what(done.info)}", markup=False)
    if as_json:
        worker = (done.info.get("workers") or [{}])[0]
        emit_json(
            True,
            url=done.url,
            ready_s=round(done.seconds, 1),
            already_running=done.already,
            same_configuration=True if done.compared else None,
            plugin=done.info.get("plugin"),
            recipe=worker.get("recipe"),
        )


def _what(info: dict[str, Any]) -> str:
    if not info:
        return ""
    worker = (info.get("workers") or [{}])[0]
    return f"  plugin {info.get('plugin')}, recipe {worker.get('recipe')}, backend {worker.get('backend')}"


def _wanted(outside: Outside, project: Project) -> Wanted:
    from vllm_h3_plugin.preflight.wanted import Flags, resolve

    machine = outside.machine
    beside = project.folder / ".env"
    env_path = project.env_file or (beside if machine.exists(beside) else None)
    return resolve(machine, Flags(profile=_role(outside, project), env_path=env_path))


def _role(outside: Outside, project: Project) -> str | None:
    """The profile that compose.ascend.yaml starts for these cards; None on a Spark, whose file has its own variable."""
    from vllm_h3_plugin.kit.project import variable

    if project.cards is None:
        return None
    chosen = variable(outside, project, "ASCEND_2_PROFILE") if project.cards == 2 else ""
    return chosen or f"ascend-{project.cards}"


def _preflight(outside: Outside, wanted: Wanted, project: Project, line: Line) -> None:
    """
    Raises:
        H3Error: a check failed; each is printed with its remedy.
    """
    from vllm_h3_plugin.preflight.check import State
    from vllm_h3_plugin.preflight.run import run_preflight
    from vllm_h3_plugin.preflight.survey import Survey

    survey = Survey(outside.machine, wanted)
    report = run_preflight(survey, on_step=lambda name: line.show("checking this machine", name))
    failed = []
    for check in report.checks:
        stops = check.state is State.FAIL and (project.engine == "docker" or check.name not in _OF_DOCKER)
        if stops:
            failed.append(check.name)
        if check.state is not State.PASS:
            word = "fail" if stops else "warn"
            line.note(f"{word}  {check.name}: {check.detail}\n      fix: {check.remedy}")
    if failed:
        raise _not_ready(report, failed)
    line.note(f"this machine is ready: {report.count(State.PASS)} checks passed")


def _not_ready(report: Report, failed: list[str]) -> H3Error:
    from vllm_h3_plugin.kit.words import call

    return H3Error(
        f"this machine is not ready: {', '.join(failed)}",
        why="a check failed, so nothing was started; the lines above say what to do",
        fix=f"`{call('preflight')}` shows all checks.",
        checks=[check.as_dict() for check in report.checks],
    )
