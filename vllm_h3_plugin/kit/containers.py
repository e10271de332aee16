# SPDX-License-Identifier: Apache-2.0
"""The containers of a project as the engine describes them, and what an engine that does not answer means."""

from __future__ import annotations

import ipaddress
import json
import re
import shlex
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from vllm_h3_plugin.errors import BusyError, H3Error, ServerError, ToolMissingError
from vllm_h3_plugin.kit.outside import Outside
from vllm_h3_plugin.kit.project import Project
from vllm_h3_plugin.kit.words import call, plain, plain_line
from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.preflight.checks import containers as engine_checks
from vllm_h3_plugin.preflight.machine import Ran

PROJECT_LABEL = "com.docker.compose.project"
SERVICE_LABEL = "com.docker.compose.service"
FILE_LABEL = "com.docker.compose.project.config_files"

_NO_COMPOSE = re.compile(r"unknown command: docker compose|'compose' is not a \w+ command|unknown (flag|shorthand)")
_NO_ENGINE = re.compile(
    r"not installed|permission denied.* (daemon|docker)|cannot connect to the .*daemon", re.IGNORECASE
)

_VANISHED = re.compile(r"no such (object|container)", re.IGNORECASE)
_LOOKS = 3
"""Times that a container may vanish between the list and its description."""

LOG_TIMEOUT_S = 10.0
_KEPT_LINES = 20_000


@dataclass(frozen=True)
class Container:
    """One container.

    Attributes:
        service: the compose service that it is of.
        status: ``created``, ``running``, ``restarting``, ``exited``, ``dead``, …
        exit_code: of its last end.
        error: why the engine could not start it.
        restarts: how often the engine started it again by itself.
        health: ``starting``, ``healthy``, ``unhealthy``; empty without a health check or while it does not run.
        health_said: what its last health check printed.
        started_at: of its last start, in seconds since 1970; None before there was one.
        started: the same in the engine's words.
        image: name of the image; ``image_id`` is its digest.
        url: where its port is published on this machine; None if it is not.
        compose_files: the files that it was made from.
    """

    id: str
    name: str
    service: str
    status: str
    exit_code: int = 0
    error: str = ""
    oom_killed: bool = False
    restarts: int = 0
    health: str = ""
    health_said: str = ""
    started_at: float | None = None
    started: str = ""
    image: str = ""
    image_id: str = ""
    url: str | None = None
    compose_files: str = ""

    @property
    def up(self) -> bool:
        """Whether it runs or is about to."""
        return self.status in ("running", "restarting", "paused")

    @property
    def serves(self) -> bool:
        """Whether it is the server and not the check before it."""
        return self.service.partition("-")[0] == "server"

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        keys = ("name", "id", "status", "health", "restarts", "exit_code", "image", "image_id", "url")
        return {key: getattr(self, key) for key in keys}


def list_containers(outside: Outside, project: Project) -> tuple[Container, ...]:
    """All containers that carry the project's name, those that ended included.

    Raises:
        ToolMissingError: the engine is not there, does not run, or does not talk to this user.
    """
    label = f"label={PROJECT_LABEL}={project.name}"
    for _ in range(_LOOKS):
        ids = ask(outside, project, ("ps", "--all", "--quiet", "--no-trunc", "--filter", label)).split()
        if not ids:
            return ()
        answer = outside.run((project.engine, "inspect", "--type", "container", *ids))
        if isinstance(answer, Ran) and answer.code == 0:
            return _described(project.engine, answer.stdout)
        reason = answer.reason if isinstance(answer, Unknown) else said(answer)
        if not _VANISHED.search(reason):
            raise engine_error(project.engine, reason)
    raise ServerError(
        f"the containers of project {project.name} change while they are looked at",
        why=reason,
        fix="Another command works on them: try again once it has ended.",
    )


def server_of(containers: Sequence[Container]) -> Container | None:
    """The container that serves: the running one where there are several."""
    serving = sorted((one for one in containers if one.serves), key=lambda one: not one.up)
    return serving[0] if serving else None


