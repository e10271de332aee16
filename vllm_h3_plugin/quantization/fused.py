# SPDX-License-Identifier: Apache-2.0
"""What stands between the matrix multiplications of a DiT block, each step ending in FP8 with a scale per token.

    norm_modulate        RMSNorm(x) * (1 + scale[i]) + shift[i]                             -> FP8 [M, H]
    gate_norm_modulate   r = residual + gate[i] * branch; RMSNorm(r) * (1 + scale[i]) + shift[i] -> r, FP8 [M, H]
    silu_mul             silu(x[:, :F]) * x[:, F:]                                          -> FP8 [M, F]
    quantize             x                                                                  -> FP8 [M, K]

``i`` is each row's index into the modulation rows. The first three read their input once and write FP8, where separate
kernels write BF16 and read it again. :func:`compose` makes the same set out of separate kernels: it is the twin that
the fused ones are held to, what the CPU computes, and what stands in for a kernel that a device cannot compile.

Rounding, equal in all forms: FP32 inside; the result, the residual and SiLU are rounded to BF16 where the host's own
kernels do (vllm_omni ``diffusion/layers/indexed_modulation.py``, vLLM ``csrc/activation_kernels.cu``); then
``quantization/fp8.py``'s per-token quantization of the BF16 value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.nn import functional as F

from vllm_h3_plugin.quantization import fp8
from vllm_h3_plugin.quantization.activation import QuantizedActivation

KERNELS = ("norm_modulate", "gate_norm_modulate", "silu_mul", "quantize")


class NormModulate(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        shift: torch.Tensor,
        scale: torch.Tensor,
        index: torch.Tensor,
        eps: float,
        *,
        keep: bool = False,
    ) -> QuantizedActivation:
        """``x [M, H]``, ``weight [H]``, ``shift``/``scale [R, H]``, all BF16; ``index [M]`` INT64 below R."""


class GateNormModulate(Protocol):
    def __call__(
        self,
        residual: torch.Tensor,
        gate: torch.Tensor,
        branch: torch.Tensor,
        weight: torch.Tensor,
        shift: torch.Tensor,
        scale: torch.Tensor,
        index: torch.Tensor,
        eps: float,
        *,
        keep: bool = False,
    ) -> tuple[torch.Tensor, QuantizedActivation]:
        """``residual``/``branch [M, H]``, ``gate [R, H]`` BF16; the rest as in :class:`NormModulate`."""


class Quantize(Protocol):
    def __call__(self, x: torch.Tensor, *, keep: bool = False) -> QuantizedActivation:
        """``x [M, K]`` BF16, rows contiguous. ``keep``: also return the BF16 that was quantized."""


@dataclass(frozen=True)
class FusedKernels:
    """One implementation of each step.

    Attributes:
        source: how each is computed, by name, for logs and reports.
    """

    norm_modulate: NormModulate
    gate_norm_modulate: GateNormModulate
    silu_mul: Quantize
    quantize: Quantize
    source: Mapping[str, str] = field(default_factory=dict)


Rows = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def compose(
    norm_modulate: Callable[..., torch.Tensor],
    gate_norm_modulate: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    silu_mul: Callable[[torch.Tensor], torch.Tensor],
    quantize: Rows,
    source: str,
) -> FusedKernels:
    """The set made of kernels that end in BF16 and one that quantizes rows.

    Args:
        norm_modulate: ``(x, weight, shift, scale, index, eps) -> [M, H]``.
        gate_norm_modulate: ``(residual, gate, branch, weight, shift, scale, index, eps) -> ([M, H], [M, H])``.
        silu_mul: ``[M, 2F] -> [M, F]``.
        quantize: ``[M, K] -> (E4M3 [M, K], FP32 [M, 1])``.
        source: what to call them.
    """

    def pack(x: torch.Tensor, keep: bool) -> QuantizedActivation:
        values, scale = quantize(x)
        return QuantizedActivation(values, scale, x if keep else None)

    def normed(
        x: torch.Tensor,
        weight: torch.Tensor,
        shift: torch.Tensor,
        scale: torch.Tensor,
        index: torch.Tensor,
        eps: float,
        *,
        keep: bool = False,
    ) -> QuantizedActivation:
        return pack(norm_modulate(x, weight, shift, scale, index, eps), keep)

    def gated(
        residual: torch.Tensor,
        gate: torch.Tensor,
        branch: torch.Tensor,
        weight: torch.Tensor,
        shift: torch.Tensor,
        scale: torch.Tensor,
        index: torch.Tensor,
        eps: float,
        *,
        keep: bool = False,
    ) -> tuple[torch.Tensor, QuantizedActivation]:
        updated, x = gate_norm_modulate(residual, gate, branch, weight, shift, scale, index, eps)
        return updated, pack(x, keep)

    def activated(x: torch.Tensor, *, keep: bool = False) -> QuantizedActivation:
        return pack(silu_mul(x), keep)

    def quantized(x: torch.Tensor, *, keep: bool = False) -> QuantizedActivation:
        return pack(x, keep)

    return FusedKernels(normed, gated, activated, quantized, dict.fromkeys(KERNELS, source))


def norm_modulate(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, index: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm and indexed modulation in plain torch, FP32 inside, rounded once to ``x.dtype``."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (normed * (1.0 + scale[index].float()) + shift[index].float()).to(x.dtype)


def gate_norm_modulate(
    residual: torch.Tensor,
    gate: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    index: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated residual, rounded to ``residual.dtype``, and :func:`norm_modulate` of it."""
    updated = (residual.float() + gate[index].float() * branch.float()).to(residual.dtype)
    return updated, norm_modulate(updated, weight, shift, scale, index, eps)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[M, 2F]``; SiLU is rounded before the product, as in the host's kernels."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


TWINS = compose(norm_modulate, gate_norm_modulate, silu_mul, fp8.quantize_activation, "plain torch")
"""What fused kernels are held to, on any device."""
