# SPDX-License-Identifier: Apache-2.0
"""Memory, swap, /dev/shm and disk against what the recipe needs."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_h3_plugin.preflight.check import Check, Unknown, failed, passed, warned
from vllm_h3_plugin.preflight.facts import Gpu, Room
from vllm_h3_plugin.preflight.machine import Disk, Memory
from vllm_h3_plugin.preflight.need import CLASSIC_GATE, GIB, USUAL_CLIP, Need

IMAGE_ALLOWANCE = 30 * GIB
"""Room asked for the image and its build. An allowance that was chosen, not measured: the host's environment alone
takes 8.5 GB, and an image is pulled packed and kept unpacked."""

SHM_DOCKER_DEFAULT = 64 * 2**20
"""What a container gets when nobody sizes its /dev/shm."""

SHM_WANTED = 362 * 1344 * 768 * 3 * 4
"""Bytes of one 15 s clip (362 frames) at 1344x768 in FP32, the largest that crosses processes."""

LEFT_TO_THE_MACHINE = 8 * GIB
"""What a container's memory limit leaves to everything else."""

SWAP_IN_USE = GIB
"""Swap in use from which it is worth a word."""

_CLIP = f"a {USUAL_CLIP.frames / 24:.0f} s clip at {USUAL_CLIP.width}x{USUAL_CLIP.height}"


def unified_memory(memory: Memory, need: Need, floor: int) -> Check:
    """MemAvailable of a machine whose CPU and GPU share memory.

    Args:
        floor: bytes that must remain (``H3_MEMORY_FLOOR_GIB``).
    """
    name = "memory"
    available = memory.available_bytes
    start, clip = need.resident + floor, need.resident + need.clip + floor
    basis = (
        f"recipe {need.recipe} ({need.model}) holds {_gib(need.resident)} with its processes, and {_gib(floor)} must "
        "remain free"
    )
    if need.classic and start < CLASSIC_GATE:
        start, clip = CLASSIC_GATE, max(clip, CLASSIC_GATE)
        basis = (
            f"recipe {need.recipe} keeps the AdaLN weights resident, and such a server asks for {_gib(CLASSIC_GATE)}"
        )
    if start > memory.total_bytes:
        return failed(
            name,
            f"{_gib(start)} are needed and the machine has {_gib(memory.total_bytes)}: {basis}",
            "Choose a recipe that holds less with --recipe; `vllm-h3 memory --true-size` compares them.",
        )
    if available < start:
        held = f"; most is held by {', '.join(memory.holders)}" if memory.holders else ""
        return failed(
            name,
            f"MemAvailable is {_gib(available)} and {_gib(start)} are needed: {basis}{held}",
            "End what is not needed (an earlier server: make down), or choose a recipe that holds less with --recipe.",
        )
    if available < clip:
        return warned(
            name,
            f"MemAvailable is {_gib(available)}: the server starts, and {_CLIP} needs {_gib(clip)} in all: {basis}",
            "End what is not needed, or ask for shorter clips; `vllm-h3 memory` says what fits.",
        )
    return passed(name, f"MemAvailable {_gib(available)}, needed with {_CLIP} {_gib(clip)}: {basis}")


def device_memory(found: Sequence[Gpu], need: Need) -> Check:
    """Free memory of a GPU with a memory of its own."""
    name = "memory"
    free = min((device.free_bytes for device in found if device.free_bytes is not None), default=None)
    if free is None:
        return warned(name, "nvidia-smi does not tell the GPU's free memory", "Look for yourself: nvidia-smi")
    whole = max(need.load_peak, need.resident + need.clip_device)
    basis = f"recipe {need.recipe} ({need.model})"
    if free < need.load_peak:
        return failed(
            name,
            f"the GPU has {_gib(free)} free and loading takes {_gib(need.load_peak)}: {basis}",
            "End what else uses the GPU, or choose a recipe that holds less with --recipe.",
        )
    if free < whole:
        return warned(
            name,
            f"the GPU has {_gib(free)} free: the server starts, and {_CLIP} needs {_gib(whole)}: {basis}",
            "Ask for shorter clips; `vllm-h3 memory` says what fits.",
        )
    return passed(name, f"the GPU has {_gib(free)} free, needed with {_CLIP} {_gib(whole)}: {basis}")


def swap(memory: Memory) -> Check:
    """Swap that is in use means that memory was short already."""
    name = "swap"
    used = memory.swap_used_bytes
    if used >= SWAP_IN_USE:
        return warned(
            name,
            f"{_gib(used)} of {_gib(memory.swap_total_bytes)} in use: memory has run short before, and a model that is "
            "swapped out makes no clips",
            "End what is not needed; then, where there is room to take it back: sudo swapoff -a && sudo swapon -a",
        )
    if not memory.swap_total_bytes:
        return passed(name, "none; the memory guard ends a request before memory runs out")
    return passed(name, f"{_gib(memory.swap_total_bytes)}, {_gib(used)} in use")


