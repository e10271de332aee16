# SPDX-License-Identifier: Apache-2.0
"""Where tensors are read into: one arena that is used as a ring, or memory of each tensor's own.

Both hand out a region or None, "not now". Neither locks: their caller does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch

# Memory is handed out in multiples of this, at addresses that are multiples of it: what O_DIRECT needs
# (shard_io.BLOCK), and enough for any dtype and any copy engine.
_ALIGN = 4096


@dataclass(eq=False)
class Region:
    """Memory for one tensor.

    Attributes:
        tensor: [nbytes] uint8, at an address that lies ``lead`` bytes behind a multiple of 4096.
        room: [multiple of 4096] uint8: the tensor with what is before and after it up to such multiples.
        begin: for the ring: bytes that were ever handed out before it; likewise ``end``.
        end: begin + nbytes, rounded up.
        free: whether it was released.
    """

    tensor: torch.Tensor
    room: torch.Tensor
    begin: int = 0
    end: int = 0
    free: bool = False


class Memory(Protocol):
    """What hands out regions."""

    def acquire(self, nbytes: int, lead: int = 0) -> Region | None:
        """A region of that size, ``lead`` bytes (below 4096) behind a multiple of 4096; None while there is no room.

        Never None once everything was released.
        """

    def release(self, region: Region) -> None:
        """Give a region back, in any order."""


class OwnMemory:
    """Every tensor gets memory that is its own for good.

    Args:
        ahead: bytes that may be acquired and not yet released; a single tensor may be larger.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._held = 0

    def acquire(self, nbytes: int, lead: int = 0) -> Region | None:
        """See :class:`Memory`."""
        if self._held and self._held + nbytes > self._ahead:
            return None
        self._held += nbytes
        room = _aligned(_up(lead + nbytes))
        return Region(room[lead : lead + nbytes], room)

    def release(self, region: Region) -> None:
        """See :class:`Memory`."""
        self._held -= region.tensor.numel()


class Arena:
    """A ring of one allocation; a tensor lies in it in one piece.

    Args:
        nbytes: size of the ring.
        largest: size of the largest tensor that will be asked for. Tensors that the ring cannot hold share one more
            buffer of this size, one at a time. It is made when it is needed and not page-locked: PyTorch's allocator
            would round it up to a power of two.
        pin: page-lock the ring, for copies to a CUDA device.
    """

    def __init__(self, nbytes: int, *, largest: int, pin: bool = False) -> None:
        self._capacity = max(_ALIGN, _up(nbytes))
        self._ring = _aligned(self._capacity, pin=pin)
        self._largest = largest
        self._overflow: torch.Tensor | None = None
        self._overflow_region: Region | None = None
        self._regions: deque[Region] = deque()

    def acquire(self, nbytes: int, lead: int = 0) -> Region | None:
        """See :class:`Memory`."""
        size = _up(lead + nbytes)
        if size > self._capacity:
            return self._acquire_overflow(nbytes, lead)
        begin = self._regions[-1].end if self._regions else 0
        place = begin % self._capacity
        if place + size > self._capacity:  # what is left before the ring's end is skipped
            begin, place = begin - place + self._capacity, 0
        end = begin + size
        if self._regions and end - self._regions[0].begin > self._capacity:
            return None
        room = self._ring[place : place + size]
        region = Region(room[lead : lead + nbytes], room, begin, end)
        self._regions.append(region)
        return region

    def release(self, region: Region) -> None:
        """See :class:`Memory`."""
        if region is self._overflow_region:
            self._overflow_region = None
            return
        region.free = True
        while self._regions and self._regions[0].free:
            self._regions.popleft()

    def _acquire_overflow(self, nbytes: int, lead: int) -> Region | None:
        if self._overflow_region is not None:
            return None
        if self._overflow is None:
            self._overflow = _aligned(_up(self._largest) + _ALIGN)
        room = self._overflow[: _up(lead + nbytes)]
        self._overflow_region = Region(room[lead : lead + nbytes], room)
        return self._overflow_region


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _aligned(nbytes: int, *, pin: bool = False) -> torch.Tensor:
    """Memory at an address that is a multiple of 4096. Page-locked memory is; torch's own starts anywhere."""
    memory = torch.empty(nbytes if pin else nbytes + _ALIGN, dtype=torch.uint8, pin_memory=pin)
    skip = -memory.data_ptr() % _ALIGN
    return memory if pin and not skip else memory[skip : skip + nbytes]
