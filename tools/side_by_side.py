# SPDX-License-Identifier: Apache-2.0
"""Commands that run at once: their lines come out under their names, and none outlives this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

GRACE_S = 60
"""What an interrupted command gets to end by itself: pytest tears its fixtures down and writes its report."""

_PR_SET_PDEATHSIG = 1
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    exit_code: int
    """Negative: the signal that ended it."""
    seconds: float


class _Command:
    """One running command: a session of its own, its output relayed line by line and kept whole in a file."""

    def __init__(self, name: str, argv: Sequence[str], folder: Path, log: Path, out: TextIO, turn: threading.Lock):
        parent = os.getpid()
        self._label = name
        self._out, self._turn = out, turn
        self._log = log.open("w", encoding="utf-8")
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            argv,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: _child_of(parent),
        )
        self._reader = threading.Thread(target=self._relay, name=f"output-{name}", daemon=True)
        self._reader.start()

    def _relay(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._log.write(_COLOUR.sub("", line))
            self._log.flush()
            with self._turn:
                self._out.write(f"{self._label:7}| {line}" if line.endswith("\n") else f"{self._label:7}| {line}\n")
                self._out.flush()

    def ended(self) -> Ended | None:
        """None while it runs. Once it has ended, what it left in its process group is ended too."""
        # Its group is ended before its id is given back, after which the number could be another's.
        if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        seconds = time.monotonic() - self._started
        self.signal(signal.SIGKILL)
        code = self._process.wait()
        self._reader.join(timeout=10)
        self._log.close()
        return Ended(code, seconds)

    def signal(self, number: int) -> None:
        """Send a signal to the command and to what it started in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _child_of(parent: int) -> None:
    """In the child: die with this process, however it dies; end on SIGINT even where the shell had it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """``kill`` and a closed terminal end a run as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_side_by_side(
    commands: Mapping[str, Sequence[str]],
    folder: Path,
    logs: Path,
    out: TextIO | None = None,
    *,
    grace_s: float = GRACE_S,
) -> tuple[dict[str, Ended], bool]:
    """Run all commands at once, each to its end, whatever the others do. Call it from the main thread.

    Ctrl-C, SIGTERM or SIGHUP interrupts all of them (SIGINT); after ``grace_s`` or a second Ctrl-C they are killed.

    Args:
        commands: name -> argument list.
        folder: where they run.
        logs: folder for ``NAME.log``, the whole output of each.
        out: where the lines of all go, each behind the name of its command; None: stdout.
        grace_s: seconds.

    Returns:
        How each ended, in the order of ``commands``, and whether the run was interrupted.
    """
    logs.mkdir(parents=True, exist_ok=True)
    turn = threading.Lock()
    running: dict[str, _Command] = {}
    ended: dict[str, Ended] = {}

    def wait(deadline: float = float("inf")) -> None:
        while len(ended) < len(running) and time.monotonic() < deadline:
            for name in running.keys() - ended.keys():
                if (end := running[name].ended()) is not None:
                    ended[name] = end
            time.sleep(0.1)

    interrupted = False
    with _terminated_like_interrupted():
        try:
            for name, argv in commands.items():
                running[name] = _Command(name, argv, folder, logs / f"{name}.log", out or sys.stdout, turn)
            wait()
        except KeyboardInterrupt:
            interrupted = True
            try:
                _signal(running, ended, signal.SIGINT)
                wait(time.monotonic() + grace_s)
            except KeyboardInterrupt:
                pass  # the second one: no more patience
        finally:
            _signal(running, ended, signal.SIGKILL)
            wait()
    return {name: ended[name] for name in running}, interrupted


def _signal(running: Mapping[str, _Command], ended: Mapping[str, Ended], number: int) -> None:
    for name, command in running.items():
        if name not in ended:
            command.signal(number)
