# SPDX-License-Identifier: Apache-2.0
"""Time on a device: single pieces of work, and several of them in turns.

Machines change their speed while they are measured: a GPU under load clocks down, another user comes and goes. So
what is compared is measured in turns, and each figure is the median of its turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import cycle, islice
from statistics import median
from typing import TypeVar

import torch

from vllm_h3_plugin.errors import H3Error

Key = TypeVar("Key", bound=Hashable)
Work = Callable[[], object]


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_ms(work: Work, device: torch.device) -> float:
    """Milliseconds from the call to the end of all that it started on the device, launches included."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return (time.perf_counter() - started) * 1e3


def settled_ms(work: Work, device: torch.device, least_ms: float = 400.0) -> float:
    """Milliseconds of a call once the device has been at the same work for a while: its clock follows the load.

    Calls are timed one by one until they have taken ``least_ms`` together, at least two; the median of their second
    half counts. Off CUDA it is one call.
    """
    if device.type != "cuda":
        return wall_ms(work, device)
    times: list[float] = []
    while len(times) < 2 or sum(times) < least_ms:
        times.append(wall_ms(work, device))
    return median(times[len(times) // 2 :])


def device_ms(works: Sequence[Work], device: torch.device, count: int) -> float:
    """Milliseconds of one of ``count`` calls, back to back, ``works`` in turn; on CUDA between two events.

    The calls are queued faster than they run unless a single one takes less than its launch.
    """
    calls = islice(cycle(works), count)
    if device.type != "cuda":
        return wall_ms(lambda: [work() for work in calls], device) / count
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    wait(device)
    begin.record()
    for work in calls:
        work()
    end.record()
    wait(device)
    return begin.elapsed_time(end) / count


def calls_for(works: Sequence[Work], device: torch.device, batch_ms: float) -> int:
    """How many calls take about ``batch_ms``; each work is run once before, which also warms it."""
    for work in works:
        work()
    return max(len(works), round(batch_ms / max(device_ms(works, device, len(works)), 1e-3)))


def in_turns(
    measures: Mapping[Key, Callable[[], float]], rounds: int, *, warm: int = 0
) -> tuple[dict[Key, float], dict[Key, str]]:
    """Take each measure once a round; one that fails is left out from then on.

    Args:
        warm: rounds before, whose figures are not kept.

    Returns:
        medians, and why the others have none.
    """
    taken: dict[Key, list[float]] = {key: [] for key in measures}
    failed: dict[Key, str] = {}
    for turn in range(warm + rounds):
        for key, measure in measures.items():
            if key in failed:
                continue
            try:
                value = measure()
            except Exception as exc:  # noqa: BLE001 - a kernel may raise anything; the others still say something
                failed[key] = reason_of(exc)
                continue
            if turn >= warm:
                taken[key].append(value)
    return {key: median(values) for key, values in taken.items() if key not in failed}, failed


def reason_of(exc: Exception) -> str:
    """An error in one line, for a table."""
    if isinstance(exc, H3Error):
        return f"{exc.what}: {exc.why}" if exc.why else exc.what
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return f"{type(exc).__name__}: {lines[0][:200]}" if lines else type(exc).__name__
