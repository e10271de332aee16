# SPDX-License-Identifier: Apache-2.0
"""All that this room knows of and does to the world: commands, HTTP, memory of processes, time."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import httpx

from vllm_h3_plugin.errors import ToolMissingError, UsageError
from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.preflight.machine import LocalMachine, Machine, Ran
from vllm_h3_plugin.serving.client import authorization

HTTP_TIMEOUT_S = 10.0
GRACE_S = 1.0
"""What a command gets to end by itself before it is killed."""

_LINE_BYTES = 1 << 20
"""A longer line is handed on in pieces."""


class Outside(Protocol):
    """The world as this room may touch it."""

    @property
    def machine(self) -> Machine:
        """Files, variables, memory and devices of this machine."""

    def run(self, argv: Sequence[str], timeout_s: float = 30.0) -> Ran | Unknown:
        """Run a command to its end."""

    def lines(self, argv: Sequence[str], timeout_s: float | None = None) -> Iterator[str]:
        """Lines of a command's output and messages, as they come; ends after ``timeout_s`` even where it does not."""

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
        # Not LocalMachine's: `docker compose` is a child of `docker` that holds its output and would be waited for.
        try:
            with _started(argv, subprocess.PIPE) as process:
                try:
                    stdout, stderr = process.communicate(timeout=timeout_s)
                except subprocess.TimeoutExpired:
                    return Unknown(f"`{' '.join(argv)}` gave no answer in {timeout_s:g} s")
        except FileNotFoundError:
            return Unknown(f"{argv[0]} is not installed, or not on PATH")
        except OSError as exc:
            return Unknown(f"{argv[0]} cannot be run: {exc.strerror or exc}")
        return Ran(process.returncode, stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace"))

    def lines(self, argv: Sequence[str], timeout_s: float | None = None) -> Iterator[str]:
        """Lines as they come; the command ends with the iterator.

        Raises:
            ToolMissingError: the program cannot be run.
        """
        try:
            with _started(argv, subprocess.STDOUT) as process:
                yield from _lines(process, timeout_s)
        except OSError as exc:
            raise ToolMissingError(
                f"{argv[0]} cannot be run",
                why=exc.strerror or str(exc),
                fix="Install it, or name another with --engine.",
            ) from exc

    def http(self, url: str, key: str | None) -> httpx.Client:
        """A client that goes to the server directly: a proxy of this machine's has no part in it."""
        try:
            return httpx.Client(base_url=url, timeout=HTTP_TIMEOUT_S, headers=authorization(key), trust_env=False)
        except httpx.InvalidURL as exc:
            raise UsageError(f"{url} is no address", why=str(exc), fix="Write http://HOST:PORT.") from exc

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
def _started(argv: Sequence[str], stderr: int) -> Iterator[subprocess.Popen[bytes]]:
    """A command and all that it starts, in a session of its own: what is left of it ends with the block."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "LC_ALL": "C"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        # Not poll(): a command that has ended can leave children behind, and not reaped it keeps their group's number.
        if process.returncode is None:
            _end(process)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # Also where Ctrl-C comes a second time, and for children that outlive the command.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _lines(process: subprocess.Popen[bytes], timeout_s: float | None) -> Iterator[str]:
    """Lines until the output ends, or the time."""
    assert process.stdout is not None
    ends = None if timeout_s is None else time.monotonic() + timeout_s
    rest = b""
    while True:
        left = None if ends is None else ends - time.monotonic()
        if left is not None and (left <= 0 or not select.select([process.stdout], [], [], left)[0]):
            break
        block = os.read(process.stdout.fileno(), 1 << 16)
        if not block:
            break
        *whole, rest = (rest + block).split(b"\n")
        if len(rest) > _LINE_BYTES:
            whole, rest = [*whole, rest], b""
        for line in whole:
            yield line.decode("utf-8", "replace")
    if rest:
        yield rest.decode("utf-8", "replace")
