# SPDX-License-Identifier: Apache-2.0
"""Take a project down: wait for its job or say what is killed, stop it, and see the memory come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_h3_plugin.errors import BusyError, ServerError
from vllm_h3_plugin.kit.answers import Answers, ask_server, url_of
from vllm_h3_plugin.kit.containers import (
    Container,
    engine_error,
    is_engine_fault,
    list_containers,
    refuse_foreign,
    said,
    server_of,
)
from vllm_h3_plugin.kit.held import Held, measure, still_missing
from vllm_h3_plugin.kit.outside import Outside
from vllm_h3_plugin.kit.project import Project
from vllm_h3_plugin.kit.status import waiting
from vllm_h3_plugin.kit.words import doing, gib
from vllm_h3_plugin.preflight.check import Unknown

LOOK_S = 2.0
MEMORY_S = 60.0
"""How long the memory may take to come back."""

_COMPOSE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Down:
    """What was done.

    Attributes:
        stopped: names of the containers that were removed; empty where there was nothing.
        killed: the job that ran, in words; empty where none did.
        before_bytes, after_bytes: MemAvailable before the stop and when this returned.
        held_bytes: what the server held of main memory; ``device_bytes``: of devices with memory of their own.
        seconds: until the memory was back, from the end of the containers.
    """

    stopped: tuple[str, ...] = ()
    killed: str = ""
    before_bytes: int = 0
    after_bytes: int = 0
    held_bytes: int = 0
    device_bytes: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**vars(self), "seconds": round(self.seconds, 1)}


class Stopper:
    """One ``vllm-h3 down``."""

    def __init__(
        self,
        outside: Outside,
        project: Project,
        key: str | None,
        on_look: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        """
        Args:
            on_look: told what is waited for, about once in two seconds.
            note: told what should stay on the screen.
        """
        self._outside = outside
        self._project = project
        self._key = key
        self._on_look = on_look
        self._note = note

    def take_down(self, *, now: bool, timeout_s: float) -> Down:
        """Stop and remove the containers of the project; its volumes stay.

        Args:
            now: do not wait for a job.
            timeout_s: how long to wait for one.

        Raises:
            BusyError: the job did not end in time and nothing was stopped; or the memory did not come back.
            ServerError: it cannot be told whether a job runs, or the engine could not stop it.
            ToolMissingError: there is no engine to ask.
        """
        containers = list_containers(self._outside, self._project)
        refuse_foreign(containers, self._project)
        if not containers:
            return Down()
        server = server_of(containers)
        killed = ""
        held = Held()
        if server is not None and server.status == "running":
            answers = self._look(server)
            if now:
                killed = jobs_in_words(answers, self._outside.now())
                self._note(f"killed: {killed}" if killed else "no job runs")
            else:
                self._wait_for_jobs(server, answers, timeout_s)
            held = measure(self._outside, self._project, server, self._look(server).info)
        self._on_look("stopping the containers")
        self._compose_down()
        return self._see_memory(held, tuple(one.name for one in containers), killed)

    def _look(self, server: Container) -> Answers:
        with self._outside.http(server.url or url_of(self._outside, self._project), self._key) as http:
            return ask_server(http)

    def _wait_for_jobs(self, server: Container, answers: Answers, timeout_s: float) -> None:
        started = self._outside.monotonic()
        while answers.mute or answers.wants_key or (answers.well and answers.busy):
            instead = f"`vllm-h3 down --now{self._project.flags}` ends it."
            if answers.wants_key:
                raise ServerError(
                    "whether a job runs is not known, and nothing was stopped",
                    why=answers.no_info,
                    fix=f"Set H3_API_KEY_FILE to the file with its key. Whatever runs, {instead}",
                )
            stuck = answers.stuck(self._outside.now())
            if stuck:
                self._note(f"not waited for: {stuck}")
                return
            if self._outside.monotonic() - started > timeout_s:
                what = jobs_in_words(answers, self._outside.now()) or "something that keeps it from answering"
                raise BusyError(
                    f"a job still runs after {timeout_s:.0f} s, and nothing was stopped",
                    why=what,
                    fix=f"Wait longer with --timeout; {instead}",
                )
            self._on_look(f"waiting for the job: {jobs_in_words(answers, self._outside.now()) or answers.silence}")
            self._outside.sleep(LOOK_S)
            answers = self._look(server)

    def _compose_down(self) -> None:
        answer = self._outside.run(self._project.compose("down"), _COMPOSE_TIMEOUT_S)
        reason = answer.reason if isinstance(answer, Unknown) else said(answer)
        if isinstance(answer, Unknown) or answer.code:
            if is_engine_fault(reason):
                raise engine_error(self._project.engine, reason)
            raise ServerError(
                "compose could not stop it",
                why=reason,
                fix=f"Correct what it names and try again. By hand: `{self._project.engine} stop` with the names of "
                f"`{self._project.engine} ps --filter label=com.docker.compose.project={self._project.name}`.",
            )

    def _see_memory(self, held: Held, names: tuple[str, ...], killed: str) -> Down:
        ended = self._outside.monotonic()
        while True:
            missing = still_missing(self._outside, held)
            seconds = self._outside.monotonic() - ended
            if not missing.anything or seconds >= MEMORY_S:
                break
            self._on_look(f"waiting for the memory: {missing}")
            self._outside.sleep(1.0)
        down = Down(
            names, killed, held.available_bytes, missing.available_bytes, held.main_bytes, held.own_bytes, seconds
        )
        if missing.anything:
            raise BusyError(
                f"the server is stopped, but its memory did not come back within {MEMORY_S:.0f} s",
                why=str(missing),
                fix=f"It is held by {missing.holders or 'no process that can be seen'}. End what should not run, and "
                "look again with `vllm-h3 preflight`.",
                **down.as_dict(),
            )
        return down


def jobs_in_words(answers: Answers, now: float) -> str:
    """What runs and what waits; empty where nothing does."""
    first: Mapping[str, Any] = answers.jobs[0] if answers.jobs else {}
    parts = [f"job {first['id']}"] if first else []
    if not first and answers.busy:
        parts.append("a request")
    if answers.busy:
        at = doing(answers.progress, now) if answers.progress else "preparing or encoding"
        parts.append(f"({at})")
    behind = waiting(answers)
    return " ".join(parts) + (f" and {behind} waiting" if behind else "")


def summary(down: Down) -> str:
    """What ``vllm-h3 down`` says in the end."""
    if not down.stopped:
        return "nothing to stop"
    names = ", ".join(down.stopped)
    if not down.held_bytes and not down.device_bytes:
        return f"stopped: {names}"
    device = f", and {gib(down.device_bytes)} on its device" if down.device_bytes else ""
    return (
        f"stopped: {names} | memory is back: {gib(down.before_bytes)} available before, {gib(down.after_bytes)} now; "
        f"it held {gib(down.held_bytes)}{device}"
    )
