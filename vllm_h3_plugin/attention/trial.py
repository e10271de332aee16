# SPDX-License-Identifier: Apache-2.0
"""One size of attention tried on a few heads: does a kernel run, is it right, how long does it take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Protocol

import torch

from vllm_h3_plugin.attention.exact import AttentionShape, Kernel, reference_rows
from vllm_h3_plugin.errors import one_line

CHECKED_ROWS = 64
TOLERANCE = 0.02
"""Relative error against FP32 above which a kernel is wrong and not inexact: BF16 kernels have 0.002 to 0.005."""

_BUDGET_FLOP = 6e12
# Tiles of few heads fill the multiprocessors unevenly, which would favour a kernel by the size of its tiles.
_MIN_HEADS = 4


class Timer(Protocol):
    """Runs something ``times`` times, one behind the other, and waits for the device.

    Returns:
        Milliseconds of all of them. Raises what the run raises, also what the device reports late.
    """

    def __call__(self, run: Callable[[], object], times: int) -> float: ...


class Trial:
    """One size on a few heads: attention is linear in heads, and all of them would cost seconds on a slow chip.

    Attributes:
        heads: how many.
        shape: what is run.
        short_of_memory: whether a kernel failed for want of memory, which says nothing about the next time.
    """

    def __init__(
        self, timer: Timer, shape: AttentionShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> None:
        per_head = shape.flop / shape.heads
        self.heads = min(shape.heads, max(_MIN_HEADS, ceil(_BUDGET_FLOP / per_head)))
        self.shape = AttentionShape(shape.query_rows, shape.key_rows, self.heads, shape.head_dim, shape.dtype)
        self._tensors = (q[:, :, : self.heads], k[:, :, : self.heads], v[:, :, : self.heads])
        self._scale, self._timer = scale, timer
        self._reference: torch.Tensor | None = None
        self.short_of_memory = False

    def problem(self, kernel: Kernel) -> str | None:
        """Why the kernel cannot be taken; None if it ran and is right."""
        support = kernel.supports(self.shape)
        if not support:
            return support.reason
        out: list[torch.Tensor] = []
        try:
            self._timer(lambda: out.append(self._run(kernel)), 1)
            return self._fault(out[-1])
        except Exception as exc:  # noqa: BLE001 - packages raise what they like; whatever it is, the reason is kept
            self.short_of_memory |= isinstance(exc, torch.OutOfMemoryError)
            return f"it failed: {one_line(exc)}"

    def milliseconds(self, kernel: Kernel, times: int) -> float:
        """Mean time of a run."""
        return self._timer(partial(self._run, kernel), times) / times

    def _run(self, kernel: Kernel) -> torch.Tensor:
        return kernel.run(*self._tensors, self._scale)

    def _fault(self, out: torch.Tensor) -> str | None:
        q, k, v = self._tensors
        rows = min(CHECKED_ROWS, self.shape.query_rows)
        if self._reference is None:
            self._reference = reference_rows(q, k, v, self._scale, rows)
        if out.shape != q.shape or out.dtype != q.dtype:
            return f"it returned {tuple(out.shape)} of {out.dtype}"
        norm = self._reference.norm()
        error = ((out[0, :rows, 0].float() - self._reference).norm() / norm).item()
        # Infinities or NaN in the input say nothing about the kernel, and neither do zeros.
        judged = bool(torch.isfinite(norm).item()) and norm.item() > 0
        return f"its result is wrong by {error:.1%}" if judged and not error <= TOLERANCE else None
