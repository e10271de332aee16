# SPDX-License-Identifier: Apache-2.0
"""Which exact attention kernels a device can have, in which order they are preferred, and why. Imports no torch.

Every function here is pure, so that one machine can say what another will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_h3_plugin.quantization.contract import Support

FLASH_PACKAGES = {"fa3": (8, 9), "fa4": (9, 10, 11, 12), "fa2": (8, 9)}
"""FlashAttention packages -> major compute capabilities that they bring kernels for.

``fa3``: ``fa3_fwd`` 0.0.3 is built for SM 8.x and 9.0 (its ``fa3_fwd_config``). ``fa4``: ``flash_attn.cute``. ``fa2``:
``flash_attn`` is importable on Blackwell and dies there with "no kernel image" (vllm_omni/platforms/cuda/platform.py).
"""
SDPA_KERNELS = ("cudnn", "flash", "memory_efficient", "math")
"""Kernels behind ``torch.nn.functional.scaled_dot_product_attention``."""
NAMES = (*FLASH_PACKAGES, *SDPA_KERNELS)

CUDNN_BLACKWELL = 90500
"""First cuDNN with Blackwell's fused attention, as ``torch.backends.cudnn.version()`` counts (same file)."""


@dataclass(frozen=True)
class DeviceFacts:
    """What the choice of an attention kernel depends on, collected once.

    Attributes:
        device: torch device type (``"cuda"``, ``"cpu"``).
        name: the device's name.
        capability: CUDA compute capability as ``10 * major + minor`` (90 on an H200, 121 on a GB10); None without one.
        torch: torch's version.
        cudnn: cuDNN's version as one number (91002 is 9.10.2); None without cuDNN.
        flash: FlashAttention package as ``kernel (package version)``, for example ``fa3 (fa3_fwd 0.0.3)``; None if
            there is none.
    """

    device: str
    name: str
    capability: int | None
    torch: str
    cudnn: int | None
    flash: str | None


def preference(capability: int | None) -> tuple[str, ...]:
    """Names of all exact kernels, best first, as far as is known before anything is measured.

    On an H200 FA3 was 11 % faster than cuDNN at 38 016 rows, and torch's own flash kernel slower than both. On SM 8.x
    torch's flash kernel stands before cuDNN, as the host has it. On Blackwell cuDNN's is the tuned one.
    """
    if capability is None:
        return ("flash", "memory_efficient", "math")
    if capability // 10 == 8:
        return ("fa3", "fa2", "flash", "cudnn", "memory_efficient", "math")
    if capability // 10 == 9:
        return ("fa3", "cudnn", "fa4", "fa2", "flash", "memory_efficient", "math")
    return ("cudnn", "fa4", "flash", "memory_efficient", "math", "fa3", "fa2")


def availability(capability: int | None, cudnn: int | None, flash: str | None) -> dict[str, Support]:
    """Which exact kernels a device should have, in order of preference, each with the reason.

    Args:
        capability: as in :class:`DeviceFacts`; None for a CPU.
        cudnn: as in :class:`DeviceFacts`.
        flash: kernel name of the FlashAttention package, or its description (``fa3 (fa3_fwd 0.0.3)``); None without.
    """
    return {name: _support(name, capability, cudnn, flash) for name in preference(capability)}


def _support(name: str, capability: int | None, cudnn: int | None, flash: str | None) -> Support:
    if name in FLASH_PACKAGES:
        assert capability is not None  # not on the CPU's list
        majors = FLASH_PACKAGES[name]
        if capability // 10 not in majors:
            return Support(False, f"{name} has no kernels for SM {dotted(capability)}")
        if flash is None or flash.split()[0] != name:
            return Support(False, f"no package with {name} is installed")
        return Support(True, flash)
    if name == "cudnn" and cudnn is None:
        return Support(False, "torch has no cuDNN here")
    if name == "cudnn" and capability is not None and capability >= 100 and (cudnn or 0) < CUDNN_BLACKWELL:
        return Support(False, f"cuDNN {cudnn} is older than {CUDNN_BLACKWELL}, the first with kernels for Blackwell")
    if name == "cudnn":
        return Support(True, f"cuDNN {cudnn}")
    return Support(True, "part of torch")


def explain(capability: int | None, available: Mapping[str, Support]) -> str:
    """What a device will pick and why, in sentences for a log or a doctor.

    Args:
        capability: as in :class:`DeviceFacts`.
        available: of :func:`availability`, for the same device or for one that is not here.
    """
    order = [name for name in preference(capability) if available.get(name)]
    missing = [
        f"{name}: {available[name].reason}"
        for name in preference(capability)
        if name in available and not available[name]
    ]
    device = "a CPU" if capability is None else f"SM {dotted(capability)}"
    if not order:
        return f"attention on {device}: no exact kernel can run ({'; '.join(missing)})"
    text = f"attention on {device}: {order[0]} ({available[order[0]].reason})"
    if len(order) > 1:
        text += f" unless a short measurement at the first use of a size finds a faster one of {', '.join(order[1:])}"
    if missing:
        text += f". Not available: {'; '.join(missing)}"
    return text


def dotted(capability: int) -> str:
    """121 -> ``12.1``."""
    return f"{capability // 10}.{capability % 10}"
