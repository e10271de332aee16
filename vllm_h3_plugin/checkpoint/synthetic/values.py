# SPDX-License-Identifier: Apache-2.0
"""Reproducible random weights: every value depends on the seed, the tensor's name and its place, on nothing else.

The numbers come from NumPy's SFC64 raw 64-bit stream, whose bits are fixed across NumPy releases (the streams of
``Generator.standard_normal`` are not, NEP 19). Four 16-bit lanes of a draw are added up: an Irwin-Hall variable, close
to a Gaussian and cut off at 3.46 standard deviations.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Values made at once: bounds a stream's memory whatever the tensor's size, and lets its arrays stay in the cache.
CHUNK = 1 << 18

_LANES = np.uint64(0x0000FFFF0000FFFF)
_SUM_MEAN = 4 * 65535 / 2
_SUM_STD = math.sqrt(4 * (65536**2 - 1) / 12)

OUTLIER_FACTOR = 30.0


def _bits(seed: int, key: str) -> np.random.SFC64:
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return np.random.SFC64(int.from_bytes(digest[:16], "little"))


@dataclass(frozen=True)
class Distribution:
    """Mean and standard deviation of a tensor's values."""

    mean: float
    std: float


class RowStream:
    """The rows of one random matrix, first to last.

    Args:
        seed: the checkpoint's seed.
        key: names the matrix; the same key gives the same rows.
        rows: rows in all.
        width: values in a row.
        distribution: of every value.
        outliers: multiply a few rows, chosen by seed and key, by ``OUTLIER_FACTOR``: one in 64, at least one.
    """

    def __init__(
        self, seed: int, key: str, *, rows: int, width: int, distribution: Distribution, outliers: bool = False
    ) -> None:
        self._bits = _bits(seed, key)
        self._width = width
        self._distribution = distribution
        self._row = 0
        self._outliers: NDArray[np.uint64] = np.empty(0, np.uint64)
        if outliers:
            draws = _bits(seed, f"{key}#outliers").random_raw(max(1, rows // 64))
            self._outliers = np.unique(np.asarray(draws, np.uint64) % np.uint64(rows))

    def take(self, rows: int) -> Iterator[NDArray[np.float32]]:
        """The next ``rows`` rows as float32 ``[n, width]``, in pieces of about ``CHUNK`` values."""
        step = max(1, CHUNK // self._width)
        while rows:
            count = min(step, rows)
            yield self._next(count)
            rows -= count

    def _next(self, rows: int) -> NDArray[np.float32]:
        low = np.asarray(self._bits.random_raw(rows * self._width), np.uint64)
        high = low >> np.uint64(16)
        low &= _LANES
        high &= _LANES
        low += high  # two sums of two 16-bit lanes
        np.right_shift(low, np.uint64(32), out=high)
        low += high  # their sum in the lower 32 bits
        values = low.astype(np.uint32).astype(np.float32)
        values -= np.float32(_SUM_MEAN)
        values *= np.float32(self._distribution.std / _SUM_STD)
        if self._distribution.mean:
            values += np.float32(self._distribution.mean)
        result = values.reshape(rows, self._width)
        if self._outliers.size:
            here = self._outliers[(self._outliers >= self._row) & (self._outliers < self._row + rows)]
            result[here.astype(np.int64) - self._row] *= np.float32(OUTLIER_FACTOR)
        self._row += rows
        return result


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """BF16 bit patterns of finite float32 values, rounded to nearest even."""
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    return rounded.astype(np.uint16)


def encode(values: NDArray[np.float32], dtype: str) -> bytes:
    """Little-endian bytes of float32 values as safetensors ``BF16`` or ``F32``."""
    if dtype == "BF16":
        return to_bfloat16(np.ascontiguousarray(values)).astype("<u2", copy=False).tobytes()
    if dtype == "F32":
        return np.ascontiguousarray(values).astype("<f4", copy=False).tobytes()
    raise KeyError(dtype)
