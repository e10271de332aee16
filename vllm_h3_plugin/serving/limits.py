# SPDX-License-Identifier: Apache-2.0
"""How long a clip may take and how large it may be, from the side of whoever waits for it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from vllm_h3_plugin.errors import ServerError

MINIMUM_S = 1800.0
"""Nobody gives up earlier unless told to: 5 s at 50 steps take some 20 minutes on one Spark (docs/SPARK.md)."""

AFTER_LAST_STEP_S = 600.0
"""Decoding and encoding a long clip come after the last step, and no prediction counts them."""


@dataclass(frozen=True)
class Limits:
    """What a client puts up with.

    Attributes:
        total_s: seconds for one clip in all; None: what the server predicts, and at least ``MINIMUM_S``.
        stall_s: seconds without a byte that mean a connection is dead. Encoding a clip can hold a server for a minute.
        reconnect_s: seconds for which a server may be gone; on one Spark it loads for up to ten minutes.
        backoff_s: first pause before something is tried again; doubled each time, up to 30 times as long.
        max_bytes: largest clip that is taken.
    """

    total_s: float | None = None
    stall_s: float = 120
    reconnect_s: float = 900
    backoff_s: float = 0.5
    max_bytes: int = 1 << 30

    def pause(self, attempt: int) -> float:
        """Seconds to wait before attempt ``attempt`` (from 1)."""
        return float(self.backoff_s * min(30, 2 ** min(attempt - 1, 5)))


class Deadline:
    """The end of one clip's time; it moves with what the server predicts unless a person has set it."""

    def __init__(self, total_s: float | None) -> None:
        self._fixed = total_s is not None
        self._total_s = MINIMUM_S if total_s is None else total_s
        self._started = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def left(self) -> float:
        """Seconds until the end, never below 0."""
        return max(0.0, self._total_s - self.elapsed)

    def expect(self, seconds_left: float) -> None:
        """Make room for twice what the server says is left."""
        if not self._fixed:
            self._total_s = max(self._total_s, self.elapsed + 2 * seconds_left + AFTER_LAST_STEP_S)

    def check(self, what: str) -> None:
        """Raise if the time is over.

        Raises:
            ServerError: it is; says that the work on the server goes on.
        """
        if self.elapsed > self._total_s:
            raise ServerError(
                f"{what} was not done after {self._total_s:.0f} s",
                why="the time for one clip is over; the server goes on with the job",
                fix="The same command picks the job up again; raise --timeout if clips take longer here.",
            )
