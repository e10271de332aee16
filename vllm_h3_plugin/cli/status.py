# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 status``: what a server is and does, over HTTP and from its container."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_h3_plugin.cli.kit_shared import HERE, AsJson, Cards, Directory, Engine
from vllm_h3_plugin.errors import H3Error, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import Console

    from vllm_h3_plugin.kit.containers import Container
    from vllm_h3_plugin.kit.outside import Outside
    from vllm_h3_plugin.kit.project import Project
    from vllm_h3_plugin.kit.status import Status

_COLOURS = {"ready": "green", "busy": "green", "starting": "yellow", "unhealthy": "bold red", "stopped": "bold red"}


def status(
    url: Annotated[
        str | None, typer.Option("--url", help="Address of the server.", show_default="the container's, else .env's")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks of --watch.")] = 2,
    stuck_after: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Seconds within a request without a step or a change of phase: stuck.",
            show_default="VLLM_H3_STUCK_AFTER_S, 1800",
        ),
    ] = None,
    cards: Cards = None,
    engine: Engine = "docker",
    directory: Directory = HERE,
    as_json: AsJson = False,
) -> None:
    """Say what a server is: ready, busy, starting, unhealthy or stopped.

    With the job that runs (step, seconds a step, time left until the last step), jobs that wait, memory, uptime and
    versions; with an engine at hand also its container. Works on any server with this plugin (--url). Exit code 0 if
    it is ready or busy, 10 while it starts, 7 if it is unhealthy, stopped or not understood. An unhealthy container is
    not restarted by the engine: the remedy is printed. The server's key is read from H3_API_KEY_FILE, VLLM_API_KEY or
    the file that .env names.

    \b
    vllm-h3 status
    vllm-h3 status --watch
    vllm-h3 status --url http://127.0.0.1:8123 --json
    """
    from vllm_h3_plugin.cli.console import emit_json, stderr, stdout
    from vllm_h3_plugin.cli.kit_shared import this_outside
    from vllm_h3_plugin.kit.status import failure_of

    outside = this_outside()

    def look() -> Status:
        return _look(outside, url, cards, engine, directory, stuck_after)

    found = look()
    # With --json nothing but its line may stand on stdout while --watch goes on.
    console = stderr() if as_json and watch else stdout()
    if watch:
        found = _watch(outside, found, look, console, interval)
    elif console.is_terminal:
        console.print(_text(found))
    else:
        # In a pipe nothing is folded: a line each, to be searched.
        for name, text in _rows(found):
            console.print(f"{name:10} {text}", markup=False)
    if as_json:
        failure = failure_of(found)
        emit_json(failure is None, **found.as_dict(), **({"error": failure.as_dict()} if failure else {}))
    if found.state.exit_code:
        raise typer.Exit(found.state.exit_code)


def _look(
    outside: Outside, url: str | None, cards: int | None, engine: str, directory: Path, stuck_after: float | None
) -> Status:
    from vllm_h3_plugin.kit.answers import ask_server, find_key, stuck_after_s, url_of
    from vllm_h3_plugin.kit.containers import read_log, server_of
    from vllm_h3_plugin.kit.status import judge

    project, containers, why_none = _containers(outside, cards, engine, directory)
    server = server_of(containers)
    if url is not None and (server is None or server.url != url.rstrip("/")):
        why_none = why_none or f"no container of this project is at {url}"
        server, containers = None, ()
    where = url or (server.url if server and server.url else url_of(outside, project))
    key, no_key = find_key(outside, project)
    after_s = stuck_after or stuck_after_s(outside, project)
    with outside.http(where, key) as http:
        answers = ask_server(http)
    log: list[str] = []
    if project is not None and not answers.well and containers:
        failed = server if server is not None and server.status != "created" else None
        shown = failed or next(one for one in containers if not one.serves or one is server)
        log = read_log(outside, project, shown, whole=shown.restarts > 0)
    return judge(
        answers,
        containers,
        log,
        now=outside.now(),
        flags="" if project is None else project.flags,
        no_containers=why_none,
        stuck_after_s=after_s,
        no_key=no_key,
    )


