# SPDX-License-Identifier: Apache-2.0
"""Stages whose weights leave the device and come back: text encoder, DiT, VAEs. The disk is not asked.

A stage is dropped by giving each of its tensors empty data; one that is used all the same is a shape error and no
access to freed memory. Tensors that share a storage share it again after the reload. What it is reloaded from stays: a
part's bytes in the read-only base, or a host copy where the device holds other bytes than the base. Bytes of the base
go through an anonymous slot (page-locked for CUDA), never from a mapped page to the device; where the device is the CPU
they are read into its anonymous memory at once.

The order of stages in a request is known, so what is evicted first is what is needed last from here on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from vllm_h3_plugin.errors import LoadError, SettingsError

Policy = Literal["cycle", "lru"]

_GIB = 2**30
_SLOT = 128 << 20
_READERS = 4


class Source(Protocol):
    """What a storage is reloaded from."""

    def read_into(self, out: torch.Tensor, offset: int) -> None:
        """Fill ``out``, uint8 on the CPU, with the bytes from ``offset`` on."""


@dataclass(frozen=True)
class HostCopy:
    """The bytes in anonymous memory of this process.

    Attributes:
        data: ``[nbytes]`` uint8, page-locked where the device is CUDA.
    """

    data: torch.Tensor

    def read_into(self, out: torch.Tensor, offset: int) -> None:
        """See :class:`Source`."""
        out.copy_(self.data[offset : offset + out.numel()])


@dataclass(frozen=True)
class _Place:
    """How a tensor lies in its storage; offset and stride in elements."""

    tensor: torch.Tensor
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass
class _Block:
    """One storage and the tensors in it."""

    places: list[_Place]
    nbytes: int
    device: torch.device
    source: Source

    def drop(self) -> None:
        for place in self.places:
            place.tensor.data = place.tensor.data.new_empty(0)

    def put(self, memory: torch.Tensor) -> None:
        for place in self.places:
            empty = torch.empty(0, dtype=place.tensor.dtype, device=self.device)
            place.tensor.data = empty.set_(memory.untyped_storage(), place.offset, place.size, place.stride)  # type: ignore[arg-type]


@dataclass
class Stage:
    """One stage.

    Attributes:
        nbytes: of its storages.
        resident: whether they are on the device.
        reloads, reload_s: how often, and how long in all, they were brought back.
    """

    name: str
    blocks: list[_Block]
    resident: bool = True
    in_use: int = 0
    last_use: int = 0
    reloads: int = 0
    reload_s: float = 0.0
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(block.nbytes for block in self.blocks)


class HotCache:
    """Keeps stages on a device within a budget.

    Args:
        order: names of the stages in the order in which a request uses them.
        budget: bytes of weights that may be on the device at once; None: those of the largest stage.
        policy: ``cycle`` evicts what comes last in ``order`` from the stage that is asked for; ``lru`` what was used
            longest ago.
        slot_bytes: of the slot, even; None: 128 MiB for a device, and none on the CPU, whose memory needs no slot.
    """

    def __init__(
        self,
        order: Sequence[str],
        budget: int | None = None,
        policy: Policy = "cycle",
        slot_bytes: int | None = None,
    ) -> None:
        self._slot_bytes = slot_bytes
        self._order = list(order)
        self._budget = budget
        self._policy = policy
        self._stages: dict[str, Stage] = {}
        self._slot: torch.Tensor | None = None
        self._clock = 0
        self._lock = threading.RLock()

    def add(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        source_of: Callable[[str, torch.Tensor], Source | None] = lambda name, data: None,
    ) -> Stage:
        """Take a stage that is on the device.

        Args:
            tensors: its parameters and buffers by name; those that share a storage are one.
            source_of: gets a tensor's name and its storage's bytes ``[nbytes]`` uint8 on the CPU; returns what holds
                the same bytes, or None: then a copy is kept.

        Raises:
            LoadError: no stage of this name is in ``order``.
        """
        if name not in self._order:
            raise LoadError(f"stage {name} is not one of {', '.join(self._order)}", why="its turn is not known")
        blocks: dict[int, _Block] = {}
        for label, tensor in tensors.items():
            if not tensor.nbytes or tensor.is_meta:
                continue
            storage = tensor.data.untyped_storage()
            place = _Place(tensor, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            if storage.data_ptr() in blocks:
                blocks[storage.data_ptr()].places.append(place)
                continue
            data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[arg-type]
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            host.copy_(data)
            source = source_of(label, host) or HostCopy(host)
            blocks[storage.data_ptr()] = _Block([place], storage.nbytes(), storage.device, source)
        self._stages[name] = stage = Stage(name, list(blocks.values()))
        return stage

    @property
    def budget(self) -> int:
        """Bytes that may be on the device at once."""
        largest = max((stage.nbytes for stage in self._stages.values()), default=0)
        return largest if self._budget is None else self._budget

    @property
    def resident(self) -> tuple[str, ...]:
        """Names of the stages on the device, in the order of a request."""
        return tuple(name for name in self._order if name in self._stages and self._stages[name].resident)

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Have a stage on the device while this is active.

        Raises:
            SettingsError: it, and what is in use beside it, is more than the budget.
            SnapshotError: the base that it comes from was cut off.
        """
        with self._lock:
            stage = self._stages[name]
            self._clock += 1
            stage.last_use = self._clock
            if not stage.resident:
                self._make_room(stage)
                self._reload(stage)
            stage.in_use += 1
        try:
            yield
        finally:
            with self._lock:
                stage.in_use -= 1

    def settle(self) -> None:
        """Evict until what is resident is within the budget: once, when all stages were added."""
        with self._lock:
            while sum(self._stages[name].nbytes for name in self.resident) > self.budget:
                self.drop(self._victim(self._order[0], None))

    def drop(self, name: str) -> None:
        """Free a stage's device memory; what it is reloaded from stays.

        Raises:
            LoadError: it is in use.
        """
        stage = self._stages[name]
        if stage.in_use:
            raise LoadError(f"stage {name} is in use", why="its weights cannot leave the device now")
        # Tensors of inference mode cannot be the data of those that were made outside of it; here and below.
        with torch.inference_mode(False):
            for block in stage.blocks if stage.resident else ():
                block.drop()
        stage.resident = False

    def facts(self) -> dict[str, dict[str, float | bool]]:
        """By stage, for ``/v1/h3/info``."""
        return {
            stage.name: {
                "nbytes": stage.nbytes,
                "resident": stage.resident,
                "reloads": stage.reloads,
                "reload_s": round(stage.reload_s, 3),
                "host_copy_bytes": sum(b.nbytes for b in stage.blocks if isinstance(b.source, HostCopy)),
            }
            for stage in self._stages.values()
        }

    def _make_room(self, wanted: Stage) -> None:
        while sum(self._stages[name].nbytes for name in self.resident) + wanted.nbytes > self.budget:
            victim = self._victim(wanted.name, wanted)
            self.drop(victim)

    def _victim(self, now: str, wanted: Stage | None) -> str:
        free = [name for name in self.resident if not self._stages[name].in_use]
        if not free:
            held = ", ".join(f"{name} {self._stages[name].nbytes / _GIB:.2f}" for name in self.resident)
            size = wanted.nbytes if wanted else 0
            raise SettingsError(
                f"stage {now} of {size / _GIB:.2f} GiB does not fit in the {self.budget / _GIB:.2f} GiB of "
                "H3_RESIDENT_GIB",
                why=f"in use beside it, GiB: {held or 'nothing'}",
                fix="Raise H3_RESIDENT_GIB, or unset it: then the largest stage fits.",
            )
        if self._policy == "lru":
            return min(free, key=lambda name: self._stages[name].last_use)
        start = self._order.index(now)
        return max(free, key=lambda name: (self._order.index(name) - start) % len(self._order))

    def _reload(self, stage: Stage) -> None:
        begun = time.perf_counter()
        with ThreadPoolExecutor(_READERS) as readers, torch.inference_mode(False):
            for block in stage.blocks:
                memory = torch.empty(block.nbytes, dtype=torch.uint8, device=block.device)
                self._fill(memory, block.source, readers)
                block.put(memory)
        stage.resident = True
        stage.reloads += 1
        stage.reload_s += time.perf_counter() - begun

    def _fill(self, target: torch.Tensor, source: Source, readers: ThreadPoolExecutor) -> None:
        if isinstance(source, HostCopy):
            target.copy_(source.data)
            return
        if target.device.type == "cpu" and self._slot_bytes is None:
            source.read_into(target, 0)  # already anonymous memory: a slot would only copy twice
            return
        slot = self._slot_for(target.device)
        # Two halves: one is filled while the other is on its way to the device.
        half, sent = slot.numel() // 2, [None, None]
        for number, begin in enumerate(range(0, target.numel(), half)):
            turn = number % 2
            part = slot[turn * half :][: min(half, target.numel() - begin)]
            _wait(sent[turn])
            step = -(-part.numel() // _READERS)
            reads = [
                readers.submit(source.read_into, part[at : at + step], begin + at)
                for at in range(0, part.numel(), step)
            ]
            for read in reads:
                read.result()
            sent[turn] = _send(target[begin : begin + part.numel()], part)
        for event in sent:
            _wait(event)

    def _slot_for(self, device: torch.device) -> torch.Tensor:
        if self._slot is None:
            size = self._slot_bytes or _SLOT
            self._slot = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        return self._slot


def _send(target: torch.Tensor, part: torch.Tensor) -> Any:
    """Copy a part of the slot to the device.

    Returns:
        What tells when it is done with the slot; None where that is when this returns. Only CUDA's events are known
        here: elsewhere a copy that went on behind would read what the next part has written over it.
    """
    if target.device.type != "cuda":
        target.copy_(part)
        return None
    target.copy_(part, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(target.device))
    return event


def _wait(event: Any) -> None:
    if event is not None:
        event.synchronize()
