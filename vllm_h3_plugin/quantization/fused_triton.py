# SPDX-License-Identifier: Apache-2.0
"""The steps of :mod:`vllm_h3_plugin.quantization.fused` as Triton kernels: one program a row, the row in registers.

Rows are taken from the last to the first. What a matrix multiplication wrote last is still in the L2 cache when these
kernels start with it, and what they write last is what the next one reads first.

Code generation for E4M3 has failed on some devices; ``fused_probe`` compiles and checks each kernel before it is used.
Import this module only where there is a CUDA device (or Triton's interpreter).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_h3_plugin.quantization.activation import QuantizedActivation
from vllm_h3_plugin.quantization.fp8 import E4M3, E4M3_MAX, SCALE_FLOOR
from vllm_h3_plugin.quantization.fused import KERNELS, FusedKernels

_MAX = tl.constexpr(E4M3_MAX)
_FLOOR = tl.constexpr(SCALE_FLOOR)


@triton.jit
def _divide(x, divisor, reciprocal):
    # Rounded to nearest as a division is, at the price of a multiplication and two FMAs: P. Markstein, "Computation of
    # elementary functions on the IBM RISC System/6000 processor", IBM J. Res. Dev. 34 (1990).
    quotient = x * reciprocal
    return tl.fma(tl.fma(-divisor, quotient, x), reciprocal, quotient)


@triton.jit
def _store_quantized(value, q_ptr, scale_ptr, original_ptr, row, columns, mask, width, KEEP: tl.constexpr):
    # ``value`` is FP32 holding BF16 numbers, 0 outside the mask. The conversion to E4M3 saturates and keeps NaN, where
    # the host's kernel makes 448 of it.
    if KEEP:
        tl.store(original_ptr + row * width + columns, value.to(tl.bfloat16), mask=mask)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value), axis=0), _MAX), _FLOOR)
    q = _divide(value, scale, tl.div_rn(1.0, scale)).to(tl.float8e4nv)
    tl.store(q_ptr + row * width + columns, q, mask=mask)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _norm_modulate_kernel(
    x_ptr,
    branch_ptr,
    gate_ptr,
    weight_ptr,
    shift_ptr,
    scale_ptr,
    index_ptr,
    residual_ptr,
    original_ptr,
    q_ptr,
    q_scale_ptr,
    rows,
    x_stride,
    branch_stride,
    gate_stride,
    shift_stride,
    scale_stride,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    GATED: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (rows - 1 - tl.program_id(0)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    index = tl.load(index_ptr + row)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        branch = tl.load(branch_ptr + row * branch_stride + columns, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + index * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
        x = (x + gate * branch).to(tl.bfloat16).to(tl.float32)
        tl.store(residual_ptr + row * WIDTH + columns, x.to(tl.bfloat16), mask=mask)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + EPS)
    # Loaded behind the sum: before it they would hold registers that more rows in flight can use.
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + index * shift_stride + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + index * scale_stride + columns, mask=mask, other=0.0).to(tl.float32)
    value = ((x * inverse * weight) * (1.0 + scale) + shift).to(tl.bfloat16).to(tl.float32)
    _store_quantized(value, q_ptr, q_scale_ptr, original_ptr, row, columns, mask, WIDTH, KEEP)


@triton.jit
def _silu_mul_kernel(
    x_ptr,
    original_ptr,
    q_ptr,
    q_scale_ptr,
    rows,
    x_stride,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (rows - 1 - tl.program_id(0)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    value = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + row * x_stride + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
        silu = (value / (1.0 + tl.exp(-value))).to(tl.bfloat16).to(tl.float32)
        value = (silu * up).to(tl.bfloat16).to(tl.float32)
    _store_quantized(value, q_ptr, q_scale_ptr, original_ptr, row, columns, mask, WIDTH, KEEP)


def _outputs(rows: int, width: int, like: torch.Tensor, keep: bool) -> tuple[torch.Tensor, ...]:
    values = torch.empty((rows, width), dtype=E4M3, device=like.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=like.device)
    original = torch.empty((rows, width), dtype=like.dtype, device=like.device) if keep else values
    return values, scale, original


def _norm(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    branch: torch.Tensor | None,
    weight: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    index: torch.Tensor,
    eps: float,
    keep: bool,
) -> tuple[torch.Tensor, QuantizedActivation]:
    rows, width = x.shape
    values, row_scale, original = _outputs(rows, width, x, keep)
    gated = gate is not None and branch is not None
    residual = torch.empty((rows, width), dtype=x.dtype, device=x.device) if gated else x
    if gate is None or branch is None:
        gate, branch = shift, x
    block = triton.next_power_of_2(width)
    if rows:
        _norm_modulate_kernel[(rows,)](
            x,
            branch,
            gate,
            weight,
            shift,
            scale,
            index,
            residual,
            original,
            values,
            row_scale,
            rows,
            x.stride(0),
            branch.stride(0),
            gate.stride(0),
            shift.stride(0),
            scale.stride(0),
            WIDTH=width,
            EPS=eps,
            GATED=gated,
            KEEP=keep,
            BLOCK=block,
            # 4 warps at 8192 columns: the fastest of 2 to 32 on an H200.
            num_warps=min(32, max(1, block // 2048)),
        )
    return residual, QuantizedActivation(values, row_scale, original if keep else None)


def norm_modulate(
    x: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    index: torch.Tensor,
    eps: float,
    *,
    keep: bool = False,
) -> QuantizedActivation:
    """See :class:`vllm_h3_plugin.quantization.fused.NormModulate`."""
    return _norm(x, None, None, weight, shift, scale, index, eps, keep)[1]


def gate_norm_modulate(
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
    """See :class:`vllm_h3_plugin.quantization.fused.GateNormModulate`."""
    return _norm(residual, gate, branch, weight, shift, scale, index, eps, keep)


def _rows(x: torch.Tensor, width: int, gated: bool, keep: bool) -> QuantizedActivation:
    rows = x.shape[0]
    values, row_scale, original = _outputs(rows, width, x, keep)
    block = triton.next_power_of_2(width)
    if rows:
        _silu_mul_kernel[(rows,)](
            x,
            original,
            values,
            row_scale,
            rows,
            x.stride(0),
            WIDTH=width,
            GATED=gated,
            KEEP=keep,
            BLOCK=block,
            # 32 warps at 16384 columns and 8 at 8192: the fastest of 4 to 32 on an H200.
            num_warps=min(32, max(1, block // (512 if gated else 1024))),
        )
    return QuantizedActivation(values, row_scale, original if keep else None)


def silu_mul(x: torch.Tensor, *, keep: bool = False) -> QuantizedActivation:
    """See :mod:`vllm_h3_plugin.quantization.fused`: ``[M, 2F] -> FP8 [M, F]``."""
    return _rows(x, x.shape[1] // 2, True, keep)


def quantize(x: torch.Tensor, *, keep: bool = False) -> QuantizedActivation:
    """See :mod:`vllm_h3_plugin.quantization.fused`: ``[M, K] -> FP8 [M, K]``."""
    packed = _rows(x, x.shape[1], False, False)
    return QuantizedActivation(packed.values, packed.scale, x) if keep else packed


TRITON = FusedKernels(norm_modulate, gate_norm_modulate, silu_mul, quantize, dict.fromkeys(KERNELS, "Triton"))
