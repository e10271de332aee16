# SPDX-License-Identifier: Apache-2.0
"""Servers forked from one process that has imported the host.

Importing vLLM and vLLM-Omni costs 35 s of a core, and all else that a tiny server does until it is ready costs 6 s. So
the host is imported once a run, in the fork server of ``multiprocessing``; from ``python -m MODULE`` on everything is
what it is in production. The servers of test_command_line.py, and every worker process, import the host by themselves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from typing import TextIO, cast

from vllm_h3_plugin.serving.server import Server

_context = get_context("forkserver")
_context.set_forkserver_preload(["tests.server.imported_host"])


def start_import() -> None:
    """Start the fork server, which imports the host beside whatever runs next, in the environment of this moment."""
    forkserver.ensure_running()


def _enter(argv: Sequence[str], environment: Mapping[str, str], output: Connection) -> None:
    """In the child. The fork server passes over a module that it cannot import; this does not."""
    from tests.server.imported_host import run

    run(argv, environment, output)


class ForkedProcess:
    """The part of ``subprocess.Popen`` that :class:`Server` uses."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        theirs, ours = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_enter, args=(argv, dict(environment), ours))
        self._process.start()
        ours.close()
        self.stdout: TextIO = os.fdopen(os.dup(theirs.fileno()), encoding="utf-8", errors="replace")
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Exit code, once it has ended."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked server", timeout or 0)
        return code

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class ForkedServer(Server):
    """A :class:`Server` whose process starts with the host imported."""

    def start(self, environ: Mapping[str, str] | None = None) -> None:
        """Fork the process; its output is relayed line by line."""
        environment = {**(os.environ if environ is None else environ), **self.command.environment}
        self._process = cast("subprocess.Popen[str]", ForkedProcess(self.command.argv, environment))
        self._reader = threading.Thread(target=self._relay, name="server-log", daemon=True)
        self._reader.start()
