# SPDX-License-Identifier: Apache-2.0
"""A server process and its life: start, wait for ready, prove that the plugin is active, stop without leftovers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import httpx

from vllm_h3_plugin import __version__
from vllm_h3_plugin.errors import HostError, ServerError
from vllm_h3_plugin.serving.answers import ask, mapping
from vllm_h3_plugin.serving.client import authorization
from vllm_h3_plugin.serving.command import ServerCommand
from vllm_h3_plugin.serving.limits import Deadline
from vllm_h3_plugin.serving.log_cause import COLOUR, most_telling_line

PIPELINE = "vllm_h3_plugin.host.pipeline.MiniMaxH3Pipeline"
_PR_SET_PDEATHSIG = 1
_PROOF_S = 60.0
"""How long the whole answer of ``/v1/h3/info`` may take."""


def check_port_free(address: str, port: int) -> None:
    """Refuse an occupied port before anything is loaded.

    Raises:
        ServerError: something listens there, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as exc:
            raise ServerError(
                f"cannot listen on {address}:{port}",
                why=exc.strerror or str(exc),
                fix="Stop what uses the port (`ss -ltnp`), or choose another with --port.",
                port=port,
            ) from exc


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """One ``vllm serve`` process with everything that it starts.

    As a context manager it is stopped on the way out, whatever happened. The child dies with this process too.
    """

    def __init__(self, command: ServerCommand, *, log: IO[str] | Path | None = None) -> None:
        """
        Args:
            command: from :func:`server_command`.
            log: where the server's output goes: a path, an open text stream, or None for this process's stderr.
        """
        self.command = command
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._tail: deque[str] = deque(maxlen=400)
        self._reader: threading.Thread | None = None
        self.ready_s: float | None = None

    def start(self, environ: Mapping[str, str] | None = None) -> None:
        """Start the process; its output is relayed line by line."""
        parent = os.getpid()
        self._process = subprocess.Popen(
            self.command.argv,
            env={**(os.environ if environ is None else environ), **self.command.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: _die_with(parent),
        )
        self._reader = threading.Thread(target=self._relay, name="server-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._running().pid

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process

    def _relay(self) -> None:
        stream = self._running().stdout
        assert stream is not None
        opened = self._log.open("w", encoding="utf-8") if isinstance(self._log, Path) else None
        target = opened or self._log
        try:
            for line in stream:
                self._tail.append(COLOUR.sub("", line.rstrip("\n")))
                if target is None:
                    os.write(2, line.encode())
                else:
                    target.write(line)  # type: ignore[union-attr]  # a Path was opened above
                    target.flush()  # type: ignore[union-attr]
        finally:
            if opened:
                opened.close()

    def wait_ready(self, timeout_s: float, on_wait: Callable[[float, str], None] | None = None) -> dict[str, Any]:
        """Block until the server answers and the plugin is proved active in it.

        Args:
            timeout_s: how long to wait.
            on_wait: called about twice a second with the seconds waited and the last line of the log.

        Returns:
            The server's ``/v1/h3/info``.

        Raises:
            ServerError: the process ended or did not become ready in time; carries the cause from its log.
            HostError: the server runs without this plugin, or with another version of it.
        """
        started = time.monotonic()
        headers = authorization(self.command.api_key)
        with httpx.Client(base_url=self.command.url, timeout=5, headers=headers) as http:
            while True:
                waited = time.monotonic() - started
                code = self._running().poll()
                if code is not None:
                    raise self._ended(code)
                if _answers(http):
                    self.ready_s = waited
                    return prove_active(http)
                if waited > timeout_s:
                    raise ServerError(
                        f"the server was not ready after {timeout_s:.0f} s",
                        why=self._cause(),
                        fix="See its log; raise ready_timeout_s in the profile if it was still loading.",
                    )
                if on_wait:
                    on_wait(waited, self._tail[-1] if self._tail else "")
                time.sleep(0.5)

    def _ended(self, code: int) -> ServerError:
        if self._reader is not None:
            self._reader.join(timeout=5)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        fix = "See its log above the last error." if code >= 0 else "Look for the kernel's reason: `dmesg | tail`."
        return ServerError(f"the server {how} before it was ready", why=self._cause(), fix=fix, exit_code_seen=code)

    def _cause(self) -> str:
        return most_telling_line(tuple(self._tail))

    def poll(self) -> int | None:
        """Exit code; None while the process runs."""
        return self._running().poll()

    def wait(self) -> int:
        """Wait for the process to end; returns its exit code (negative: the signal that ended it)."""
        code = self._running().wait()
        if self._reader is not None:
            self._reader.join(timeout=5)
        return code

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it started; a process that is gone is no error."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def stop(self, grace_s: float = 20) -> None:
        """Ask the process group to end, insist after ``grace_s``, and return when it is gone."""
        if self._process is None:
            return
        if self._process.poll() is None:
            # The server alone: workers that are told at the same time leave it waiting for their answers.
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        # Workers are in the same session; none may outlive the server.
        self.signal(signal.SIGKILL)
        self._process.wait()
        if self._reader is not None:
            self._reader.join(timeout=5)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def prove_active(http: httpx.Client) -> dict[str, Any]:
    """Ask a running server whether this plugin is active in it.

    The host carries on without a plugin that failed to load, so "it answers" is not enough.

    Raises:
        HostError: no such route, another version, or a pipeline that is not the plugin's.
    """
    answer = ask(http, Deadline(_PROOF_S), "GET", "/v1/h3/info")
    if answer.status != 200:
        raise HostError(
            "the server answers, but vllm-h3-plugin is not active in it",
            why=f"GET /v1/h3/info gave {answer.status}",
            fix="Start it with `vllm-h3 serve`; run `vllm-h3 doctor` in the same environment.",
        )
    info = answer.json() or {}
    told = info.get("workers")
    workers = [mapping(worker) for worker in told] if isinstance(told, list) else []
    foreign = [worker.get("pipeline") for worker in workers if worker.get("pipeline") != PIPELINE]
    if info.get("plugin") != __version__ or not workers or foreign:
        raise HostError(
            "the server runs H3 without this plugin",
            why=f"plugin {info.get('plugin')} (this is {__version__}), pipelines {foreign or 'none reported'}",
            fix="Stop the other server; run `vllm-h3 doctor` in the environment that serves.",
            info=info,
        )
    return info


def _answers(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def _die_with(parent: int) -> None:
    """In the child: be sent SIGTERM when the parent dies, however it dies (Linux prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