def _containers(
    outside: Outside, cards: int | None, engine: str, directory: Path
) -> tuple[Project | None, tuple[Container, ...], str]:
    """The project, its containers, and why none of them were looked at.

    Raises:
        UsageError: the folder or the role that was named is none.
    """
    from vllm_h3_plugin.cli.kit_shared import find_project
    from vllm_h3_plugin.kit.containers import list_containers
    from vllm_h3_plugin.kit.project import open_project

    # A server can run without a checkout and without an engine, or elsewhere: that is no fault of this verb's.
    try:
        project = open_project(outside, directory, cards=cards, engine=engine)
    except UsageError as exc:
        if directory != HERE or cards is not None:
            raise
        return None, (), str(exc)
    try:
        project = find_project(outside, directory, cards, engine)
        return project, list_containers(outside, project), ""
    except H3Error as exc:
        return project, (), str(exc)


def _watch(outside: Outside, found: Status, look: Callable[[], Status], console: Console, interval: float) -> Status:
    from rich.live import Live

    try:
        if not console.is_terminal:
            last = ""
            while True:
                text = f"{found.state.value}: {found.detail}"
                if text != last:
                    console.print(text, markup=False)
                last = text
                outside.sleep(interval)
                found = look()
        with Live(_text(found), console=console, auto_refresh=False) as live:
            while True:
                outside.sleep(interval)
                found = look()
                live.update(_text(found), refresh=True)
    except KeyboardInterrupt:
        return found


def _text(found: Status) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("is", overflow="fold")
    for name, text in _rows(found):
        style = _COLOURS[found.state.value] if name == "state" else ""
        table.add_row(Text(name), Text(text, style=style))
    return table


def _rows(found: Status) -> list[tuple[str, str]]:
    from vllm_h3_plugin.kit.status import uptime_words, waiting

    info = found.answers.info
    rows = [("state", f"{found.state.value}: {found.detail}"), ("fix", found.remedy)]
    if found.answers.odd:
        rows.append(("odd", f"not understood of what it answers: {', '.join(found.answers.odd)}"))
    if found.answers.busy:
        # Jobs run in the order of their creation; a request without one waits for its answer itself.
        first, behind = next(iter(found.answers.jobs), {}), waiting(found.answers)
        name = f"{first['id']}, {first.get('size') or 'size not given'}" if first else "a request that is being read"
        rows.append(("job", f"{name}; {behind or 'none'} waiting"))
    rows += [("memory", _memory(info)), ("uptime", uptime_words(found)), ("server", found.answers.url)]
    if info:
        worker = (info.get("workers") or [{}])[0]
        rows.append(("recipe", f"{worker.get('recipe')} on backend {worker.get('backend')}"))
        versions = {"vllm-h3-plugin": info.get("plugin"), **(info.get("host") or {})}
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
        image = (info.get("provenance") or {}).get("image")
        if image:
            rows.append(("built", f"commit {image.get('revision')} on {image.get('base')}"))
    one = found.container
    if one is not None:
        health = f", {one.health}" if one.health else ""
        again = f", restarted {one.restarts} times" if one.restarts else ""
        rows += [("container", f"{one.name}: {one.status}{health}{again}"), ("image", f"{one.image} {one.image_id}")]
    elif found.no_containers:
        rows.append(("container", f"not looked at: {found.no_containers}"))
    return [(name, text) for name, text in rows if text]


def _memory(info: Any) -> str:
    from vllm_h3_plugin.kit.words import gib

    parts = []
    guard = info.get("guard")
    if guard:
        state = "guarded" if guard.get("active") else "not guarded"
        parts.append(f"{gib(guard['available_bytes'])} available ({state}, floor {gib(guard['floor_bytes'])})")
    for worker in info.get("workers") or []:
        held = worker.get("memory") or {}
        if held:
            parts.append(f"{gib(held['resident_bytes'])} on {held.get('device')}, peak {gib(held['peak_bytes'])}")
    return "; ".join(parts)