def container_memory(text: str | None, size: int | None, memory: Memory, need: Need, *, unified: bool) -> Check:
    """The most that the container may take (VLLM_H3_MEMORY_LIMIT): enough for the server, and not the whole machine.

    Args:
        text: as compose gets it; None where it has no default and none was set.
        size: the same in bytes; None if it cannot be read.
        unified: CPU and GPU share memory. Whether the driver's allocations count against a container's limit depends
            on the driver, so the limit has to bear all of them.
    """
    name = "memory limit"
    if text is None:
        return failed(name, "VLLM_H3_MEMORY_LIMIT is not set", "Set it in .env, and leave the machine some 8 GiB.")
    if size is None:
        return failed(name, f"VLLM_H3_MEMORY_LIMIT={text!r} is no size", "Set it to a size such as 110g.")
    wanted = need.resident + need.clip if unified else need.clip - need.clip_device
    if size < wanted:
        return failed(
            name,
            f"the container may take {_gib(size)}, and recipe {need.recipe} with {_CLIP} takes {_gib(wanted)}",
            f"Set VLLM_H3_MEMORY_LIMIT to at least {wanted / GIB:.0f}g, or choose a recipe that holds less.",
        )
    if size > memory.total_bytes - LEFT_TO_THE_MACHINE:
        return warned(
            name,
            f"the container may take {_gib(size)} of {_gib(memory.total_bytes)}: a machine without memory hangs",
            f"Set VLLM_H3_MEMORY_LIMIT to at most {(memory.total_bytes - LEFT_TO_THE_MACHINE) / GIB:.0f}g.",
        )
    return passed(name, f"the container may take {_gib(size)} of {_gib(memory.total_bytes)}")


def container_shared_memory(text: str, size: int | None) -> Check:
    """/dev/shm of the container, as compose sizes it.

    Args:
        text: VLLM_H3_SHM_SIZE, or its default.
        size: the same in bytes; None if it cannot be read.
    """
    name = "/dev/shm"
    remedy = f"Set VLLM_H3_SHM_SIZE to 8g, or to at least {SHM_WANTED / GIB:.0f}g."
    if size is None:
        return failed(name, f"VLLM_H3_SHM_SIZE={text!r} is no size", remedy)
    if size < SHM_WANTED:
        return warned(name, f"the container gets {text}, and a long clip may take {_gib(SHM_WANTED)}", remedy)
    return passed(name, f"the container gets {text}")


def shared_memory(found: Disk | Unknown) -> Check:
    """/dev/shm of this machine, in which frames cross from the worker to the server."""
    name = "/dev/shm"
    if isinstance(found, Unknown):
        return warned(name, found.reason, "Mount it: a worker without it dies with a bus error.")
    if found.path != "/dev/shm":
        return failed(name, "there is none", "Mount a tmpfs there: a worker without it dies with a bus error.")
    remedy = "Make it larger: --shm-size 8g or --ipc host for a container, `mount -o remount,size=8G /dev/shm` else."
    size = f"{_gib(found.total_bytes)}, {_gib(found.free_bytes)} free"
    if found.total_bytes <= SHM_DOCKER_DEFAULT:
        return failed(name, f"{size}: a container's default; a worker dies with a bus error after some clips", remedy)
    if found.free_bytes < SHM_WANTED:
        return warned(name, f"{size}; a long clip may take {_gib(SHM_WANTED)}", remedy)
    return passed(name, size)


def disk(room: Room, need: Need, *, containers: bool, image_here: bool, snapshots: bool, tables: int) -> Check:
    """Room for image, snapshot and tables, added up where they share a file system.

    Args:
        containers: whether an image is pulled and built at all.
        image_here: whether the engine has the pinned image already.
        snapshots: whether ``H3_SNAPSHOT`` lets a snapshot be written.
        tables: bytes that the cache may fill with tables (``H3_ADALN_DISK_GIB``).
    """
    name = "disk"
    image = IMAGE_ALLOWANCE if containers and not image_here else 0
    snapshot = need.snapshot if snapshots and room.snapshot is not True else 0
    wanted: dict[int, tuple[Disk, list[str], int]] = {}
    for place, what, size in (
        (room.images, "image and build (an allowance)", image),
        (room.cache, "quantized snapshot", snapshot),
        (room.cache, "AdaLN table", min(need.table, tables)),
    ):
        if not size:
            continue
        if isinstance(place, Unknown):
            return warned(name, f"room for the {what} is unknown: {place.reason}", "Look for yourself: df -h")
        known, parts, total = wanted.get(place.device, (place, [], 0))
        wanted[place.device] = (known, [*parts, f"{what} {_gib(size)}"], total + size)
    texts = []
    for place, parts, total in wanted.values():
        text = f"{_gib(place.free_bytes)} free at {place.path}, needed {_gib(total)} ({', '.join(parts)})"
        if place.free_bytes < total:
            remedy = (
                "Free space there, or move: H3_CACHE_DIR (without a container) for snapshot and tables, docker's "
                "data-root for the rest; H3_SNAPSHOT=off does without a snapshot."
            )
            if isinstance(room.snapshot, Unknown) and place.free_bytes >= total - snapshot:
                return warned(name, f"{text}; a snapshot may be there already ({room.snapshot.reason})", remedy)
            return failed(name, text, remedy)
        texts.append(text)
    return passed(name, "; ".join(texts) or "nothing more is written: image and snapshot are there")


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB"
