# SPDX-License-Identifier: Apache-2.0
"""NVIDIA and Ascend devices, their drivers, and who else is on them."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_h3_plugin.preflight.check import Check, Unknown, failed, is_number, passed, warned
from vllm_h3_plugin.preflight.expected import Expected, Kind
from vllm_h3_plugin.preflight.facts import Ascend, DeviceProcess, Gpu

MIN_DRIVER = 580
"""The host's torch is built for CUDA 13.0, which needs a driver of branch 580 or later (NVIDIA, CUDA compatibility)."""

SMALL_BYTES = 2**30
"""What a process may hold without being in the way, as a desktop does."""


def gpu(found: tuple[Gpu, ...] | Unknown, expected: Expected) -> Check:
    """As many devices as the profile uses, of the generation that it is for."""
    name = "GPU"
    if isinstance(found, Unknown):
        return failed(
            name, f"no NVIDIA device can be seen: {found.reason}", "Install the NVIDIA driver; then: nvidia-smi"
        )
    if len(found) < expected.cards:
        return failed(
            name,
            f"{len(found)} visible and {expected.cards} configured in profile {expected.profile}",
            "Make all of them visible (nvidia-smi -L lists them), or choose a profile for fewer.",
        )
    used = found[: max(expected.cards, 1)]
    for device in used:
        if expected.capability is not None and device.capability != expected.capability:
            return failed(
                name,
                f"{device.name} has compute capability {device.capability}; profile {expected.profile} is for "
                f"{expected.capability}",
                "Choose the profile of this machine with --profile.",
            )
    return passed(name, "; ".join(_describe(device) for device in used))


def _describe(device: Gpu) -> str:
    memory = (
        "memory shared with the CPU (nvidia-smi says N/A, as it should)"
        if device.total_bytes is None
        else f"{device.total_bytes / 2**30:.0f} GiB"
    )
    return f"{device.name}, compute capability {device.capability}, {memory}"


def driver(found: tuple[Gpu, ...], expected: Expected) -> Check:
    """A driver that is new enough for the host's CUDA."""
    name = "driver"
    version = found[0].driver
    branch = version.partition(".")[0]
    remedy = f"Install driver {MIN_DRIVER} or later and restart the machine."
    if not is_number(branch):
        return warned(name, f"version {version!r} is not understood; {MIN_DRIVER} or later is needed", remedy)
    if int(branch) < MIN_DRIVER:
        return failed(name, f"{version}; CUDA 13 needs {MIN_DRIVER} or later", remedy)
    return passed(name, version)


def processes(found: Sequence[DeviceProcess] | Unknown, kind: Kind) -> Check:
    """Nobody else computes on the device."""
    name = "other processes"
    if isinstance(found, Unknown):
        return warned(name, f"unknown: {found.reason}", "Look for yourself: nvidia-smi")
    device = "NPU" if kind is Kind.ASCEND else "GPU"
    if not found:
        return passed(name, f"none on the {device}")
    detail = f"the {device} is in use by {', '.join(map(str, found))}"
    if all(process.held_bytes is not None and process.held_bytes < SMALL_BYTES for process in found):
        return warned(name, detail, "Nothing to do if it is the desktop; a clip takes longer while they compute.")
    return failed(
        name,
        detail,
        "End them first; a server of this kit with `make down`. What they hold is missing for the model.",
    )


def passed_cards(found: Ascend, expected: Expected, chosen: Sequence[int]) -> Check:
    """The cards that compose passes to the container.

    Args:
        chosen: their numbers (ASCEND_CARD_0 and so on).
    """
    name = "cards"
    there = [card for card in dict.fromkeys(chosen) if card in found.present]
    if len(there) == expected.cards:
        return passed(name, f"{len(there)} of {expected.cards} configured: {_nodes(there)}")
    return failed(
        name,
        f"{expected.cards} configured in profile {expected.profile} and {len(there)} visible; on this machine: "
        f"{_nodes(found.present) or 'none'}",
        "Name different cards that are there with ASCEND_CARD_0, ASCEND_CARD_1, …, or choose the profile for as many.",
    )


def _nodes(cards: Sequence[int]) -> str:
    return ", ".join(f"davinci{card}" for card in cards)


def cards(found: Ascend, expected: Expected) -> Check:
    """As many Ascend cards as the profile's roles are laid out for, no more and no fewer."""
    name = "cards"
    visible = len(found.cards)
    if visible == expected.cards:
        return passed(name, f"{visible} of {visible} configured: {_nodes(found.cards)}")
    hidden = f" ({len(found.present)} are there; {found.hidden_by} hides the others)" if found.hidden_by else ""
    return failed(
        name,
        f"{expected.cards} configured in profile {expected.profile} and {visible} visible{hidden}",
        f"Set {found.hidden_by} to {expected.cards} cards."
        if found.hidden_by and len(found.present) >= expected.cards
        else "Pass every card's /dev/davinciN, or choose the profile for as many as there are.",
    )


def ascend_driver(found: Ascend) -> Check:
    """The driver's files, device nodes and tool."""
    name = "driver"
    if found.missing:
        return failed(
            name,
            f"not there: {', '.join(found.missing)}",
            "Install the Ascend driver and firmware; in a container, mount these paths.",
        )
    if found.tool:
        return failed(name, f"npu-smi gives nothing: {found.tool}", "Mount or install npu-smi; then: npu-smi info")
    return passed(name, f"version {found.driver}" if found.driver else "all files are there; its version is unknown")
