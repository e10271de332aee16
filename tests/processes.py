# SPDX-License-Identifier: Apache-2.0
"""Whether processes that were ended are gone. It takes a moment, and on a busy machine a long one."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

_HANGS_S = 180


def lives(pid: int) -> bool:
    """Whether a process has this id and runs; it may end while it is asked. One that nobody has waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(pids: Iterable[int]) -> None:
    """No process with these ids runs, or will not in a moment."""
    pids, deadline = list(pids), time.monotonic() + _HANGS_S
    while alive := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < deadline, f"they still run: {alive}"
        time.sleep(0.05)
