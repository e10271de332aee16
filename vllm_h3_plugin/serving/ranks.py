# SPDX-License-Identifier: Apache-2.0
"""A server with a process a card: what to do when one of them ends.

The host answers the request that was running with 500 and ``/health`` with 503, and then stays, without being able to
serve anything (0.28.0 and 0.30.0, tried). Whoever supervises it would wait for ever, so the server is ended here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import psutil

from vllm_h3_plugin.errors import ServerError

GRACE_S = 30.0
"""Time that the host gets to answer the request that was running; it took 16 s when a rank was killed in a step."""

_POLL_S = 0.5


class Running(Protocol):
    """The part of :class:`vllm_h3_plugin.serving.server.Server` that is used."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Exit code; None while it runs."""

    def wait(self) -> int:
        """Exit code, once it has ended."""


def wait_with_ranks(
    server: Running,
    workers: Sequence[Mapping[str, Any]],
    *,
    grace_s: float = GRACE_S,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Wait for the server to end; returns its exit code.

    Args:
        workers: of ``/v1/h3/info``, with ``rank`` and ``pid``. A worker in the server's own process is not watched, nor
            is one with a ``node``: it may be on another machine, and its executor watches it.
        grace_s: how long the server may go on without one of its ranks.
        say: gets a sentence when a rank has ended.

    Raises:
        ServerError: a rank ended and the server did not within ``grace_s``. The caller stops the server.
    """
    ranks = {
        int(worker["rank"]): _Rank(worker["pid"])
        for worker in workers
        if worker["pid"] != server.pid and worker.get("node") is None
    }
    while server.poll() is None:
        gone = [rank for rank, process in ranks.items() if not process.alive()]
        if gone:
            name = ", ".join(f"{rank} (pid {ranks[rank].pid})" for rank in gone)
            say(f"rank {name} has ended; the server is stopped in {grace_s:.0f} s at the latest")
            _until(lambda: server.poll() is not None, grace_s)
            if server.poll() is not None:
                break
            raise ServerError(
                f"rank {name} ended while the server was running",
                why="the other ranks cannot go on without it: requests fail and /health answers 503",
                fix="See the log above, and `dmesg | tail` for the kernel's reason; then start the server again.",
                ranks=gone,
            )
        time.sleep(_POLL_S)
    return server.wait()


class _Rank:
    """A worker process, told apart from a later one of the same id."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = psutil.Process(pid) if psutil.pid_exists(pid) else None

    def alive(self) -> bool:
        try:
            process = self._process
            return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def _until(reached: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not reached() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
