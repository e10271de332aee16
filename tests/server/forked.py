# SPDX-License-Identifier: Apache-2.0
"""Servers forked from one process that has imported the host.

Importing vLLM and vLLM-Omni costs 35 s of a core, and all else that a tiny server does until it is ready costs 6 s. So
the host is imported once a run, in the fork server of ``multiprocessing``; from ``python -m MODULE`` on everything is
what it is in production. The servers of test_command_line.py, and every worker process, import the host by themselves.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, get_context, parent_process
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
    from tests.server.imported_host import require_no_plugin

    require_no_plugin()
    run(argv, environment, output)


def run(argv: Sequence[str], environment: Mapping[str, str], output: Connection) -> None:
    """In the child: become ``python -m MODULE ARGUMENTS`` in a session of its own.

    Args:
        argv: interpreter, ``-m``, module, arguments.
        environment: all variables of the process.
        output: takes stdout and stderr.
    """
    os.setsid()
    # Every child of a fork server keeps it alive, so that its end cannot tell them that the tests are gone.
    threading.Thread(target=_end_with_the_tests, name="end-with-the-tests", daemon=True).start()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    os.environ.clear()
    os.environ.update(environment)
    _, _, module, *arguments = argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with_the_tests() -> None:
    tests = parent_process()
    assert tests is not None
    tests.join()
    os.kill(os.getpid(), signal.SIGTERM)


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
