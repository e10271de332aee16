# SPDX-License-Identifier: Apache-2.0
"""The line before the runner: first come, first served, with an end to it."""

from __future__ import annotations

import math
from collections import deque
from typing import Generic, TypeVar

from vllm_h3_plugin.errors import QueueFullError

Item = TypeVar("Item")


class Line(Generic[Item]):
    """Waiting jobs by id, oldest first."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: jobs that may wait; the one that runs does not count.
        """
        self.most = most
        self._items: deque[tuple[str, Item]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def require_room(self, *, busy: bool, next_s: float | None, most: int | None = None) -> None:
        """Refuse what would wait behind too many.

        Args:
            busy: a job runs, so that a new one has to wait.
            next_s: seconds until a place is free, if known.
            most: that the caller wants to wait with, itself left out; None: as many as the line takes.

        Raises:
            QueueFullError: with the length of the line and when to ask again.
        """
        allowed = self.most if most is None else min(most, self.most)
        if len(self._items) < allowed or (not busy and not self._items):
            return
        retry = max(1, math.ceil(next_s)) if next_s is not None else 30
        raise QueueFullError(
            f"{len(self)} clips wait already",
            why=f"H3_MAX_QUEUE is {self.most}" if allowed == self.most else f"this request asks for at most {most}",
            fix=f"Ask again in {retry} s.",
            retry_after_s=retry,
            queue_length=len(self),
        )

    def join(self, job_id: str, item: Item) -> int:
        """Stand at the end; returns the position, from 1."""
        self._items.append((job_id, item))
        return len(self._items)

    def take(self) -> tuple[str, Item] | None:
        """The first in line, who leaves it."""
        return self._items.popleft() if self._items else None

    def position(self, job_id: str) -> int | None:
        """From 1; None: does not wait here."""
        return next((place for place, (waiting, _) in enumerate(self._items, 1) if waiting == job_id), None)

    def find(self, job_id: str) -> Item | None:
        """One that waits here; None: it does not."""
        return next((item for waiting, item in self._items if waiting == job_id), None)

    def leave(self, job_id: str) -> Item | None:
        """Step out of the line; None: was not in it."""
        for place, (waiting, item) in enumerate(self._items):
            if waiting == job_id:
                del self._items[place]
                return item
        return None