def check_of(containers: Sequence[Container], server: str) -> Container | None:
    """The check that belongs to a service of that name."""
    wanted = server.replace("server", "check")
    return next((one for one in containers if one.service == wanted), None)


def refuse_foreign(outside: Outside, containers: Sequence[Container], project: Project) -> None:
    """Containers of another checkout may carry the same name; compose would take them for its own.

    Raises:
        BusyError: one of them is not of this project's file; names it.
    """
    for one in containers:
        if one.compose_files and not _same_file(one.compose_files, project.file):
            raise BusyError(
                f"container {one.name} was made from {one.compose_files}",
                why=f"it bears the project name {project.name}, but is not of {project.file}; it was left alone",
                fix=_elsewhere(outside, one, project),
                container=one.name,
            )


def read_log(
    outside: Outside,
    project: Project,
    container: Container,
    lines: int = 400,
    *,
    whole: bool = False,
    timeout_s: float | None = None,
) -> list[str]:
    """The end of a container's log, output and messages together, without escapes; empty if it cannot be read.

    Args:
        whole: also what was printed before its last start.
        timeout_s: an engine that takes longer is not waited for, nor one that takes ``LOG_TIMEOUT_S``; what it gave
            until then counts.
    """
    since = () if whole or container.started_at is None else ("--since", container.started)
    try:
        words = (project.engine, "logs", *since, "--tail", str(lines), container.id)
        limit = LOG_TIMEOUT_S if timeout_s is None else min(timeout_s, LOG_TIMEOUT_S)
        # An engine that does not keep to --tail must not fill the memory either.
        return [plain_line(line) for line in deque(outside.lines(words, limit), maxlen=max(lines, _KEPT_LINES))]
    except ToolMissingError:
        return []


def ask(outside: Outside, project: Project, words: Sequence[str]) -> str:
    """Output of a command of the engine.

    Raises:
        ToolMissingError: it failed.
    """
    answer = outside.run((project.engine, *words))
    if isinstance(answer, Ran) and answer.code == 0:
        return answer.stdout
    raise engine_error(project.engine, answer.reason if isinstance(answer, Unknown) else said(answer))


def is_engine_fault(reason: str) -> bool:
    """Whether the engine itself is at fault, and not what it was asked for."""
    return bool(_NO_ENGINE.search(reason) or _NO_COMPOSE.search(reason))


def engine_error(engine: str, reason: str) -> H3Error:
    """What it means that the engine answered like this, with the way out that preflight gives."""
    if "not installed" in reason:
        fix = "Install Docker Engine (DGX OS brings it), or name another program with --engine."
        return ToolMissingError(f"{engine} is not there", why=reason, fix=fix)
    if _NO_COMPOSE.search(reason):
        check = engine_checks.compose(Unknown(reason))
    else:
        check = engine_checks.engine(Unknown(reason))
    return ToolMissingError(f"{engine} cannot be used", why=check.detail, fix=check.remedy)


def said(answer: Ran) -> str:
    """The last line of what a command said."""
    lines = [line.strip() for line in plain(f"{answer.stdout}\n{answer.stderr}").splitlines() if line.strip()]
    # Docker ends its complaint about an unknown command with a hint at its own help.
    lines = [line for line in lines if not line.startswith(("Run 'docker", "See 'docker"))] or lines
    return lines[-1][:400] if lines else f"it ended with code {answer.code} and said nothing"


def _described(engine: str, text: str) -> tuple[Container, ...]:
    """
    Raises:
        ToolMissingError: it is nothing that docker would say.
    """
    try:
        described = json.loads(text)
    except (ValueError, RecursionError):
        described = None
    if not isinstance(described, list) or not all(isinstance(one, dict) for one in described):
        seen = plain(text).strip()[:80] or "nothing"
        raise ToolMissingError(
            f"{engine} cannot be used",
            why=f"its answer to `{engine} inspect` is not understood: {seen}",
            fix="Name a program that answers like docker with --engine.",
        )
    return tuple(_container(one) for one in described)


