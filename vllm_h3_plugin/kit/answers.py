# SPDX-License-Identifier: Apache-2.0
"""What a running server says over HTTP: is it alive, what does it do, what waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from vllm_h3_plugin.errors import H3Error, ServerError, SettingsError
from vllm_h3_plugin.kit.containers import reachable
from vllm_h3_plugin.kit.outside import HTTP_TIMEOUT_S, Outside
from vllm_h3_plugin.kit.project import Project, variable
from vllm_h3_plugin.kit.told import ToldInfo, ToldJobs, parse, read_info, read_jobs, tidy_text
from vllm_h3_plugin.preflight.check import is_number
from vllm_h3_plugin.serving.answers import Answer, ask
from vllm_h3_plugin.serving.api_key import fault_of_key, read_api_key
from vllm_h3_plugin.serving.health import describe_progress
from vllm_h3_plugin.serving.limits import Deadline

STUCK_AFTER_S = 1800.0
"""Default of VLLM_H3_STUCK_AFTER_S, as in the compose files."""

_LOOKED_AT = 100
"""Jobs of a list that are looked at: the most that a server gives at once."""


@dataclass(frozen=True)
class Answers:
    """One look at a server.

    Attributes:
        health: status of ``/health``; None where nothing answered.
        silence: why nothing answered; ``mute`` is one that takes connections and says nothing.
        info: what of ``/v1/h3/info`` is understood (:func:`told.read_info`); empty where it was not given, and
            ``no_info`` says why.
        info_status: status of ``/v1/h3/info``; None where there was no whole answer.
        jobs: jobs that have not ended, oldest first; a caller of ``/v1/videos/sync`` waits for one as well.
        unsure: why it is not known whether a job runs; empty where the server has said what runs, or that nothing does.
        odd: parts of its answers that are not understood.
    """

    url: str
    health: int | None = None
    silence: str = ""
    mute: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    no_info: str = ""
    info_status: int | None = None
    jobs: tuple[Mapping[str, Any], ...] = ()
    unsure: str = ""
    odd: tuple[str, ...] = ()

    @property
    def well(self) -> bool:
        """Whether the engine says that it lives."""
        return self.health == 200

    @property
    def wants_key(self) -> bool:
        """Whether it tells nothing because it asks for an API key, and this one is not it."""
        return self.info_status == 401

    @property
    def progress(self) -> Mapping[str, Any]:
        """The request that runs; empty while none does."""
        progress = self.info.get("progress") or {}
        return {} if progress.get("phase") == "idle" else progress

    @property
    def in_flight(self) -> int:
        """Requests that are read and checked and are no jobs yet, or come through the chat API."""
        return int((self.info.get("requests") or {}).get("in_flight") or 0)

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits, or its clip is being encoded, which is no phase of the worker."""
        return bool(self.jobs or self.progress or self.in_flight)

    def stuck(self, now: float, after_s: float = STUCK_AFTER_S) -> str:
        """Why its request counts as stuck; empty if it moves, or does not say when it last did."""
        if self.progress.get("time") is None:
            return ""
        try:
            describe_progress(dict(self.progress), stuck_after_s=after_s, now=now)
        except ServerError as exc:
            return f"{exc.what}: {exc.why}"
        return ""


@dataclass(frozen=True)
class _Nothing:
    """There was no answer that could be used.

    Attributes:
        mute: it takes the connection and says nothing, or not all of it, in time.
        odd: it answers, and not as HTTP has it.
    """

    reason: str
    mute: bool = False
    odd: bool = False


def ask_server(http: httpx.Client) -> Answers:
    """Look once; says what went wrong instead of raising it. Takes ``HTTP_TIMEOUT_S`` in all, however slow it is."""
    url = str(http.base_url).rstrip("/")
    key = http.headers.get("Authorization", "").removeprefix("Bearer ")
    deadline = Deadline(HTTP_TIMEOUT_S)
    health = _get(http, deadline, "/health", key)
    if isinstance(health, _Nothing):
        return Answers(url, silence=health.reason, mute=health.mute, unsure=health.reason)
    answer = _get(http, deadline, "/v1/h3/info", key)
    if isinstance(answer, _Nothing) and not answer.odd:
        return Answers(url, silence=answer.reason, mute=answer.mute, unsure=answer.reason)
    told, no_info = _info(answer, key)
    info_status = answer.status if isinstance(answer, Answer) else None
    if no_info:
        return Answers(url, health.status, no_info=no_info, info_status=info_status, unsure=no_info, odd=told.odd)
    # Jobs are kept for long after their end, and those that have not ended are the newest.
    listed = _get(http, deadline, "/v1/videos", key, params={"order": "desc", "limit": str(_LOOKED_AT)})
    jobs = _jobs(listed, key, told.info.get("queue") or {})
    return Answers(
        url,
        health.status,
        mute=isinstance(listed, _Nothing) and listed.mute,
        info=told.info,
        info_status=info_status,
        jobs=jobs.jobs,
        unsure=told.unsure or jobs.unsure,
        odd=told.odd + jobs.odd,
    )


