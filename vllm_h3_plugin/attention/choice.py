# SPDX-License-Identifier: Apache-2.0
"""``auto``: which exact attention kernel runs a size, by a short measurement when the size is first seen.

Sizes fall into buckets (powers of two of rows). A new bucket is measured once, on the tensors at hand: every kernel
runs once and is held against FP32 on a few rows, then those that ran are timed in turns. The order of preference wins
unless another kernel is clearly faster: the same server then takes the same kernel in every run, and sums do not change
their order. What was measured is remembered in a file. Small sizes follow the order without being timed.

Clock, device and file are handed in, so that a CPU with a fake clock goes through the very same code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import Literal, Protocol

import torch

from vllm_h3_plugin.attention.exact import AttentionShape, Kernel
from vllm_h3_plugin.attention.trial import Timer, Trial
from vllm_h3_plugin.errors import BackendError

SMALL_ROWS = 1024
"""Sizes below are not timed: the token refiner's, a thousandth of a step."""
CLEARLY_FASTER = 0.03
"""Share by which a kernel must beat one that stands before it. Repeated timings differ by less."""
MAX_CHOICES = 64
"""Buckets kept in memory. Powers of two of up to 2^20 rows are 21; more would be a fault, and the oldest goes."""

_ROUNDS = 3
_MIN_ROUND_MS = 5.0
# A kernel this much slower than the best so far is not timed again: on a slow chip at 110 000 rows a run takes seconds.
_HOPELESS = 1.5

Report = Callable[[str], None]


@dataclass(frozen=True)
class Bucket:
    """Sizes that share a choice: rows up to these powers of two, one head size and element type."""

    query_rows: int
    key_rows: int
    head_dim: int
    dtype: str

    @classmethod
    def of(cls, shape: AttentionShape) -> Bucket:
        """The bucket that a size falls into."""
        dtype = str(shape.dtype).removeprefix("torch.")
        return cls(_power_of_two(shape.query_rows), _power_of_two(shape.key_rows), shape.head_dim, dtype)

    def __str__(self) -> str:
        rows = str(self.query_rows) if self.query_rows == self.key_rows else f"{self.query_rows} x {self.key_rows}"
        return f"up to {rows} rows of {self.dtype}"


@dataclass(frozen=True)
class Choice:
    """One decision.

    Attributes:
        bucket: what it is for.
        kernel: name of the kernel.
        origin: ``measured`` now, ``remembered`` from a file, or by ``order`` of preference without timing.
        milliseconds: of each kernel that was timed, for ``heads`` heads at ``rows`` key rows.
        refused: kernel -> why it was not considered.
        heads, rows: what was measured; 0 where nothing was.
    """

    bucket: Bucket
    kernel: str
    origin: Literal["measured", "remembered", "order"]
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    heads: int = 0
    rows: int = 0

    def __str__(self) -> str:
        times = ", ".join(f"{name} {value:.2f} ms" for name, value in self.milliseconds.items())
        how = {
            "measured": f"measured on {self.heads} heads at {self.rows} rows: {times}",
            "remembered": f"remembered from a measurement on {self.heads} heads at {self.rows} rows: {times}",
            "order": "by order of preference, too small to be worth a measurement",
        }[self.origin]
        text = f"attention for {self.bucket}: {self.kernel} ({how})"
        if self.refused:
            text += f"; not {', not '.join(f'{name} ({reason})' for name, reason in self.refused.items())}"
        return text


class Memory(Protocol):
    """Where choices outlive the process; ``remembered.ChoiceFile`` is one."""

    def recall(self, bucket: Bucket, report: Report) -> Choice | None:
        """What was measured for a bucket, if anything."""

    def keep(self, choice: Choice, report: Report) -> None:
        """Remember what was measured. Never raises for what a disk can do wrong; it is reported."""


