# SPDX-License-Identifier: Apache-2.0
"""Take a project down: wait for its job or say what is killed, stop it, and see the memory come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_h3_plugin.errors import BusyError, ServerError
from vllm_h3_plugin.kit.answers import STUCK_AFTER_S, Answers, ask_server, url_of
from vllm_h3_plugin.kit.containers import (
    Container,
    engine_error,
    is_engine_fault,
    list_containers,
    refuse_foreign,
    said,
)
from vllm_h3_plugin.kit.held import Held, measure, still_missing
from vllm_h3_plugin.kit.outside import Outside
from vllm_h3_plugin.kit.project import Project
from vllm_h3_plugin.kit.status import waiting
from vllm_h3_plugin.kit.words import call, doing, gib
from vllm_h3_plugin.preflight.check import Unknown

LOOK_S = 2.0
UNSURE_S = 10.0
"""How long a server that answers, but does not say what runs, is asked again: a proxy's 502 passes."""

MEMORY_S = 60.0
"""How long the memory may take to come back."""

_COMPOSE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Down:
    """What was done.

    Attributes:
        stopped: names of the containers that were removed; empty where there was nothing.
        killed: the job that ran, in words, or why it is not known whether one did; empty where none did.
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
        *,
        no_key: str = "",
        stuck_after_s: float = STUCK_AFTER_S,
    ) -> None:
        """
        Args:
            on_look: told what is waited for, about once in two seconds.
            note: told what should stay on the screen.
            no_key: why there is no ``key`` where one is named.
            stuck_after_s: seconds without a move after which a job is not waited for.
        """
        self._outside = outside
        self._project = project
        self._key = key
        self._on_look = on_look
        self._note = note
        self._no_key = no_key
        self._stuck_after_s = stuck_after_s

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
        refuse_foreign(self._outside, containers, self._project)
        if not containers:
            return Down()
        held, killed = Held(), []
        started = self._outside.monotonic()
        # In any other state no process of it lives, and no job.
        for server in [one for one in containers if one.serves and one.status in ("running", "paused")]:
            left = max(0.0, timeout_s - (self._outside.monotonic() - started))
            answers, lost = self._kill(server) if now else self._wait_for_jobs(server, left)
            killed += [lost] if lost else []
            if answers is None:
                continue
            held = held.and_also(measure(self._outside, self._project, server, answers.info))
        if killed:
            self._note(f"killed: {'; '.join(killed)}")
        elif now:
            self._note("no job runs")
        self._on_look("stopping the containers")
        self._compose_down()
        return self._see_memory(held, tuple(one.name for one in containers), "; ".join(killed))

    def _look(self, server: Container) -> Answers:
        url = server.url or url_of(self._outside, self._project)
        if server.status == "paused":
            why = f"container {server.name} is paused, and answers nothing"
            return Answers(url, silence=why, unsure=why)
        with self._outside.http(url, self._key) as http:
            answers = ask_server(http)
        # Until an engine's first health check has passed, one that cannot be talked to has never been ready.
        if server.health == "starting" and answers.health is None and not answers.mute:
            return replace(answers, unsure="")
        if answers.wants_key and self._no_key:
            return replace(answers, unsure=f"{answers.unsure}, and {self._no_key}")
        return answers

    def _kill(self, server: Container) -> tuple[Answers | None, str]:
        """What is lost with a server that is stopped now, as far as it can be told."""
        answers = self._look(server)
        words = jobs_in_words(answers, self._outside.now())
        if answers.unsure:
            rest = f"not known what runs: {answers.unsure}"
            return answers, f"{words}; {rest}" if words else rest
        return answers, words

    def _wait_for_jobs(self, server: Container, timeout_s: float) -> tuple[Answers | None, str]:
        """Until the server says that nothing runs, or its job is stuck, which is then what is lost; or it has ended.

        Raises:
            BusyError, ServerError: there is, or may be, a job.
        """
        started = self._outside.monotonic()
        unsure_since: float | None = None
        while True:
            answers = self._look(server)
            now, seconds = self._outside.now(), self._outside.monotonic() - started
            what = jobs_in_words(answers, now)
            if not what and not answers.unsure:
                return answers, ""
            stuck = answers.stuck(now, self._stuck_after_s)
            if stuck:
                self._note(f"not waited for: {stuck}")
                return answers, what
            dead = answers.health == 503
            if (answers.unsure and not what and not answers.mute) or dead:
                unsure_since = seconds if unsure_since is None else unsure_since
                over = seconds - unsure_since >= UNSURE_S or seconds >= timeout_s
                if over or answers.wants_key or server.status == "paused":
                    raise self._dead(what) if what else self._not_known(answers)
            else:
                unsure_since = None
            if seconds > timeout_s:
                raise self._still_there(what, answers, timeout_s)
            self._on_look(f"waiting for the job: {what}" if what else f"asking what runs: {answers.unsure}")
            self._outside.sleep(LOOK_S)
            again = self._again(server)
            if again is None:
                return None, ""
            server = again

    def _again(self, server: Container) -> Container | None:
        """The container as it is now; None once it has ended."""
        found = list_containers(self._outside, self._project)
        return next((one for one in found if one.id == server.id and one.status in ("running", "paused")), None)

    @property
    def _instead(self) -> str:
        return f"`{call('down', '--now', self._project.flags)}` ends it."

    def _not_known(self, answers: Answers) -> ServerError:
        key = "Set H3_API_KEY_FILE to the file with its key. " if answers.wants_key else ""
        return ServerError(
            "whether a job runs is not known, and nothing was stopped",
            why=answers.unsure,
            fix=f"{key}Whatever runs, {self._instead}",
        )

    def _dead(self, what: str) -> ServerError:
        return ServerError(
            "the server calls its engine dead and still names a job, and nothing was stopped",
            why=f"/health gave 503, beside {what}",
            fix=f"If that lasts, the job is lost: {self._instead}",
        )

    def _still_there(self, what: str, answers: Answers, timeout_s: float) -> BusyError:
        heading = f"a job still runs after {timeout_s:.0f} s" if what else "whether a job runs is not known"
        return BusyError(
            f"{heading}, and nothing was stopped",
            why=what or f"after {timeout_s:.0f} s {answers.unsure}",
            fix=f"Wait longer with --timeout; {self._instead}",
        )

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
                f"look again with `{call('preflight')}`.",
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
