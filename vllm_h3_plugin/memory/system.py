# SPDX-License-Identifier: Apache-2.0
"""What the memory guard may know about the machine. Each fact is a field or a function, so that tests put theirs in."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

GIB = 2**30

AVAILABLE_HOOK = "memory-available"
"""Test hook: name of a file in ``H3_RUN_DIR``. On the reference platform alone, and only while it exists, the number of
bytes in it is taken for MemAvailable."""


@dataclass(frozen=True)
class Holder:
    """A process that holds memory.

    Attributes:
        pid: process id.
        command: its name, for people.
        held_bytes: resident set size, or device memory where the guard looks at a discrete device.
    """

    pid: int
    command: str
    held_bytes: int

    def __str__(self) -> str:
        return f"{self.command} (pid {self.pid}, {self.held_bytes / GIB:.1f} GiB)"


@dataclass(frozen=True)
class MemorySystem:
    """The memory that the model and its requests are taken from.

    Attributes:
        unified: whether CPU and device take from one memory.
        name: what the numbers are of: ``MemAvailable``, or free memory of a device.
        total_bytes: all of it.
        available: bytes that can be taken now without swapping.
        holders: the processes that hold most of it, largest first.
        reference: whether this is the CPU reference platform.
    """

    unified: bool
    name: str
    total_bytes: int
    available: Callable[[], int]
    holders: Callable[[], tuple[Holder, ...]]
    reference: bool = False


def guard_active(mode: str, system: MemorySystem) -> bool:
    """Whether ``H3_MEMORY_GUARD`` (``auto``, ``on`` or ``off``) puts the guard to work on this machine.

    ``auto`` is on where memory is unified: there, a request that takes too much stops the whole machine, and not only
    itself. It stays off on the reference platform, whose clips take no memory and whose machines have little.
    """
    return mode == "on" or (mode == "auto" and system.unified and not system.reference)


def probe(device_type: str, *, reference: bool = False, run_dir: Path | None = None) -> MemorySystem:
    """Facts about this process's machine and its current device.

    Args:
        device_type: ``cuda`` looks at the current CUDA device, which must be set; anything else shares the CPU's memory
            or is not measured beyond it.
        reference: the CPU reference platform runs.
        run_dir: folder in which :data:`AVAILABLE_HOOK` is looked for on the reference platform.
    """
    if device_type == "cuda":
        import torch

        device = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(device)
        if not properties.is_integrated:
            return MemorySystem(
                unified=False,
                name=f"free memory of {properties.name}",
                total_bytes=int(properties.total_memory),
                available=lambda: int(torch.cuda.mem_get_info(device)[0]),
                holders=device_holders,
            )
    hook = run_dir / AVAILABLE_HOOK if reference and run_dir is not None else None
    return MemorySystem(
        unified=device_type == "cuda" or reference,
        name="MemAvailable",
        total_bytes=psutil.virtual_memory().total,
        available=lambda: mem_available(hook),
        holders=largest_processes,
        reference=reference,
    )


def mem_available(hook: Path | None = None) -> int:
    """``MemAvailable`` of /proc/meminfo in bytes, through psutil; or what ``hook`` says while that file exists."""
    if hook is not None:
        try:
            return int(hook.read_text(encoding="ascii"))
        except FileNotFoundError:
            pass
    return int(psutil.virtual_memory().available)


def largest_processes(count: int = 3) -> tuple[Holder, ...]:
    """Processes with the largest resident set, this one left out. Those that may not be looked at are passed over."""
    own = psutil.Process().pid
    found = []
    for process in psutil.process_iter(["name", "memory_info"]):
        memory = process.info["memory_info"]
        if memory is not None and process.pid != own:
            found.append(Holder(process.pid, process.info["name"] or "?", int(memory.rss)))
    return tuple(sorted(found, key=lambda holder: -holder.held_bytes)[:count])


def device_holders(count: int = 3) -> tuple[Holder, ...]:
    """Processes that hold device memory, as ``nvidia-smi`` tells it; nothing where it is missing or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_compute_apps(answer.stdout)[:count]


def parse_compute_apps(text: str) -> tuple[Holder, ...]:
    """Lines of ``pid, name, MiB``, largest first. A number of ``[N/A]``, which a GB10 gives, leaves the line out."""
    found = []
    for line in text.splitlines():
        pid, _, rest = line.partition(",")
        name, _, mib = rest.rpartition(",")
        if pid.strip().isdigit() and mib.strip().isdigit():
            found.append(Holder(int(pid), Path(name.strip()).name, int(mib) * 2**20))
    return tuple(sorted(found, key=lambda holder: -holder.held_bytes))
