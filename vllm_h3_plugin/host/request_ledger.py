# SPDX-License-Identifier: Apache-2.0
"""Where the time and memory of one request went, as its worker saw it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_h3_plugin.host import run_state

LEDGER = "ledger.json"
"""In ``H3_RUN_DIR``: that of the last request."""


class RequestLedger:
    """Seconds by phase and by denoise step; bytes swapped out and read meanwhile."""

    def __init__(
        self, request: str, clock: Callable[[], float] = time.time, timer: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            clock: seconds since 1970.
            timer: what lengths are measured with.
        """
        self._timer = timer
        self.request = request
        self.tokens: int | None = None
        self._clock = clock
        self._phases: dict[str, float] = {}
        self._steps: list[float] = []
        self._phase: str | None = None
        self._since = timer()
        self._read = _read_bytes()

    def phase(self, name: str | None) -> None:
        """Enter a phase; None: the last one is over."""
        now = self._timer()
        if self._phase is not None:
            self._phases[self._phase] = self._phases.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = name, now

    def step(self, seconds: float) -> None:
        """A denoise step took this long."""
        self._steps.append(seconds)

    def write(self, **more: Any) -> None:
        """Leave it for the API process."""
        self.phase(None)
        run_state.write(
            LEDGER,
            {
                "request": self.request,
                "phases": {name: round(seconds, 4) for name, seconds in self._phases.items()},
                "steps_s": [round(seconds, 4) for seconds in self._steps],
                "tokens": self.tokens,
                "swap_bytes": _swapped_bytes(),
                "read_bytes": max(0, _read_bytes() - self._read),
                "ended_at": self._clock(),
                **more,
            },
        )


def _swapped_bytes() -> int | None:
    """Bytes of this process that lie in swap now; None where the kernel does not tell."""
    return _kernel("/proc/self/status", "VmSwap", 1024)


def _read_bytes() -> int:
    """Bytes that this process has had read from disks."""
    return _kernel("/proc/self/io", "read_bytes", 1) or 0


def _kernel(path: str, name: str, unit: int) -> int | None:
    try:
        for line in Path(path).read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * unit
    except (OSError, ValueError):
        pass
    return None
