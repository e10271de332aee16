# SPDX-License-Identifier: Apache-2.0
"""The decisions of the memory guard: may the server start, may a request run, must a running one end. Pure.

On unified memory a machine that runs out does not raise an error, it stops answering. So the guard says no while there
is still room to say it in: before the model is built, before a request is queued, and between two denoise steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vllm_h3_plugin.errors import BusyError, SettingsError
from vllm_h3_plugin.memory.system import GIB, MemorySystem
from vllm_h3_plugin.settings import Settings

START_WAIT_S = 30.0
"""How long a start waits for memory: what a server that has just ended held comes back within seconds."""


@dataclass(frozen=True)
class Thresholds:
    """How much memory must be left.

    Attributes:
        floor: bytes that must remain at a request's predicted peak; under it our own page cache is dropped too.
        hard_floor: bytes under which the running request is cancelled.
        retry_s: seconds that a refused client is asked to wait.
    """

    floor: int
    hard_floor: int
    retry_s: int

    @classmethod
    def from_settings(cls, settings: Settings) -> Thresholds:
        """From ``H3_MEMORY_FLOOR_GIB``, ``H3_MEMORY_HARD_FLOOR_GIB`` and ``H3_MEMORY_RETRY_S``.

        Raises:
            SettingsError: the hard floor is above the floor.
        """
        if settings.memory_hard_floor_gib > settings.memory_floor_gib:
            raise SettingsError(
                f"H3_MEMORY_HARD_FLOOR_GIB={settings.memory_hard_floor_gib:g} is above "
                f"H3_MEMORY_FLOOR_GIB={settings.memory_floor_gib:g}",
                why="requests would be admitted and then cancelled",
                fix="Set the hard floor to less than the floor; the defaults are 3 and 6.",
            )
        return cls(
            int(settings.memory_floor_gib * GIB), int(settings.memory_hard_floor_gib * GIB), settings.memory_retry_s
        )


class Mark(Enum):
    """Where available memory stands against the thresholds."""

    FINE = "fine"
    LOW = "low"
    CRITICAL = "critical"


def mark(available: int, thresholds: Thresholds) -> Mark:
    """``LOW`` under the floor, ``CRITICAL`` under the hard floor."""
    if available < thresholds.hard_floor:
        return Mark.CRITICAL
    return Mark.LOW if available < thresholds.floor else Mark.FINE


@dataclass(frozen=True)
class Admit:
    """The request fits."""

    predicted_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Refuse:
    """The request does not fit now.

    Attributes:
        predicted_bytes: its peak beyond what is resident.
        phase: the phase that needs it.
        available_bytes: what could be taken when it was looked at.
        thresholds: what must remain.
        fits: a smaller request that fits, in words; empty if none does or nothing was asked.
        hopeless: whether it would not fit even if all memory were free.
    """

    predicted_bytes: int
    phase: str
    available_bytes: int
    thresholds: Thresholds
    fits: str = ""
    hopeless: bool = False

    def error(self) -> BusyError:
        """The refusal as the client gets it; its details are bytes and seconds."""
        retry_s = None if self.hopeless else self.thresholds.retry_s
        ways = [
            *([] if retry_s is None else [f"ask again in {retry_s} s"]),
            f"ask for less: {self.fits}" if self.fits else "ask for a shorter or smaller clip",
        ]
        fix = ", or ".join(ways)
        return BusyError(
            f"not enough memory for this request{'' if self.hopeless else ' now'}: its peak ({self.phase}) is "
            f"predicted at {_gib(self.predicted_bytes)}, and {_gib(self.available_bytes)} are available",
            why=f"{_gib(self.thresholds.floor)} must remain free (H3_MEMORY_FLOOR_GIB)",
            fix=f"{fix[0].upper()}{fix[1:]}.",
            predicted_bytes=self.predicted_bytes,
            phase=self.phase,
            available_bytes=self.available_bytes,
            floor_bytes=self.thresholds.floor,
            retry_after_s=retry_s,
        )


def decide(
    available: int,
    predicted: Mapping[str, int],
    thresholds: Thresholds,
    *,
    fits: Callable[[int], str] | None = None,
    total: int | None = None,
) -> Admit | Refuse:
    """Whether a request may run.

    Args:
        available: bytes that can be taken now.
        predicted: phase -> bytes that the request takes then beyond what is resident. Phases follow each other, so the
            largest one counts.
        fits: from the bytes that a request may take to words for a request that needs no more; asked on refusal.
        total: all the memory there is; a request that needs more is not asked to come again.
    """
    phase, peak = max(predicted.items(), key=lambda item: item[1], default=("running", 0))
    if available >= peak + thresholds.floor:
        return Admit(peak, available)
    hopeless = total is not None and peak + thresholds.floor > total
    room = max(0, available - thresholds.floor)
    return Refuse(peak, phase, available, thresholds, fits(room) if fits is not None else "", hopeless)


def cancelled(available: int, thresholds: Thresholds) -> BusyError:
    """Why a running request was ended."""
    return BusyError(
        f"the request was cancelled: {_gib(available)} of memory were left on this machine",
        why=f"under {_gib(thresholds.hard_floor)} (H3_MEMORY_HARD_FLOOR_GIB) the whole machine would stop answering",
        fix=f"Ask again in {thresholds.retry_s} s, or for a shorter or smaller clip; end what else takes memory there.",
        available_bytes=available,
        hard_floor_bytes=thresholds.hard_floor,
        retry_after_s=thresholds.retry_s,
    )


def check_start(
    resident_bytes: int,
    system: MemorySystem,
    thresholds: Thresholds,
    *,
    wait_s: float = START_WAIT_S,
    log: Callable[[str], None] = lambda text: None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Refuse to start while what the server will hold, and the floor, do not fit. Call before the model is built.

    Args:
        resident_bytes: predicted bytes that stay taken once the server is ready.
        wait_s: how long to wait for memory that another process is giving back.
        log: called about every five seconds while waiting.

    Raises:
        BusyError: it does not fit; names the processes that hold most.
    """
    needed = resident_bytes + thresholds.floor
    details: dict[str, Any] = {
        "resident_bytes": resident_bytes,
        "floor_bytes": thresholds.floor,
        "total_bytes": system.total_bytes,
    }
    if needed > system.total_bytes:
        raise BusyError(
            f"the model does not fit: {_gib(resident_bytes)} resident and {_gib(thresholds.floor)} that must remain "
            f"free are more than the {_gib(system.total_bytes)} there are",
            fix="Choose a recipe that holds less (`vllm-h3 memory` compares them), or lower H3_MEMORY_FLOOR_GIB.",
            **details,
        )
    waited = 0.0
    while (available := system.available()) < needed:
        if waited >= wait_s:
            holders = system.holders()
            raise BusyError(
                f"not enough memory to start: {_gib(needed)} are needed ({_gib(resident_bytes)} resident and "
                f"{_gib(thresholds.floor)} that must remain free), {system.name} is {_gib(available)}",
                why="most is held by " + ", ".join(map(str, holders)) if holders else "other processes hold it",
                fix="End what is not needed and start again. H3_MEMORY_FLOOR_GIB lowers what must remain free; "
                "H3_MEMORY_GUARD=off starts anyway.",
                available_bytes=available,
                holders=[{"pid": h.pid, "command": h.command, "held_bytes": h.held_bytes} for h in holders],
                **details,
            )
        if waited % 5 == 0:
            log(
                f"waiting for memory: {_gib(needed)} needed, {system.name} is {_gib(available)}; "
                f"{wait_s - waited:.0f} s left to wait"
            )
        sleep(1)
        waited += 1


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB"
