# SPDX-License-Identifier: Apache-2.0
"""What fits in a given amount of memory: the longest clip of a size. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from vllm_h3_plugin.memory.activations import Peak
from vllm_h3_plugin.memory.coefficients import DEFAULT, Coefficients
from vllm_h3_plugin.memory.requests import FPS, RequestSize, api_clip_lengths
from vllm_h3_plugin.quantization.footprint import GIB

FIT_SIZES: tuple[tuple[int, int], ...] = ((768, 448), (1344, 768))
"""Sizes that are always asked about, width x height in pixels."""


@dataclass(frozen=True)
class Fit:
    """Longest clip of one size that fits.

    Attributes:
        longest: its request and peak; None if not even the shortest fits.
        shortest: the API's shortest clip of that size, with its peak.
        free_bytes: what is left of the memory for a request; may be negative.
    """

    width: int
    height: int
    longest: Peak | None
    shortest: Peak
    free_bytes: int

    @property
    def seconds(self) -> float:
        """Length of the longest clip; 0 if none fits."""
        return 0.0 if self.longest is None else self.longest.request.frames / FPS

    @property
    def missing_bytes(self) -> int:
        """What the shortest clip lacks; 0 if it fits."""
        return max(self.shortest.unified_bytes - self.free_bytes, 0)


def free_for_requests(
    memory_gib: float, resident_bytes: int, floor_gib: float, coefficients: Coefficients = DEFAULT
) -> int:
    """Bytes that requests may take of unified memory: all, less what is resident, the processes and the floor."""
    return round((memory_gib - floor_gib) * GIB) - resident_bytes - coefficients.process_bytes


def longest_clip(predict: Callable[[RequestSize], Peak], like: RequestSize, free_bytes: int) -> Fit:
    """Longest clip of ``like``'s size and conditions, of those that the API takes (4 to 15 s), that fits.

    Args:
        predict: the peak of a request.
        free_bytes: as :func:`free_for_requests` says.
    """
    peaks = [predict(replace(like, frames=frames)) for frames in api_clip_lengths()]
    fitting = [peak for peak in peaks if peak.unified_bytes <= free_bytes]
    return Fit(like.width, like.height, fitting[-1] if fitting else None, peaks[0], free_bytes)
