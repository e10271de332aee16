# SPDX-License-Identifier: Apache-2.0
"""Compile each Triton kernel of a step on the device and hold it to its twin, before anything depends on it.

Triton's code generation for E4M3 has failed on compute capability 12.1 for others. A kernel that does not compile, or
whose result differs from plain torch, is not used; why is kept for the log and for `vllm-h3 doctor`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vllm_h3_plugin.errors import one_line
from vllm_h3_plugin.quantization import fused
from vllm_h3_plugin.quantization.activation import QuantizedActivation

# Widths of the real model: kernels are compiled for the block size, which follows from them.
_HIDDEN, _FFN, _INNER, _ROWS, _EPS = 5376, 14336, 7168, 64, 1e-5
_DIFFERENT = 1e-3
"""Share of E4M3 values that may differ by one step: sums in another order move values across a rounding boundary.
Measured on an H200: 1e-6."""


@dataclass(frozen=True)
class Probe:
    """One kernel on one device.

    Attributes:
        name: of the step.
        ok: whether it compiled and agrees with plain torch.
        reason: a sentence.
        seconds: compiling and checking.
    """

    name: str
    ok: bool
    reason: str
    seconds: float


def probe_kernels(device: torch.device) -> tuple[Probe, ...]:
    """Probe every kernel of a step on a CUDA device. Never raises for a kernel that fails."""
    return tuple(probe(name, partial(_fault, name, given)) for name, given in _arguments(device).items())


def probe(name: str, case: Callable[[], str | None]) -> Probe:
    """Run one case; it answers None, or what is wrong."""
    started = time.perf_counter()
    try:
        fault = case()
    except Exception as error:  # noqa: BLE001  # whatever the compiler raises
        fault = one_line(error)
    seconds = time.perf_counter() - started
    if fault is None:
        return Probe(name, True, f"Triton, compiled and equal to its twin in {seconds:.1f} s", seconds)
    return Probe(name, False, f"not used, the host's kernels stand in ({fault})", seconds)


def disagreement(got: QuantizedActivation, want: QuantizedActivation) -> str | None:
    """What is wrong with a quantized activation; None if at most a few values differ by one rounding step."""
    # Turned round, so that NaN, which is not above anything, counts.
    scales = int((~((got.scale - want.scale).abs() <= want.scale.abs() * 2**-7)).sum())
    if scales:
        return f"{scales} of {got.scale.numel()} scales differ"
    # Neighbouring E4M3 numbers of one sign are neighbouring bytes; both zeros are equal.
    apart = (got.values.view(torch.uint8).int() - want.values.view(torch.uint8).int()).abs()
    apart = apart.masked_fill((got.values.float() == 0) & (want.values.float() == 0), 0)
    far = int((apart > 1).sum())
    if far:
        return f"{far} of {apart.numel()} values differ by more than a rounding step"
    share = float((apart > 0).float().mean())
    return f"{share:.1%} of values differ" if share > _DIFFERENT else None


def _fault(name: str, given: tuple[Any, ...]) -> str | None:
    """What is wrong with one kernel's result on these arguments."""
    from vllm_h3_plugin.quantization.fused_triton import TRITON

    got, want = (getattr(kernels, name)(*given) for kernels in (TRITON, fused.TWINS))
    if isinstance(got, QuantizedActivation):
        return disagreement(got, want)
    (residual, got), (expected, want) = got, want
    differ = int((residual != expected).sum())
    return f"{differ} residual values differ" if differ > _DIFFERENT * expected.numel() else disagreement(got, want)


def _arguments(device: torch.device) -> dict[str, tuple[Any, ...]]:
    """What each kernel is tried on, by its name."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(torch.bfloat16)

    x, branch, weight = normal(_ROWS, _HIDDEN), normal(_ROWS, _HIDDEN), normal(_HIDDEN)
    shift, scale, gate = normal(6, 6 * _HIDDEN).chunk(6, dim=-1)[:3]
    modulation = (weight, shift, scale, torch.arange(_ROWS, device=device) % 6, _EPS)
    return {
        "norm_modulate": (x, *modulation),
        "gate_norm_modulate": (x, gate, branch, *modulation),
        "silu_mul": (normal(_ROWS, 2 * _FFN),),
        "quantize": (normal(_ROWS, _INNER),),
    }
