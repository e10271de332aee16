# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 logs``: the server's log without noise, or only what was wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vllm_h3_plugin.cli.kit_shared import HERE, AsJson, Cards, Directory, Engine
from vllm_h3_plugin.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_h3_plugin.kit.containers import Container
    from vllm_h3_plugin.kit.project import Project

# Health checks and polls are most of a log: read more than is shown.
_READ_FOR_EACH = 10
_ERROR_LINES = 5000


def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Lines from the end.")] = 200,
    errors: Annotated[bool, typer.Option("--errors", help="Only the last error: what, why, fix.")] = False,
    cards: Cards = None,
    engine: Engine = "docker",
    directory: Directory = HERE,
    as_json: AsJson = False,
) -> None:
    """Show the server's log without colours, health checks, polls and empty lines.

    Where the check before the start failed, it is the check's log. Exit code 7 if there is no container to read.

    \b
    vllm-h3 logs
    vllm-h3 logs -f
    vllm-h3 logs --errors
    """
    from vllm_h3_plugin.cli.console import emit_json
    from vllm_h3_plugin.cli.kit_shared import find_project, this_outside
    from vllm_h3_plugin.errors import UsageError
    from vllm_h3_plugin.kit.containers import list_containers, read_log
    from vllm_h3_plugin.kit.log import readable

    if follow and (as_json or errors):
        raise UsageError("--follow goes with neither --json nor --errors", fix="Leave --follow out.")
    outside = this_outside()
    project = find_project(outside, directory, cards, engine)
    container = _container(list_containers(outside, project), project)
    if errors:
        found = _cause_text(read_log(outside, project, container, _ERROR_LINES, whole=True), container)
        print(found)
        if as_json:
            emit_json(True, container=container.name, errors=found)
        return
    if follow:
        try:
            for line in readable(outside.lines((engine, "logs", "--follow", "--tail", str(lines), container.id))):
                print(line, flush=True)
        except KeyboardInterrupt:
            return
        return
    shown = list(readable(read_log(outside, project, container, lines * _READ_FOR_EACH, whole=True)))[-lines:]
    for line in shown:
        print(line)
    if as_json:
        emit_json(True, container=container.name, lines=shown)


def _container(containers: Sequence[Container], project: Project) -> Container:
    from vllm_h3_plugin.kit.containers import check_of, server_of
    from vllm_h3_plugin.kit.words import call

    server = server_of(containers)
    check = check_of(containers, project.server)
    if server is None or (server.status == "created" and check is not None):
        server = check or server
    if server is None:
        raise ServerError(
            "there is no container whose log could be read",
            why=f"the engine has none of project {project.name}",
            fix=f"Start one: `{call('up', project.flags)}`.",
        )
    return server


def _cause_text(log: list[str], container: Container) -> str:
    from vllm_h3_plugin.serving.log_cause import find_cause

    cause = find_cause(log)
    if cause is None:
        return f"{container.name}: no error in its log"
    return "\n".join(
        [f"{container.name}: {cause.what}"]
        + ([f"  why: {cause.why}"] if cause.why else [])
        + ([f"  fix: {cause.fix}"] if cause.fix else [])
    )
