# SPDX-License-Identifier: Apache-2.0
"""What a running server says over HTTP: is it alive, what does it do, what waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from vllm_h3_plugin.errors import H3Error, ServerError
from vllm_h3_plugin.kit.containers import reachable
from vllm_h3_plugin.kit.outside import Outside
from vllm_h3_plugin.kit.project import Project, variable
from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.serving.api_key import read_api_key
from vllm_h3_plugin.serving.health import describe_progress

STUCK_AFTER_S = 1800.0
"""As the health check of the compose files."""

_ACTIVE = ("queued", "in_progress")


@dataclass(frozen=True)
class Answers:
    """One look at a server.

    Attributes:
        health: status of ``/health``; None where nothing answered.
        silence: why nothing answered; ``mute`` is one that takes connections and says nothing.
        info: ``/v1/h3/info``; empty where it was not given, and ``no_info`` says why.
        wants_key: the reason is that the server asks for an API key, and this one is not it.
        jobs: jobs that have not ended, oldest first; those of ``/v1/videos/sync`` are not among them.
    """

    url: str
    health: int | None = None
    silence: str = ""
    mute: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    no_info: str = ""
    wants_key: bool = False
    jobs: tuple[Mapping[str, Any], ...] = ()

    @property
    def well(self) -> bool:
        """Whether the engine says that it lives."""
        return self.health == 200

    @property
    def progress(self) -> Mapping[str, Any]:
        """The request that runs; empty while none does."""
        progress = self.info.get("progress") or {}
        return {} if progress.get("phase") == "idle" else progress

    @property
    def in_flight(self) -> int:
        """Requests whose caller waits for the clip itself."""
        return int((self.info.get("requests") or {}).get("in_flight") or 0)

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits, or its clip is being encoded, which is no phase of the worker."""
        return bool(self.jobs or self.progress or self.in_flight)

    def stuck(self, now: float, after_s: float = STUCK_AFTER_S) -> str:
        """Why its request counts as stuck; empty if it moves."""
        try:
            describe_progress(dict(self.progress), stuck_after_s=after_s, now=now)
        except ServerError as exc:
            return f"{exc.what}: {exc.why}"
        return ""


def ask_server(http: httpx.Client) -> Answers:
    """Look once; says what went wrong instead of raising it."""
    url = str(http.base_url).rstrip("/")
    try:
        health = http.get("/health").status_code
        info = http.get("/v1/h3/info")
        found: dict[str, Any] = {}
        no_info = {
            200: "",
            401: "it asks for a key",
            404: "this plugin is not active in it",
        }.get(info.status_code, f"GET /v1/h3/info gave {info.status_code}")
        if info.status_code == 200:
            found = info.json()
        jobs = _active_jobs(http) if found else ()
        wants_key = info.status_code == 401
    except httpx.TimeoutException:
        return Answers(url, silence="it takes connections and gives no answer in time", mute=True)
    except httpx.TransportError as exc:
        return Answers(url, silence=str(exc) or "it cannot be connected to")
    except ValueError:
        return Answers(url, health, no_info="what answers there is no server of this project")
    return Answers(url, health, info=found, no_info=no_info, wants_key=wants_key, jobs=jobs)


def find_key(outside: Outside, project: Project | None) -> tuple[str | None, str]:
    """The server's API key as this user can have it, and why it cannot be had.

    H3_API_KEY_FILE, then VLLM_API_KEY, then the file that VLLM_H3_API_KEY_FILE names in ``.env``.
    """
    environ = outside.machine.environ
    named = environ.get("H3_API_KEY_FILE", "")
    if not named and environ.get("VLLM_API_KEY"):
        return environ["VLLM_API_KEY"], ""
    path = None
    if project is not None and not named:
        name = variable(outside, project, "VLLM_H3_API_KEY_FILE")
        path = project.folder / name if name else None
        if path is None:
            return None, ""
        raw = outside.machine.read(path)
        if isinstance(raw, Unknown):
            return None, raw.reason
        return raw.decode("utf-8", "replace").strip() or None, ""
    if not named:
        return None, ""
    try:
        return read_api_key(Path(named)), ""
    except H3Error as exc:
        return None, str(exc)


def url_of(outside: Outside, project: Project | None) -> str:
    """Where the server of a project is to be found, by the variables of compose."""
    if project is None:
        return "http://127.0.0.1:8000"
    address = reachable(variable(outside, project, "VLLM_H3_BIND") or "127.0.0.1")
    return f"http://{address}:{variable(outside, project, 'VLLM_H3_PORT') or '8000'}"


def _active_jobs(http: httpx.Client) -> tuple[Mapping[str, Any], ...]:
    answer = http.get("/v1/videos", params={"order": "asc"})
    if answer.status_code != 200:
        return ()
    return tuple(job for job in answer.json().get("data") or [] if job.get("status") in _ACTIVE)
