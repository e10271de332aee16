# SPDX-License-Identifier: Apache-2.0
"""A world made of answers: an engine with containers, a server that answers HTTP, a clock, and what happens when."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

from tests.unit.preflight.preflight_machine import GIB, MadeMachine
from vllm_h3_plugin import __version__
from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.preflight.machine import Ran
from vllm_h3_plugin.serving.client import authorization
from vllm_h3_plugin.serving.server import PIPELINE

ROOT = Path(__file__).resolve().parents[2]
NOW = 1_796_126_400.0
URL = "http://127.0.0.1:8000"
IDLE = {"phase": "idle", "step": 0, "steps": None, "time": NOW}
LOADING = (
    "\x1b[0;36m(Worker pid=7)\x1b[0;0m INFO 12-01 12:00:00 [progress.py:90] "
    "loading transformer: 12.30 of 45.00 GiB, 1.20 GiB/s, 27 s left"
)


@dataclass
class Box:
    """One container."""

    service: str = "server"
    status: str = "running"
    exit_code: int = 0
    error: str = ""
    oom: bool = False
    restarts: int = 0
    health: str = "starting"
    said: str = ""
    log: list[str] = field(default_factory=list)
    project: str = "vllm-h3"
    files: str = ""
    host_port: Any = "8000"

    def inspect(self, checkout: Path) -> dict[str, Any]:
        """As the engine describes it."""
        return {
            "Id": f"id-{self.service}",
            "Name": f"/{self.project}-{self.service}-1",
            "Image": "sha256:abc",
            "RestartCount": self.restarts,
            "State": {
                "Status": self.status,
                "ExitCode": self.exit_code,
                "Error": self.error,
                "OOMKilled": self.oom,
                "StartedAt": "2026-12-01T11:00:00.123456789Z" if self.status != "created" else "0001-01-01T00:00:00Z",
                "Health": {"Status": self.health, "Log": [{"Output": self.said}] if self.said else []},
            },
            "Config": {
                "Image": "vllm-h3-plugin:nvidia",
                "Labels": {
                    "com.docker.compose.project": self.project,
                    "com.docker.compose.service": self.service,
                    "com.docker.compose.project.config_files": self.files or str(checkout / "compose.yaml"),
                },
            },
            "NetworkSettings": {"Ports": {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": self.host_port}]}},
        }


@dataclass
class Served:
    """What the server answers; ``health`` None: nothing listens; ``fails``: path -> what comes instead."""

    health: int | None = None
    info_status: int = 200
    fails: dict[str, httpx.Response | Exception] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=lambda: dict(IDLE))
    jobs: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    more_jobs: bool = False
    mute: bool = False
    version: str = __version__

    def answer(self, request: httpx.Request) -> httpx.Response:
        """One request."""
        if self.mute:
            raise httpx.ReadTimeout("", request=request)
        if self.health is None:
            raise httpx.ConnectError("Connection refused", request=request)
        instead = self.fails.get(request.url.path)
        if isinstance(instead, Exception):
            raise instead
        if instead is not None:
            return instead
        if request.url.path == "/health":
            return httpx.Response(self.health)
        if request.url.path == "/v1/videos":
            newest_first = self.jobs[::-1] if request.url.params.get("order") == "desc" else self.jobs
            return httpx.Response(200, json={"data": newest_first, "has_more": self.more_jobs})
        return httpx.Response(self.info_status, json=self.info())

    def info(self) -> dict[str, Any]:
        """``/v1/h3/info``."""
        memory = {"device": "cuda:0", "resident_bytes": 55 * GIB, "peak_bytes": 60 * GIB}
        return {
            "plugin": self.version,
            "host": {"vllm": "0.30.0", "vllm-omni": "0.30.0", "torch": "2.11.0"},
            "workers": [{"pipeline": PIPELINE, "recipe": "fp8", "backend": "cutlass", "memory": memory}],
            "progress": self.progress,
            "requests": {"in_flight": self.in_flight},
            "queue": {"length": 0, "max": 16, "running": None},
            "server": {"started_at": NOW - 7980, "uptime_s": 7980.0},
            "guard": {"active": True, "available_bytes": 31 * GIB, "floor_bytes": 6 * GIB},
            "provenance": {"image": {"revision": "3eb87f7", "base": "name@sha256:1"}},
        }


class MadeOutside:
    """The world. Time passes only in ``sleep``; events are done when their second has come."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        self.boxes: list[Box] = []
        self.server = Served()
        self.machine = MadeMachine()
        self.machine.environ = {"H3_ACCEPT_LICENSE": "yes"}
        self.processes: dict[int, int] = {}
        self.asked: list[tuple[str, ...]] = []
        self.refuses: dict[str, Ran | Unknown] = {}
        self.on_up: Callable[[], Ran] = self._up
        self.on_down: Callable[[], Ran] = self._down
        self.dry_run = Ran(0, "", " DRY-RUN MODE -  Container vllm-h3-server-1  Running\n")
        self.top = "  PID\n"
        self.keys: list[str | None] = []
        self._time = 0.0
        self._events: list[tuple[float, Callable[[], None]]] = []

    def at(self, second: float, event: Callable[[], None]) -> None:
        """Let something happen at a second."""
        self._events.append((second, event))

    @property
    def words(self) -> list[str]:
        """Compose verbs that were really run, in order."""
        found = []
        for argv in self.asked:
            if argv[1] == "compose" and "--dry-run" not in argv:
                found.append(next(word for word in argv if word in ("up", "down", "stop", "version")))
        return found

    def run(self, argv: Sequence[str], timeout_s: float = 30.0) -> Ran | Unknown:
        words = tuple(argv)
        self.asked.append(words)
        line = " ".join(words)
        for part, answer in self.refuses.items():
            if part in line:
                return answer
        if words[1] == "ps":
            project = words[-1].rpartition("=")[2]
            return Ran(0, "".join(f"id-{box.service}\n" for box in self.boxes if box.project == project))
        if words[1] == "inspect":
            return Ran(
                0, json.dumps([box.inspect(self.checkout) for box in self.boxes if f"id-{box.service}" in words])
            )
        if words[1] == "top":
            return Ran(0, self.top)
        if "--dry-run" in words:
            return self.dry_run
        if "up" in words:
            return self.on_up()
        if "stop" in words:
            for box in self.boxes:
                box.status, box.health = "exited", ""
            return Ran(0, "")
        if "down" in words:
            return self.on_down()
        raise AssertionError(f"nobody said what `{line}` answers")

    def lines(self, argv: Sequence[str], timeout_s: float | None = None) -> Iterator[str]:
        words = tuple(argv)
        self.asked.append(words)
        assert words[1] == "logs", words
        yield from next(box.log for box in self.boxes if f"id-{box.service}" == words[-1])

    def http(self, url: str, key: str | None) -> httpx.Client:
        self.keys.append(key)
        transport = httpx.MockTransport(self.server.answer)
        return httpx.Client(base_url=url, transport=transport, headers=authorization(key))

    def held_bytes(self, pid: int) -> int | None:
        return self.processes.get(pid)

    def now(self) -> float:
        return NOW + self._time

    def monotonic(self) -> float:
        return self._time

    def sleep(self, seconds: float) -> None:
        self._time += seconds
        for event in [one for one in self._events if one[0] <= self._time]:
            self._events.remove(event)
            event[1]()

    def setenv(self, name: str, value: str) -> None:
        """Let the caller have set a variable."""
        self.machine.environ = {**self.machine.environ, name: value}

    def available(self, gib: float) -> None:
        """Let MemAvailable be this much."""
        self.machine.main_memory = replace(self.machine.main_memory, available_bytes=int(gib * GIB))

    def ready(self) -> None:
        """Let the server answer."""
        self.server.health = 200
        for box in self.boxes:
            box.health = "healthy"

    def _up(self) -> Ran:
        self.boxes = [Box("check", "exited", health=""), Box()]
        return Ran(0, "", " Container vllm-h3-server-1  Started\n")

    def _down(self) -> Ran:
        self.boxes = []
        self.server.health = None
        return Ran(0, "")


