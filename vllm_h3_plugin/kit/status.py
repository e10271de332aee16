# SPDX-License-Identifier: Apache-2.0
"""State of a server, from what it answers and from what the engine says of its container."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vllm_h3_plugin.errors import BusyError, H3Error, ServerError
from vllm_h3_plugin.kit.answers import STUCK_AFTER_S, Answers
from vllm_h3_plugin.kit.containers import Container, check_of, server_of
from vllm_h3_plugin.kit.failure import ended, one_line_cause
from vllm_h3_plugin.kit.log import start_phase
from vllm_h3_plugin.kit.words import call, doing, seconds_left, span


class State(Enum):
    """What a server is. The value is the word that people and ``--json`` get."""

    READY = "ready"
    BUSY = "busy"
    STARTING = "starting"
    UNHEALTHY = "unhealthy"
    STOPPED = "stopped"

    @property
    def exit_code(self) -> int:
        """0 where it takes requests; that of :class:`BusyError` while it starts, else of :class:`ServerError`."""
        if self in (State.READY, State.BUSY):
            return 0
        return BusyError.exit_code if self is State.STARTING else ServerError.exit_code


@dataclass(frozen=True)
class Status:
    """One look.

    Attributes:
        detail: what it does, or why it does not.
        remedy: what to do; empty where all is well.
        no_containers: why nothing is known of its container.
    """

    state: State
    detail: str
    remedy: str
    answers: Answers
    container: Container | None = None
    no_containers: str = ""
    now: float = 0.0

    @property
    def uptime_s(self) -> float | None:
        """Since the server's process started; of the container where the server does not say."""
        started = (self.answers.info.get("server") or {}).get("started_at")
        if started is None and self.container is not None and self.container.status == "running":
            started = self.container.started_at
        return None if started is None else max(0.0, self.now - float(started))

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``; what is not known is null."""
        info, progress = self.answers.info, self.answers.progress
        left = seconds_left(progress, self.now) if progress else None
        uptime = self.uptime_s
        worker = (info.get("workers") or [{}])[0]
        return {
            "state": self.state.value,
            "detail": self.detail,
            "remedy": self.remedy,
            "url": self.answers.url,
            "uptime_s": None if uptime is None else round(uptime, 1),
            "progress": dict(progress) or None,
            "seconds_left": None if left is None else round(left, 1),
            "jobs": [
                {key: job.get(key) for key in ("id", "status", "created_at", "size")} for job in self.answers.jobs
            ],
            "waiting": waiting(self.answers),
            "in_flight": self.answers.in_flight,
            "memory": {"guard": info.get("guard"), "workers": [one.get("memory") for one in info.get("workers") or []]},
            "versions": {"plugin": info.get("plugin"), **(info.get("host") or {})},
            "recipe": worker.get("recipe"),
            "image": (info.get("provenance") or {}).get("image"),
            "container": None if self.container is None else self.container.as_dict(),
            "no_containers": self.no_containers or None,
            "not_understood": list(self.answers.odd),
        }


def waiting(answers: Answers) -> int:
    """Requests behind the one that runs: one runs at a time."""
    return max(0, len(answers.jobs) + answers.in_flight - 1)


def judge(
    answers: Answers,
    containers: Sequence[Container],
    log: Sequence[str],
    *,
    now: float,
    flags: str = "",
    no_containers: str = "",
    stuck_after_s: float = STUCK_AFTER_S,
    no_key: str = "",
) -> Status:
    """Decide. The engine's word counts where the server itself gives none, or calls itself well and is not.

    Args:
        log: the end of the log of the server's container, or of the check's where no server was started.
        flags: what verbs in remedies must be told to mean the same project.
        no_key: why the server's key, which is named somewhere, cannot be had.
    """
    server = server_of(containers)

    def status(state: State, detail: str, remedy: str = "", one: Container | None = server) -> Status:
        return Status(state, detail, remedy, answers, one, no_containers, now)

    start = f"Start it: `{call('up', flags)}`."
    stop = call("down", "--now", flags)
    restart = f"Restart it: `{stop} && {call('up', flags)}`; the engine does not do it by itself."
    errors = f"`{call('logs', '--errors', flags)}` has the cause."
    if answers.health is not None and not answers.well:
        return status(State.UNHEALTHY, f"/health gave {answers.health}: its engine is dead", f"{errors} {restart}")
    if answers.well:
        return _of_a_living(answers, server, status, now, stuck_after_s, restart, errors, no_key)
    if server is None:
        check = check_of(containers, "server") or next(iter(containers), None)
        if check is not None and check.up:
            return status(State.STARTING, "the check before the start runs", one=check)
        if check is not None and check.exit_code:
            return status(State.STOPPED, f"the check before the start failed: {one_line_cause(log)}", errors, check)
        if answers.mute:
            return status(State.UNHEALTHY, answers.silence, "Ask again in a minute; if it lasts, restart it.")
        return status(State.STOPPED, f"nothing answers: {answers.silence}", start)
    if server.status == "restarting":
        what = f"it ends as soon as it starts (restarted {server.restarts} times): {one_line_cause(log)}"
        return status(State.UNHEALTHY, what, f"{errors} Stop it: `{stop}`.")
    if server.health == "unhealthy":
        return status(State.UNHEALTHY, f"its health check fails: {_health(server) or answers.silence}", restart)
    if server.status == "paused":
        wake = f"Wake it with the engine: `unpause {server.name}`; or stop it: `{stop}`."
        return status(State.UNHEALTHY, "its container is paused", wake)
    if server.status == "running":
        if answers.mute and server.health == "healthy":
            return status(State.BUSY, f"{answers.silence}; moving and encoding frames can hold it for a minute")
        if server.health == "healthy":
            what = f"its health check passes, but nothing answers here: {answers.silence}"
            return status(State.UNHEALTHY, what, f"See which address and port reach it. {restart}")
        phase, how_far = start_phase(log)
        again = f", after {server.restarts} restarts" if server.restarts else ""
        return status(State.STARTING, ", ".join(filter(None, (phase, how_far))) + again)
    if server.status == "created":
        check = check_of(containers, server.service)
        if check is not None and check.up:
            return status(State.STARTING, "the check before the start runs")
        if check is not None and check.exit_code:
            return status(State.STOPPED, f"the check before the start failed: {one_line_cause(log)}", errors)
        return status(State.STOPPED, server.error or "it was made and not started", start)
    why = ended(server)
    cause = f": {one_line_cause(log)}" if server.exit_code and log else ""
    return status(State.STOPPED, f"{why}{cause}", start)


def failure_of(status: Status) -> H3Error | None:
    """The status as an error, where it is one."""
    if status.state.exit_code == 0:
        return None
    kind = BusyError if status.state is State.STARTING else ServerError
    return kind(f"the server is {status.state.value}", why=status.detail, fix=status.remedy)


def _of_a_living(
    answers: Answers,
    server: Container | None,
    status: Callable[..., Status],
    now: float,
    stuck_after_s: float,
    restart: str,
    errors: str,
    no_key: str,
) -> Status:
    stuck = answers.stuck(now, stuck_after_s)
    if stuck:
        return status(State.UNHEALTHY, stuck, restart)
    if server is not None and server.health == "unhealthy":
        return status(State.UNHEALTHY, f"it answers, but its health check fails: {_health(server)}", restart)
    if answers.wants_key:
        key = "Set H3_API_KEY_FILE to the file with its key to see what it does."
        but = f"{answers.no_info}, and {no_key}" if no_key else answers.no_info
        return status(State.READY, f"it answers, but {but}", key)
    if not answers.info:
        if answers.info_status not in (None, 200, 404):
            return status(State.UNHEALTHY, f"it answers, but {answers.no_info}", f"Ask again; if it lasts: {errors}")
        remedy = f"Start it with `{call('up')}` or `vllm-h3 serve`, or name another with --url."
        return status(State.UNHEALTHY, f"it answers, but {answers.no_info}", remedy)
    if answers.progress:
        return status(State.BUSY, doing(answers.progress, now))
    if answers.busy:
        return status(State.BUSY, "preparing a request, or encoding its clip")
    if answers.unsure:
        what = f"it answers, but whether a job runs is not known: {answers.unsure}"
        return status(State.UNHEALTHY, what, "Ask again; if it lasts, another program or version may answer there.")
    return status(State.READY, "nothing to do")


def _health(server: Container) -> str:
    lines = [line.strip().removeprefix("error: ") for line in server.health_said.splitlines() if line.strip()]
    return "; ".join(lines[:2])


def uptime_words(status: Status) -> str:
    """``2 h 13 min``; empty where it is not known."""
    return "" if status.uptime_s is None else span(status.uptime_s)
