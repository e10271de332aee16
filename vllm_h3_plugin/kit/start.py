# SPDX-License-Identifier: Apache-2.0
"""Bring a project up and wait until its server is ready and proved, or say why it is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx

from vllm_h3_plugin.errors import BusyError, H3Error, HostError, ServerError, SettingsError
from vllm_h3_plugin.kit.answers import Answers, ask_server, url_of
from vllm_h3_plugin.kit.containers import (
    Container,
    check_of,
    engine_error,
    is_engine_fault,
    list_containers,
    read_log,
    refuse_foreign,
    said,
    server_of,
)
from vllm_h3_plugin.kit.failure import failure
from vllm_h3_plugin.kit.log import start_phase
from vllm_h3_plugin.kit.outside import Outside
from vllm_h3_plugin.kit.project import Project
from vllm_h3_plugin.kit.told import tidy_text
from vllm_h3_plugin.kit.words import call, plain
from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.serving.server import prove_active

LOOK_S = 2.0
# The check only reads headers, but in a fresh container it imports everything first, from a cold disk.
_COMPOSE_TIMEOUT_S = 900.0
_NO_IMAGE = re.compile(r"no such image|image .*not found|pull access denied|image .*pull policy", re.IGNORECASE)
_REQUIRED = re.compile(r"required variable (?P<name>\w+) is missing a value: (?P<text>.+)")


@dataclass(frozen=True)
class Look:
    """One look while a server starts.

    Attributes:
        seconds: since the start.
        phase: ``starting container``, ``loading transformer``, ``warm-up``, …
        detail: how far it is within the phase.
    """

    seconds: float
    phase: str
    detail: str = ""


@dataclass(frozen=True)
class Up:
    """A server that is ready.

    Attributes:
        already: whether it ran before.
        compared: whether the running one could be held against the files; False only where ``already`` is True.
        info: its ``/v1/h3/info``; empty where it asks for a key that this user does not have.
    """

    url: str
    seconds: float
    already: bool
    compared: bool
    info: dict[str, Any]


class Starter:
    """One ``vllm-h3 up``."""

    def __init__(
        self, outside: Outside, project: Project, key: str | None, on_look: Callable[[Look], None], timeout_s: float
    ) -> None:
        self._outside = outside
        self._project = project
        self._key = key
        self._on_look = on_look
        self._timeout_s = timeout_s
        self._started = outside.monotonic()

    def bring_up(self, preflight: Callable[[], None]) -> Up:
        """Start what is not started, and wait.

        Args:
            preflight: raises if this machine is not fit. Not called where the server runs already: its own port and
                memory would be found taken.

        Raises:
            H3Error: of the class that fits the cause.
        """
        containers = list_containers(self._outside, self._project)
        refuse_foreign(self._outside, containers, self._project)
        server = server_of(containers)
        if server is not None and server.up:
            return self._join(server)
        preflight()
        self._started = self._outside.monotonic()
        self._say("starting container", "its check looks at settings and checkpoint first")
        self._compose_up()
        return self._wait(already=False, compared=True)

    def _join(self, server: Container) -> Up:
        """Wait for the one that runs, if it is the one that is wanted."""
        if server.service != self._project.server:
            raise BusyError(
                f"{server.name} runs, and {self._project.server} was asked for",
                why="one role is served at a time",
                fix=f"`{self._call('down')}` first.",
            )
        same = self._same_configuration()
        if same is False:
            raise BusyError(
                f"{server.name} runs with another configuration or image",
                why="compose would end it, with the job in it, to start the new one",
                fix=f"`{self._call('down')}`, which waits for the job, and then `{self._call('up')}` again.",
            )
        return self._wait(already=True, compared=same is not None, since=server.restarts)

    def _same_configuration(self) -> bool | None:
        """Compose's own judgement, without its deed; None where this compose has none."""
        argv = self._project.compose("--dry-run", "up", "--detach", "--no-deps", self._project.server)
        answer = self._outside.run(argv, min(60.0, max(1.0, self._timeout_s)))
        if isinstance(answer, Unknown) or answer.code:
            return None
        verdicts = re.findall(r"Container\s+\S+\s+(\w+)", f"{answer.stdout}\n{answer.stderr}")
        if any(word.startswith("Recreate") for word in verdicts):
            return False
        return True if "Running" in verdicts else None

    def _compose_up(self) -> None:
        limit = min(_COMPOSE_TIMEOUT_S, max(1.0, self._timeout_s))
        answer = self._outside.run(self._project.compose("up", "--detach"), limit)
        if isinstance(answer, Unknown):
            if is_engine_fault(answer.reason):
                raise engine_error(self._project.engine, answer.reason)
            raise ServerError("compose did not come back", why=answer.reason, fix=self._follow())
        if answer.code:
            self._compose_failed(said(answer), f"{answer.stdout}\n{answer.stderr}")

    def _compose_failed(self, last: str, text: str) -> NoReturn:
        missing = _REQUIRED.search(text)
        if missing:
            raise SettingsError(
                f"{missing['name']} has no value",
                why="compose cannot start without it",
                fix=plain(missing["text"]).strip(),
            )
        containers = list_containers(self._outside, self._project)
        check = check_of(containers, self._project.server)
        if check is not None and check.exit_code:
            raise self._failure("the check before the start failed, and nothing was started", check)
        if _NO_IMAGE.search(text):
            host = "" if self._project.cards is None else " HOST=ascend"
            raise ServerError(
                "the image is not on this machine", why=last, fix=f"Build it: make build{host}. Nothing is ever pulled."
            )
        server = server_of(containers)
        if server is not None and server.error:
            raise ServerError(f"{server.name} could not be started", why=server.error, fix=self._preflight_again())
        if is_engine_fault(last):
            raise engine_error(self._project.engine, last)
        raise ServerError("compose could not start it", why=last, fix=self._preflight_again())

    def _wait(self, *, already: bool, compared: bool, since: int = 0) -> Up:
        """Look until the server is ready.

        Args:
            since: restarts of the container that are not of this start.
        """
        while True:
            server = self._server()
            seconds = self._seconds()
            self._require_alive(server, since)
            url = server.url or url_of(self._outside, self._project)
            with self._outside.http(url, self._key) as http:
                answers = ask_server(http)
                if answers.well and self._proved(http, answers):
                    return Up(url, seconds, already, compared, dict(answers.info))
            left = max(1.0, self._timeout_s - self._seconds())
            log = read_log(self._outside, self._project, server, timeout_s=left)
            phase, detail = start_phase(log)
            self._say(phase, detail)
            if self._seconds() > self._timeout_s:
                at = f"{phase}, {detail}" if detail else phase
                at += f"; {answers.no_info}" if answers.no_info else ""
                raise ServerError(
                    f"the server was not ready after {self._timeout_s:.0f} s",
                    why=f"it is still at: {at}",
                    fix=f"It was left running. {self._follow()} Allow more with --timeout.",
                )
            self._outside.sleep(LOOK_S)

    def _proved(self, http: httpx.Client, answers: Answers) -> bool:
        """Whether it can be told that this plugin serves.

        Raises:
            HostError: it does not.
        """
        # Who has no key cannot look inside; the server's own start has proved the plugin then.
        if answers.wants_key:
            return True
        # Any other status is a moment's trouble: it is asked again.
        if answers.info_status not in (200, 404):
            return False
        try:
            prove_active(http)
        except httpx.RequestError:
            return False
        except H3Error as exc:
            what, why, fix = (tidy_text(text, self._key or "") for text in (exc.what, exc.why, exc.fix))
            raise type(exc)(what, why=why, fix=fix) from exc
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as exc:
            raise HostError(
                "what answers is no server of this project",
                why=answers.no_info or "its answer to GET /v1/h3/info is not understood",
                fix=f"See what listens at {http.base_url}: `{self._call('status')}`.",
            ) from exc
        return True

    def _require_alive(self, server: Container, since: int) -> None:
        """
        Raises:
            H3Error: it ended, ends again and again, is paused or unhealthy.
        """
        if server.status == "paused":
            raise ServerError(
                f"{server.name} is paused",
                why="somebody has stopped its processes for a while, and it answers nothing",
                fix=f"`{self._project.engine} unpause {server.name}`, then `{self._call('up')}`.",
                container=server.name,
            )
        if server.health == "unhealthy":
            raise ServerError(
                f"{server.name} is unhealthy",
                why=" ".join(server.health_said.split()) or "its health check fails and says nothing",
                fix=f"The engine does not restart it by itself: `{self._call('down', '--now')}`, then "
                f"`{self._call('up')}`. `{self._call('logs')}` has its log.",
                container=server.name,
            )
        if server.status in ("exited", "dead"):
            raise self._failure("the server ended while it started", server)
        if server.restarts > since or server.status == "restarting":
            # The engine would try again, and read the whole checkpoint each time, only to end at the same place.
            self._outside.run(self._project.compose("stop", self._project.server), 120)
            raise self._failure("the server ended while it started; its restarts were stopped", server)

    def _server(self) -> Container:
        server = server_of(list_containers(self._outside, self._project))
        if server is None:
            raise ServerError(
                "the server's container is gone",
                why="somebody removed it while it started",
                fix=f"Start it again: `{self._call('up')}`.",
            )
        return server

    def _failure(self, what: str, container: Container) -> H3Error:
        # One that was started again by itself has said why before its last start.
        log = read_log(self._outside, self._project, container, whole=container.restarts > 0)
        return failure(what, container, log, flags=self._project.flags)

    def _seconds(self) -> float:
        return self._outside.monotonic() - self._started

    def _say(self, phase: str, detail: str = "") -> None:
        self._on_look(Look(self._seconds(), phase, detail))

    def _call(self, verb: str, *words: str) -> str:
        return call(verb, *words, self._project.flags)

    def _follow(self) -> str:
        follow = f"`{self._call('up')}` or `{self._call('logs', '-f')}`"
        return f"Follow it: {follow}; stop it: `{self._call('down')}`."

    def _preflight_again(self) -> str:
        return f"`{call('preflight')}` looks at the machine; `{self._call('logs')}` has its log."
