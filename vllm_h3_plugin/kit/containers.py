# SPDX-License-Identifier: Apache-2.0
"""The containers of a project as the engine describes them, and what an engine that does not answer means."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from vllm_h3_plugin.errors import BusyError, H3Error, ToolMissingError
from vllm_h3_plugin.kit.outside import Outside
from vllm_h3_plugin.kit.project import Project
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
    listed = ask(outside, project, ("ps", "--all", "--quiet", "--no-trunc", "--filter", label))
    ids = listed.split()
    if not ids:
        return ()
    described = json.loads(ask(outside, project, ("inspect", "--type", "container", *ids)))
    return tuple(_container(one) for one in described)


def server_of(containers: Sequence[Container]) -> Container | None:
    """The container that serves: the running one where there are several."""
    serving = sorted((one for one in containers if one.serves), key=lambda one: not one.up)
    return serving[0] if serving else None


def check_of(containers: Sequence[Container], server: str) -> Container | None:
    """The check that belongs to a service of that name."""
    wanted = server.replace("server", "check")
    return next((one for one in containers if one.service == wanted), None)


def refuse_foreign(containers: Sequence[Container], project: Project) -> None:
    """Containers of another checkout may carry the same name; compose would take them for its own.

    Raises:
        BusyError: one of them is not of this project's file; names it.
    """
    for one in containers:
        if one.compose_files and not _same_file(one.compose_files, project.file):
            raise BusyError(
                f"container {one.name} was made from {one.compose_files}",
                why=f"it bears the project name {project.name}, but is not of {project.file}; it was left alone",
                fix=f"Go on in that checkout, or remove it there: `vllm-h3 down --directory {_folder(one)}`.",
                container=one.name,
            )


def read_log(
    outside: Outside, project: Project, container: Container, lines: int = 400, *, whole: bool = False
) -> list[str]:
    """The end of a container's log, output and messages together; empty if it cannot be read.

    Args:
        whole: also what was printed before its last start.
    """
    since = () if whole or container.started_at is None else ("--since", container.started)
    try:
        return list(outside.lines((project.engine, "logs", *since, "--tail", str(lines), container.id)))
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
    lines = [line.strip() for line in f"{answer.stdout}\n{answer.stderr}".splitlines() if line.strip()]
    # Docker ends its complaint about an unknown command with a hint at its own help.
    lines = [line for line in lines if not line.startswith(("Run 'docker", "See 'docker"))] or lines
    return lines[-1][:400] if lines else f"it ended with code {answer.code} and said nothing"


def _container(one: Mapping[str, Any]) -> Container:
    state = one.get("State") or {}
    config = one.get("Config") or {}
    labels = config.get("Labels") or {}
    health = state.get("Health") or {}
    logged = health.get("Log") or []
    status = str(state.get("Status", ""))
    return Container(
        id=str(one.get("Id", "")),
        name=str(one.get("Name", "")).lstrip("/"),
        service=str(labels.get(SERVICE_LABEL, "")),
        status=status,
        exit_code=int(state.get("ExitCode") or 0),
        error=str(state.get("Error") or ""),
        oom_killed=bool(state.get("OOMKilled")),
        restarts=int(one.get("RestartCount") or 0),
        health=str(health.get("Status") or "") if status == "running" else "",
        health_said=str(logged[-1].get("Output") or "").strip() if logged else "",
        started_at=_seconds(str(state.get("StartedAt") or "")),
        started=str(state.get("StartedAt") or ""),
        image=str(config.get("Image") or ""),
        image_id=str(one.get("Image") or ""),
        url=_url((one.get("NetworkSettings") or {}).get("Ports") or (one.get("HostConfig") or {}).get("PortBindings")),
        compose_files=str(labels.get(FILE_LABEL) or ""),
    )


def _seconds(text: str) -> float | None:
    """Seconds since 1970 of the engine's time, which has nanoseconds; the year 1 means never."""
    try:
        found = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text.replace("Z", "+00:00")))
    except ValueError:
        return None
    return found.timestamp() if found.year > 1 else None


def _url(ports: Mapping[str, Any] | None) -> str | None:
    for bindings in (ports or {}).values():
        for binding in bindings or []:
            if binding.get("HostPort"):
                return f"http://{reachable(str(binding.get('HostIp') or ''))}:{binding['HostPort']}"
    return None


def reachable(address: str) -> str:
    """An address to connect to, for one that is listened on, as a URL has it."""
    if address in ("", "0.0.0.0", "::"):  # read, not bound
        return "127.0.0.1"
    return f"[{address}]" if ":" in address else address


def _same_file(label: str, file: Path) -> bool:
    # podman-compose writes the name as it was given; compose writes whole paths.
    named = [Path(name) for name in label.split(",")]
    return any(path.resolve() == file.resolve() if path.is_absolute() else path.name == file.name for path in named)


def _folder(container: Container) -> str:
    return str(Path(container.compose_files.split(",")[0]).parent)