def _get(http: httpx.Client, deadline: Deadline, path: str, key: str, **options: Any) -> Answer | _Nothing:
    try:
        return ask(http, deadline, "GET", path, timeout=max(0.1, deadline.left), **options)
    except httpx.TimeoutException:
        return _Nothing("it takes connections and gives no answer in time", mute=True)
    except httpx.TransportError as exc:
        return _Nothing(tidy_text(str(exc), key) or "it cannot be connected to")
    except ServerError as exc:
        if not deadline.left:
            return _Nothing("it takes connections and gives no whole answer in time", mute=True)
        return _Nothing(tidy_text(exc.what, key), odd=True)
    except (httpx.RequestError, LookupError) as exc:
        # A body that is not packed, or not encoded, as its header says.
        return _Nothing(f"its answer to GET {path} is not understood: {tidy_text(str(exc), key)}", odd=True)


def _info(answer: Answer | _Nothing, key: str) -> tuple[ToldInfo, str]:
    """What it tells, and why it tells nothing."""
    if isinstance(answer, _Nothing):
        return ToldInfo(), answer.reason
    if answer.status != 200:
        words = {401: "it asks for a key", 404: "this plugin is not active in it"}
        return ToldInfo(), words.get(answer.status, f"GET /v1/h3/info gave {answer.status}")
    try:
        told = read_info(parse(answer.text, key))
    except ValueError:
        return ToldInfo(), "what answers there is no server of this project"
    return told, "" if told.info else f"its answer to GET /v1/h3/info is not understood: {told.unsure}"


def _jobs(answer: Answer | _Nothing, key: str, queue: Mapping[str, Any]) -> ToldJobs:
    if isinstance(answer, _Nothing):
        return ToldJobs(unsure=answer.reason)
    if answer.status != 200:
        return ToldJobs(unsure=f"GET /v1/videos gave {answer.status}")
    try:
        return read_jobs(parse(answer.text, key), queue)
    except ValueError:
        return read_jobs(None)


def find_key(outside: Outside, project: Project | None) -> tuple[str | None, str]:
    """The server's API key as this user can have it, and why it cannot be had.

    H3_API_KEY_FILE, then VLLM_API_KEY, then the file that VLLM_H3_API_KEY_FILE names in ``.env``.
    """
    environ = outside.machine.environ
    named = environ.get("H3_API_KEY_FILE", "")
    if not named and environ.get("VLLM_API_KEY"):
        key = environ["VLLM_API_KEY"]
        return (None, f"VLLM_API_KEY holds no key: {_NO_WORD}") if fault_of_key(key) else (key, "")
    path = Path(named) if named else None
    if path is None and project is not None:
        name = variable(outside, project, "VLLM_H3_API_KEY_FILE")
        path = project.folder / name if name else None
    if path is None:
        return None, ""
    try:
        return read_api_key(path), ""
    except H3Error as exc:
        return None, f"{path} holds no key that can be read: {exc.why}"


def stuck_after_s(outside: Outside, project: Project | None) -> float:
    """Seconds without a move that mean stuck, as the health check in the container counts.

    Raises:
        SettingsError: VLLM_H3_STUCK_AFTER_S is no such number.
    """
    text = "" if project is None else variable(outside, project, "VLLM_H3_STUCK_AFTER_S")
    if not text:
        return STUCK_AFTER_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < float("inf"):
        raise SettingsError(
            f"VLLM_H3_STUCK_AFTER_S={text}",
            why="it is no number of seconds of 1 or more",
            fix=f"Correct it in .env, or leave it out for {STUCK_AFTER_S:.0f}.",
        )
    return seconds


def url_of(outside: Outside, project: Project | None) -> str:
    """Where the server of a project is to be found, by the variables of compose.

    Raises:
        SettingsError: VLLM_H3_BIND is no address, or VLLM_H3_PORT no port.
    """
    if project is None:
        return "http://127.0.0.1:8000"
    bind, port = (variable(outside, project, name) for name in ("VLLM_H3_BIND", "VLLM_H3_PORT"))
    address = reachable(bind or "127.0.0.1")
    if address is None:
        raise SettingsError(
            f"VLLM_H3_BIND={bind}",
            why="it is no IP address",
            fix="Write one in .env: 127.0.0.1 for this machine alone, 0.0.0.0 for all; the port is VLLM_H3_PORT.",
        )
    if port and not (is_number(port) and 0 < int(port[:6]) < 2**16):
        raise SettingsError(
            f"VLLM_H3_PORT={port}", why="it is no port", fix="Write a number from 1 to 65535 in .env, or leave it out."
        )
    return f"http://{address}:{port or '8000'}"


_NO_WORD = "a key is one word of printable ASCII characters"