@dataclass(frozen=True)
class Ended:
    """One run of a verb."""

    code: int
    out: str
    err: str

    @property
    def answer(self) -> dict[str, Any]:
        """The JSON line."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found


def job(name: str = "video_gen_1", **more: Any) -> dict[str, Any]:
    """A job that has not ended."""
    return {"id": name, "status": "in_progress", "created_at": int(NOW) - 60, "size": "768x448", **more}


def denoising(step: int = 7, *, seconds_ago: float = 1.0, each: float | None = 8.0) -> dict[str, Any]:
    """A request in its steps."""
    return {
        "phase": "denoising",
        "step": step,
        "steps": 50,
        "time": NOW - seconds_ago,
        "started_at": NOW - 60,
        "busy_since": NOW - 70,
        "seconds_per_step": each,
    }


def run_verb(verb: str, *args: str, capsys: Any, made: bool = False) -> Ended:
    """Run a verb as a person would, by its name, wherever the tests were started from.

    Args:
        made: by make.
    """
    from vllm_h3_plugin.cli.main import main

    code: Any = 0
    with suppress(SystemExit), mock.patch.dict(os.environ):
        os.environ.pop("MAKELEVEL", None)
        os.environ.update({"MAKELEVEL": "1"} if made else {})
        try:
            main([verb, *args])
        except SystemExit as ended:
            code = ended.code
            raise
    seen = capsys.readouterr()
    return Ended(code if isinstance(code, int) else 0, seen.out, seen.err)
