# SPDX-License-Identifier: Apache-2.0
"""What a server holds of this machine's memory, and whether it came back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_h3_plugin.kit.containers import Container
from vllm_h3_plugin.kit.outside import Outside
from vllm_h3_plugin.kit.project import Project
from vllm_h3_plugin.kit.words import GIB, gib
from vllm_h3_plugin.preflight import probe
from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.preflight.facts import DeviceProcess
from vllm_h3_plugin.preflight.machine import Ran

SLACK_BYTES, SLACK = GIB, 0.1
"""What may be missing: a tenth or a GiB, whichever is more. Other programs live on the machine too."""


@dataclass(frozen=True)
class Held:
    """What a server held, and what was free beside it.

    Attributes:
        pids: its processes, by this machine's numbers; empty where the engine does not tell.
        main_bytes: of main memory, device memory included where that is the same.
        own_bytes: of devices that have memory of their own.
        available_bytes: MemAvailable at that moment.
    """

    pids: frozenset[int] = field(default_factory=frozenset)
    main_bytes: int = 0
    own_bytes: int = 0
    available_bytes: int = 0

    def and_also(self, other: Held) -> Held:
        """What both held; what was free is ``other``'s, which was measured later."""
        main, own = self.main_bytes + other.main_bytes, self.own_bytes + other.own_bytes
        return Held(self.pids | other.pids, main, own, other.available_bytes)


@dataclass(frozen=True)
class Missing:
    """What has not come back.

    Attributes:
        bytes: of main memory; within the slack it counts as nothing.
        pids: processes of the server that still live, or still stand in a device's list.
        holders: who holds memory now, in words.
    """

    bytes: int = 0
    pids: tuple[int, ...] = ()
    available_bytes: int = 0
    holders: str = ""

    @property
    def anything(self) -> bool:
        """Whether there is something to wait for."""
        return bool(self.bytes or self.pids)

    def __str__(self) -> str:
        parts = [f"{gib(self.bytes)} are missing ({gib(self.available_bytes)} are available)"] if self.bytes else []
        if self.pids:
            parts.append(f"its processes {', '.join(map(str, self.pids))} still hold memory")
        return ", and ".join(parts)


def measure(outside: Outside, project: Project, container: Container, info: Mapping[str, Any]) -> Held:
    """What a running container holds now.

    On unified memory the weights are in no process's resident set: they are counted from the driver's list of
    processes or, where that has no number, from what the workers say of their own allocators.

    Args:
        info: the server's ``/v1/h3/info``; empty where it does not say.
    """
    pids = _pids(outside, project, container)
    main = sum(outside.held_bytes(pid) or 0 for pid in pids)
    listed = [one.held_bytes for one in _device_processes(outside) if one.pid in pids]
    told = [int((worker.get("memory") or {}).get("resident_bytes") or 0) for worker in _on_devices(info)]
    device = sum(one for one in listed if one is not None) or sum(told)
    unified = _unified(outside)
    return Held(
        pids=frozenset(pids),
        main_bytes=main + (device if unified else 0),
        own_bytes=0 if unified else device,
        available_bytes=outside.machine.memory().available_bytes,
    )


def still_missing(outside: Outside, held: Held) -> Missing:
    """What of it is not back yet."""
    memory = outside.machine.memory()
    devices = _device_processes(outside) if held.pids else ()
    alive = {pid for pid in held.pids if outside.held_bytes(pid) is not None}
    alive |= {one.pid for one in devices if one.pid in held.pids}
    lacking = held.available_bytes + held.main_bytes - memory.available_bytes
    if lacking <= max(SLACK_BYTES, int(SLACK * held.main_bytes)):
        lacking = 0
    on_device = [f"{one.name} (pid {one.pid}, on the device)" for one in devices]
    return Missing(lacking, tuple(sorted(alive)), memory.available_bytes, ", ".join([*on_device, *memory.holders]))


def _pids(outside: Outside, project: Project, container: Container) -> tuple[int, ...]:
    answer = outside.run((project.engine, "top", container.id, "-eo", "pid"))
    return tuple(map(int, re.findall(r"^\s*(\d+)\s*$", answer.stdout, re.MULTILINE))) if isinstance(answer, Ran) else ()


def _device_processes(outside: Outside) -> tuple[DeviceProcess, ...]:
    found = probe.gpu_processes(outside.machine)
    return probe.ascend(outside.machine).processes if isinstance(found, Unknown) else found


def _unified(outside: Outside) -> bool:
    gpus = probe.gpus(outside.machine)
    return not isinstance(gpus, Unknown) and bool(gpus) and all(gpu.unified for gpu in gpus)


def _on_devices(info: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    # On the CPU the parts lie in the process's own memory, which is counted already.
    return [
        one for one in info.get("workers") or [] if not str((one.get("memory") or {}).get("device")).startswith("cpu")
    ]
