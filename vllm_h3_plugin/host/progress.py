# SPDX-License-Identifier: Apache-2.0
"""Where a request is, for whoever asks the server: the phase, and the denoise steps done."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from vllm_h3_plugin.host import run_state


class Progress:
    """Writes :data:`run_state.PROGRESS` at each phase and step; silent on ranks other than 0 and without a run folder."""

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

    def _count(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._step += 1
        self._write()

    def _write(self) -> None:
        if self._active:
            run_state.write(
                run_state.PROGRESS,
                {"phase": self._phase, "step": self._step, "steps": self._steps, "time": time.time()},
            )