class Chooser:
    """Picks a kernel for each size and runs it. One serves all layers of a model on one device.

    Args:
        kernels: in order of preference.
        timer: see :class:`Timer`.
        report: is told every decision, once, in a sentence.
        memory: keeps measurements between processes; None: nothing does.
        capturing: whether the device is recording a graph, during which nothing can be measured.
    """

    def __init__(
        self,
        kernels: Sequence[Kernel],
        *,
        timer: Timer,
        report: Report,
        memory: Memory | None = None,
        capturing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._kernels = {kernel.name: kernel for kernel in kernels}
        self._timer, self._report, self._memory, self._capturing = timer, report, memory, capturing
        self._choices: dict[Bucket, Choice] = {}
        self._last: tuple[AttentionShape, Kernel] | None = None

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All decisions so far, oldest first."""
        return tuple(self._choices.values())

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention by the kernel that is chosen for this size.

        Args:
            q: ``[1, Sq, heads, head_dim]``.
            k, v: ``[1, Sk, heads, head_dim]``, without pad rows.
            scale: of the scores before the softmax.

        Returns:
            ``[1, Sq, heads, head_dim]`` in the dtype of ``q``.

        Raises:
            BackendError: no kernel runs this size; names each with its reason.
        """
        return self.kernel(q, k, v, scale).run(q, k, v, scale)

    def kernel(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Kernel:
        """The kernel for tensors of this size; measures if the bucket is new. Waits for the device only then."""
        shape = AttentionShape.of(q, k)
        if self._last is not None and self._last[0] == shape:
            return self._last[1]
        bucket = Bucket.of(shape)
        choice = self._choices.get(bucket)
        if choice is None and self._capturing():
            return self._unmeasured(shape, bucket)
        if choice is None:
            choice = self._choose(shape, bucket, q, k, v, scale)
            if len(self._choices) >= MAX_CHOICES:
                del self._choices[next(iter(self._choices))]
            self._choices[bucket] = choice
            self._report(str(choice))
        self._last = (shape, self._kernels[choice.kernel])
        return self._last[1]

    def problems(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> dict[str, str | None]:
        """Every kernel, in order of preference, with why it cannot run this size; None: it ran and is right."""
        trial = Trial(self._timer, AttentionShape.of(q, k), q, k, v, scale)
        return {name: trial.problem(kernel) for name, kernel in self._kernels.items()}

    def _unmeasured(self, shape: AttentionShape, bucket: Bucket) -> Kernel:
        """First in order, for a size that is first seen while a graph is recorded. Not kept: it was not tried."""
        for kernel in self._kernels.values():
            if kernel.supports(shape):
                self._report(f"attention for {bucket}: {kernel.name}, not measured because a graph is being recorded")
                return kernel
        raise self._nothing_runs(bucket, {n: k.supports(shape).reason for n, k in self._kernels.items()})

    def _choose(
        self, shape: AttentionShape, bucket: Bucket, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> Choice:
        trial = Trial(self._timer, shape, q, k, v, scale)
        if max(bucket.query_rows, bucket.key_rows) < SMALL_ROWS:
            return self._by_order(trial, bucket)
        recalled = self._memory.recall(bucket, self._report) if self._memory is not None else None
        if recalled is not None:
            kernel = self._kernels.get(recalled.kernel)
            problem = "there is no such kernel" if kernel is None else trial.problem(kernel)
            if problem is None:
                return recalled
            self._report(f"attention for {bucket}: {recalled.kernel} was remembered but {problem}; measuring again")
        choice = self._measure(trial, bucket)
        # A kernel that lost for want of memory may win tomorrow.
        if self._memory is not None and not trial.short_of_memory:
            self._memory.keep(choice, self._report)
        return choice

    def _by_order(self, trial: Trial, bucket: Bucket) -> Choice:
        refused: dict[str, str] = {}
        for name, kernel in self._kernels.items():
            problem = trial.problem(kernel)
            if problem is None:
                return Choice(bucket, name, "order", refused=refused)
            refused[name] = problem
        raise self._nothing_runs(bucket, refused)

    def _measure(self, trial: Trial, bucket: Bucket) -> Choice:
        refused: dict[str, str] = {}
        first: dict[str, float] = {}
        for name, kernel in self._kernels.items():
            problem = trial.problem(kernel)
            if problem is None:
                first[name] = trial.milliseconds(kernel, 1)
            else:
                refused[name] = problem
        if not first:
            raise self._nothing_runs(bucket, refused)
        hopeful = {name: ms for name, ms in first.items() if ms <= _HOPELESS * min(first.values())}
        rounds: dict[str, list[float]] = {name: [] for name in hopeful}
        if len(hopeful) > 1:
            for _ in range(_ROUNDS):
                for name, ms in hopeful.items():
                    times = min(20, max(1, ceil(_MIN_ROUND_MS / max(ms, 1e-3))))
                    rounds[name].append(trial.milliseconds(self._kernels[name], times))
        milliseconds = {name: median(rounds.get(name) or [ms]) for name, ms in first.items()}
        best = min(milliseconds[name] for name in hopeful)
        chosen = next(name for name in hopeful if milliseconds[name] * (1 - CLEARLY_FASTER) <= best)
        return Choice(bucket, chosen, "measured", milliseconds, refused, trial.heads, trial.shape.key_rows)

    def _nothing_runs(self, bucket: Bucket, refused: Mapping[str, str]) -> BackendError:
        return BackendError(
            f"no attention kernel runs {bucket}",
            why="; ".join(f"{name}: {reason}" for name, reason in refused.items()),
            fix="Install what is missing (`vllm-h3 doctor` lists it), or name a backend of the host's with "
            "--diffusion-attention-backend.",
            kernels=dict(refused),
        )


def _power_of_two(rows: int) -> int:
    return 1 << max(0, rows - 1).bit_length()
