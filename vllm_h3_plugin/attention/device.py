# SPDX-License-Identifier: Apache-2.0
"""The choice of attention kernels on a real device: its facts, its packages, its clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

import torch

from vllm_h3_plugin import __version__
from vllm_h3_plugin.attention.choice import Chooser, Report
from vllm_h3_plugin.attention.exact import Run, exact_kernels
from vllm_h3_plugin.attention.low_bit import fp8_attention, fp8_support, int8_attention, refuse
from vllm_h3_plugin.attention.preference import FLASH_PACKAGES, DeviceFacts, dotted, explain
from vllm_h3_plugin.attention.remembered import ChoiceFile
from vllm_h3_plugin.errors import one_line
from vllm_h3_plugin.quantization.recipe import AttentionPrecision

_FLASH_MODULES = (
    ("fa3_fwd_interface", "fa3"),
    ("flash_attn_interface", "fa3"),
    ("flash_attn.cute", "fa4"),
    ("flash_attn", "fa2"),
)
"""Modules that hold a ``flash_attn_func``, in the order in which the host looks for them (backends/utils/fa.py)."""


@dataclass(frozen=True)
class FlashPackage:
    """A FlashAttention package that could be imported.

    Attributes:
        kernel: ``fa2``, ``fa3`` or ``fa4``.
        label: kernel, package and version, for people.
        function: its ``flash_attn_func``.
    """

    kernel: str
    label: str
    function: Callable[..., Any]


def find_flash(capability: int) -> FlashPackage | None:
    """The first FlashAttention package that has kernels for a capability (``10 * major + minor``) and imports."""
    for module, kernel in _FLASH_MODULES:
        if capability // 10 not in FLASH_PACKAGES[kernel]:
            continue
        try:
            function = import_module(module).flash_attn_func
        except (ImportError, AttributeError, OSError, RuntimeError):
            # Not installed, or built for another torch; the next may do, and the log says which kernels are missing.
            continue
        return FlashPackage(kernel, f"{kernel} ({package_version(module)})", function)
    return None


def package_version(module: str) -> str:
    """``name version`` of the package that a module comes from; the module's name alone if that is unknown."""
    top = module.split(".")[0]
    for distribution in packages_distributions().get(top, [top]):
        try:
            return f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            continue
    return top


def device_facts(device: torch.device, flash: FlashPackage | None = None) -> DeviceFacts:
    """Facts of a device. ``flash`` is the package that :func:`find_flash` found for it."""
    if device.type != "cuda":
        return DeviceFacts(device.type, device.type, None, torch.__version__, None, None)
    return DeviceFacts(
        device="cuda",
        name=torch.cuda.get_device_name(device),
        capability=device_capability(device),
        torch=torch.__version__,
        cudnn=torch.backends.cudnn.version(),
        flash=flash.label if flash else None,
    )


def device_capability(device: torch.device) -> int:
    """CUDA compute capability as ``10 * major + minor``."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def cuda_timer(run: Callable[[], object], times: int) -> float:
    """``choice.Timer`` by CUDA events on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def cuda_chooser(device: torch.device, folder: Path | None, report: Report) -> Chooser:
    """The chooser of a CUDA device, as the server uses it. Says in the log what the device will pick, and why.

    Args:
        folder: where measurements are remembered; None: nowhere.
        report: is told every decision.
    """
    flash = find_flash(device_capability(device))
    facts = device_facts(device, flash)
    kernels = exact_kernels(facts, flash.function if flash else None)
    report(explain(facts.capability, {kernel.name: kernel.available for kernel in kernels}))
    return Chooser(
        kernels,
        timer=cuda_timer,
        report=report,
        memory=ChoiceFile(folder, facts, __version__) if folder is not None else None,
        capturing=torch.cuda.is_current_stream_capturing,
    )


def cuda_low_bit(precision: AttentionPrecision, device: torch.device) -> Run:
    """Attention in few bits on a CUDA device, tried once on a small input.

    Raises:
        BackendError: the package or the kernels for this chip are missing, or what they compute is wrong.
    """
    capability = device_capability(device)
    if precision is AttentionPrecision.FP8:
        run, package = _fp8(capability)
    else:
        run, package = _int8()
    where = f"{package} on {torch.cuda.get_device_name(device)} (SM {dotted(capability)})"
    try:
        error = trial_error(run, device)
    except Exception as exc:
        raise refuse(precision, f"{where} failed: {one_line(exc)}") from exc
    if not error <= TRIAL_TOLERANCE:
        raise refuse(precision, f"{where} is wrong by {error:.0%} on a small input")
    return run


TRIAL_TOLERANCE = 0.15
"""Relative error on Gaussian data above which low-bit attention is broken and not coarse (FP8 has 0.054)."""


def trial_error(run: Run, device: torch.device) -> float:
    """Relative error against FP32 on a small Gaussian input with keys off centre: 192 queries, 150 keys, 4 heads."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, 192, 4, 128, generator=generator, device=device) for _ in range(3))
    q, k, v = (x.bfloat16() for x in (q, k + 2 * k[:, :1], v))
    k, v = k[:, :150], v[:, :150]
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * 128**-0.5
    exact = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.float())
    return ((run(q, k, v, 128**-0.5).float() - exact).norm() / exact.norm()).item()


def _fp8(capability: int) -> tuple[Run, str]:
    flash = find_flash(capability)
    support = fp8_support(capability, flash.label if flash else None)
    if not support or flash is None:
        raise refuse(AttentionPrecision.FP8, support.reason)
    from vllm_h3_plugin.attention.low_bit_triton import quantize_heads

    return fp8_attention(flash.function, quantize_heads), flash.label


def _int8() -> tuple[Run, str]:
    try:
        function = import_module("sageattention").sageattn
    except (ImportError, AttributeError, OSError, RuntimeError) as exc:
        raise refuse(
            AttentionPrecision.INT8, f"the package sageattention cannot be imported ({one_line(exc)})"
        ) from exc
    package = package_version("sageattention")
    return int8_attention(function, changes_keys=package.split()[-1].startswith("1.")), package
