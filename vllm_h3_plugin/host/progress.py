# SPDX-License-Identifier: Apache-2.0
"""Where a request is, for whoever asks the server: the phase, the denoise steps done, and what a step takes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_h3_plugin.host import run_state
from vllm_h3_plugin.host.request_ledger import RequestLedger

logger = init_logger(__name__)

IDLE = "idle"


@dataclass(frozen=True)
class State:
    """What :data:`run_state.PROGRESS` holds.

    Attributes:
        phase: ``idle``, or what a load or a request is at.
        step, steps: denoise steps done and in all; while something is read or built, tenths of it. ``steps`` is None
            where the number is not known.
        time: of the last move, in seconds since 1970.
        started_at: of the phase; ``busy_since``: of the load or the request that it is part of, None while idle.
        seconds_per_step: mean of the steps done, without the first, which also warms up, once there is another. None
            before the first step and in phases that have none.
        done_bytes, total_bytes: while something is read or built.
        request: the host's id of the request that runs, or ran last; it begins with the job's.
    """

    phase: str
    step: int
    steps: int | None
    time: float
    started_at: float
    busy_since: float | None
    seconds_per_step: float | None = None
    done_bytes: int | None = None
    total_bytes: int | None = None
    request: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """As ``/v1/h3/info`` shows it."""
        return {
            "phase": self.phase,
            "step": self.step,
            "steps": self.steps,
            "time": self.time,
            "started_at": self.started_at,
            "busy_since": self.busy_since,
            "seconds_per_step": self.seconds_per_step,
            "done_bytes": self.done_bytes,
            "total_bytes": self.total_bytes,
            "request": self.request,
        }


class Progress:
    """Writes :data:`run_state.PROGRESS` at each phase and step; silent on other ranks than 0 and without a folder."""

    def __init__(self, clock: Callable[[], float] = time.time, timer: Callable[[], float] | None = None) -> None:
        """
        Args:
            clock: seconds since 1970.
            timer: what lengths are measured with. Unset: with ``clock`` if that is not the system's, which may be set.
        """
        self._timer = timer or (time.monotonic if clock is time.time else clock)
        self._active = run_state.run_dir() is not None and int(os.environ.get("RANK", "0")) == 0
        self._clock = clock
        now = clock()
        self.state = State(IDLE, 0, None, now, now, None)
        self._phase_at = self._first_step_at = self._last_step_at = self._timer()
        self._ledger: RequestLedger | None = None

    def begin(self, request: str) -> None:
        """A request begins: what follows belongs to it."""
        self._ledger = RequestLedger(request, self._clock, self._timer) if self._active else None
        self.state = replace(self.state, request=request)

    def end(self, **more: Any) -> None:
        """It is over; its ledger is left, with ``more`` in it."""
        if self._ledger is not None:
            self._ledger.write(**more)
            self._ledger = None
        self.phase(IDLE)

    def tokens(self, count: int) -> None:
        """Packed tokens of each denoise step of the request."""
        if self._ledger is not None:
            self._ledger.tokens = count

    def watch(self, dit: torch.nn.Module) -> None:
        """Count each forward of the DiT as one denoise step."""
        if self._active:
            dit.register_forward_hook(lambda module, args, output: self.step_done())

    def phase(self, name: str, *, steps: int | None = None) -> None:
        """Enter a phase; ``steps`` is the number of DiT evaluations that it will take, where that is known."""
        now = self._clock()
        since = None if name == IDLE else self.state.busy_since or now
        if self._ledger is not None:
            self._ledger.phase(name)
        self._phase_at = self._last_step_at = self._timer()
        self._write(State(name, 0, steps, now, now, since, request=self.state.request))

    def loading(self, name: str) -> Callable[[int, int], None]:
        """Enter a loading phase; returns what to call with bytes done and bytes in all. Logs each tenth, with GiB/s."""
        self.phase(name)
        started = time.monotonic()
        tenth = 0

        def advance(done: int, total: int) -> None:
            nonlocal tenth
            if total == 0 or done * 10 // total <= tenth:
                return
            tenth = done * 10 // total
            seconds = max(time.monotonic() - started, 1e-9)
            self._write(
                replace(self.state, step=tenth, steps=10, time=self._clock(), done_bytes=done, total_bytes=total)
            )
            logger.info(
                "%s: %.2f of %.2f GiB, %.2f GiB/s, %.0f s left",
                name,
                done / 2**30,
                total / 2**30,
                done / 2**30 / seconds,
                seconds * (total - done) / done,
            )

        return advance

    def step_done(self) -> None:
        """One more denoise step."""
        now, step = self._timer(), self.state.step + 1
        if self._ledger is not None:
            self._ledger.step(now - self._last_step_at)
        self._last_step_at = now
        if step == 1:
            self._first_step_at = now
            each = now - self._phase_at
        else:
            each = (now - self._first_step_at) / (step - 1)
        self._write(replace(self.state, step=step, time=self._clock(), seconds_per_step=round(max(each, 0.0), 4)))

    def _write(self, state: State) -> None:
        self.state = state
        if self._active:
            run_state.write(run_state.PROGRESS, state.as_dict())