def _container(one: Mapping[str, Any]) -> Container:
    state, config = _object(one, "State"), _object(one, "Config")
    labels, health = _object(config, "Labels"), _object(state, "Health")
    logged = health.get("Log")
    last = logged[-1] if isinstance(logged, list) and logged and isinstance(logged[-1], dict) else {}
    ports = _object(_object(one, "NetworkSettings"), "Ports") or _object(_object(one, "HostConfig"), "PortBindings")
    status, started = _text(state, "Status"), _text(state, "StartedAt")
    return Container(
        id=_text(one, "Id"),
        name=_text(one, "Name").lstrip("/"),
        service=_text(labels, SERVICE_LABEL),
        status=status,
        exit_code=_whole(state, "ExitCode"),
        error=_text(state, "Error"),
        oom_killed=bool(state.get("OOMKilled")),
        restarts=_whole(one, "RestartCount"),
        health=_text(health, "Status") if status == "running" else "",
        health_said=_text(last, "Output").strip(),
        started_at=_seconds(started),
        started=started,
        image=_text(config, "Image"),
        image_id=_text(one, "Image"),
        url=_url(ports),
        compose_files=_text(labels, FILE_LABEL),
    )


def _object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = raw.get(name)
    return found if isinstance(found, dict) else {}


def _text(raw: Mapping[str, Any], name: str) -> str:
    found = raw.get(name)
    return plain(found) if isinstance(found, str) else ""


def _whole(raw: Mapping[str, Any], name: str) -> int:
    """A number, which some engines write as text; 0 where it is none."""
    found = str(raw.get(name))
    return int(found) if re.fullmatch(r"\d{1,9}", found, re.ASCII) else 0


def _seconds(text: str) -> float | None:
    """Seconds since 1970 of the engine's time, which has nanoseconds; the year 1 means never."""
    try:
        found = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text.replace("Z", "+00:00")))
    except ValueError:
        return None
    return found.timestamp() if found.year > 1 else None


def _url(ports: Mapping[str, Any]) -> str | None:
    for bindings in ports.values():
        for binding in bindings if isinstance(bindings, list) else ():
            port = _whole(binding, "HostPort") if isinstance(binding, dict) else 0
            address = reachable(_text(binding, "HostIp")) if 0 < port < 2**16 else None
            if address:
                return f"http://{address}:{port}"
    return None


def reachable(address: str) -> str | None:
    """An address to connect to, for one that is listened on, as a URL has it; None if it is none."""
    if address in ("", "0.0.0.0", "::", "[::]"):  # read, not bound
        return "127.0.0.1"
    bare = address[1:-1] if address[0] + address[-1] == "[]" else address
    try:
        return f"[{bare}]" if ipaddress.ip_address(bare).version == 6 else bare
    except ValueError:
        return address if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", address) else None


def _same_file(label: str, file: Path) -> bool:
    # podman-compose writes the name as it was given; compose writes whole paths.
    named = [Path(name) for name in label.split(",")]
    return any(path.resolve() == file.resolve() if path.is_absolute() else path.name == file.name for path in named)


def _elsewhere(outside: Outside, container: Container, project: Project) -> str:
    """How to remove a container of another checkout."""
    files = Path(container.compose_files.split(",")[0])
    if outside.machine.exists(files):
        engine = "" if project.engine == "docker" else f"--engine {shlex.quote(project.engine)}"
        there = call("down", engine, f"--directory {shlex.quote(str(files.parent))}")
        return f"Go on in that checkout, or remove it there: `{there}`."
    by_hand = f"{project.engine} compose --project-name {shlex.quote(project.name)} down"
    return f"That checkout is gone. By hand, which waits for no job: `{by_hand}`; the volumes stay."
