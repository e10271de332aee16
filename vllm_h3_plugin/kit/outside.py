# SPDX-License-Identifier: Apache-2.0
"""All that this room knows of and does to the world: commands, HTTP, memory of processes, time."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import httpx

from vllm_h3_plugin.errors import ToolMissingError
from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.preflight.machine import LocalMachine, Machine, Ran
from vllm_h3_plugin.serving.client import authorization

HTTP_TIMEOUT_S = 10.0


class Outside(Protocol):
    """The world as this room may touch it."""

    @property
    def machine(self) -> Machine:
        """Files, variables, memory and devices of this machine."""

    def run(self, argv: Sequence[str], timeout_s: float = 30.0) -> Ran | Unknown:
        """Run a command to its end."""

    def lines(self, argv: Sequence[str]) -> Iterator[str]:
        """Lines of a command's output and messages, as they come."""

    def http(self, url: str, key: str | None) -> httpx.Client:
        """A client of the server at ``url``."""

    def held_bytes(self, pid: int) -> int | None:
        """Main memory that nobody else could have while this process lives; None if there is no such process."""

    def now(self) -> float:
        """Seconds since 1970."""

    def monotonic(self) -> float:
        """Seconds since some moment."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""


class LocalOutside:
    """This machine and what can be reached from it."""

    def __init__(self) -> None:
        self._machine = LocalMachine()

    @property
    def machine(self) -> Machine:
        """This machine."""
        return self._machine

    def run(self, argv: Sequence[str], timeout_s: float = 30.0) -> Ran | Unknown:
        """Run a command with its messages in English and without a terminal to ask on."""
        return self._machine.run(argv, timeout_s)

    def lines(self, argv: Sequence[str]) -> Iterator[str]:
        """Lines as they come; the command ends with the iterator.

        Raises:
            ToolMissingError: the program cannot be run.
        """
        with _started(argv) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield line.rstrip("\n")

    def http(self, url: str, key: str | None) -> httpx.Client:
        """A client that goes to the server directly: a proxy of this machine's has no part in it."""
        return httpx.Client(base_url=url, timeout=HTTP_TIMEOUT_S, headers=authorization(key), trust_env=False)

    def held_bytes(self, pid: int) -> int | None:
        """RssAnon of /proc/PID/status: pages of files count as available already, shared ones would count twice."""
        try:
            text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        if re.search(r"^State:\s+[ZX]", text, re.MULTILINE):
            return None
        kib = re.findall(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE)
        return 1024 * sum(map(int, kib))

    def now(self) -> float:
        """The system clock."""
        return time.time()

    def monotonic(self) -> float:
        """A clock that nobody sets."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


@contextmanager
def _started(argv: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError as exc:
        raise ToolMissingError(
            f"{argv[0]} cannot be run", why=exc.strerror or str(exc), fix="Install it, or name another with --engine."
        ) from exc
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()
