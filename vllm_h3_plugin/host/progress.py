# SPDX-License-Identifier: Apache-2.0
"""Where a request is, for whoever asks the server: the phase, and the denoise steps done."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_h3_plugin.host import run_state

logger = init_logger(__name__)


class Progress:
    """Writes :data:`run_state.PROGRESS` at each phase and step; silent on other ranks than 0 and without a folder."""

    def __init__(self) -> None:
        self._active = run_state.run_dir() is not None and int(os.environ.get("RANK", "0")) == 0
        self._phase = "idle"
        self._step = 0
        self._steps: int | None = None

    def watch(self, dit: torch.nn.Module) -> None:
        """Count each forward of the DiT as one denoise step."""
        if self._active:
            dit.register_forward_hook(self._count)

    def phase(self, name: str, *, steps: int | None = None) -> None:
        """Enter a phase; ``steps`` is the number of DiT evaluations that it will take, where that is known."""
        self._phase, self._step, self._steps = name, 0, steps
        self._write()

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
            self._step, self._steps = tenth, 10
            self._write()
            logger.info(
                "%s: %.2f of %.2f GiB, %.2f GiB/s, %.0f s left",
                name,
                done / 2**30,
                total / 2**30,
                done / 2**30 / seconds,
                seconds * (total - done) / done,
            )

        return advance

    def _count(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._step += 1
        self._write()

    def _write(self) -> None:
        if self._active:
            run_state.write(
                run_state.PROGRESS,
                {"phase": self._phase, "step": self._step, "steps": self._steps, "time": time.time()},
            )
