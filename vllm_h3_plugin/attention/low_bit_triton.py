# SPDX-License-Identifier: Apache-2.0
"""``low_bit.quantize_heads`` as two Triton kernels: one reads queries, keys and values for their largest magnitudes,
one reads them again and writes FP8. Same elements and scales as the reference.

Nothing is read back from the device, and the result does not depend on the order of programs: a maximum has none.
Import this module only where there is a CUDA device (or Triton's interpreter).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_h3_plugin.attention.low_bit import SCALE_FLOOR, Fp8Inputs
from vllm_h3_plugin.quantization.fp8 import E4M3, E4M3_MAX

ROWS_PER_PROGRAM = 64

_MAX = tl.constexpr(E4M3_MAX)
_FLOOR = tl.constexpr(SCALE_FLOOR)


@triton.jit
def _load_rows(
    q_ptr, k_ptr, v_ptr, mean_ptr, which, head, row, q_rows, k_rows, q_stride, k_stride, v_stride, DIM: tl.constexpr
):
    # ``which``: 0 queries, 1 keys, 2 values, the last two smoothed. Returns FP32 rows, zeros outside.
    x_ptr = q_ptr
    rows = q_rows
    stride = q_stride
    if which == 1:
        x_ptr = k_ptr
        rows = k_rows
        stride = k_stride
    if which == 2:
        x_ptr = v_ptr
        rows = k_rows
        stride = v_stride
    column = tl.arange(0, DIM)
    inside = (row < rows)[:, None]
    # 64 bits: 100 000 rows of a fused QKV are more than 2^31 elements.
    offset = row.to(tl.int64)[:, None] * stride + head * DIM + column[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    heads = tl.num_programs(0)
    row_of_mean = tl.where(which == 2, heads, 0) + head
    mean = tl.load(mean_ptr + row_of_mean * DIM + column, mask=(column < DIM) & (which > 0), other=0.0)
    return tl.where(inside, x - mean[None, :], 0.0), inside


# Row counts of 1 would otherwise become constants, which cannot take a variable's place in ``_load_rows``.
@triton.jit(do_not_specialize=["q_rows", "k_rows"])
def _largest_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mean_ptr,
    largest_ptr,
    q_rows,
    k_rows,
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    head, which = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    x, _ = _load_rows(
        q_ptr, k_ptr, v_ptr, mean_ptr, which, head, row, q_rows, k_rows, q_stride, k_stride, v_stride, DIM
    )
    # Magnitudes order as their bits do, and NaN stands above infinity: it comes through, as in torch.
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    tl.atomic_max(largest_ptr + which * HEADS + head, tl.max(tl.max(bits, axis=1), axis=0))


@triton.jit(do_not_specialize=["q_rows", "k_rows"])
def _quantize_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mean_ptr,
    largest_ptr,
    q8_ptr,
    k8_ptr,
    v8_ptr,
    scale_ptr,
    q_rows,
    k_rows,
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    head, block, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = block * ROWS + tl.arange(0, ROWS)
    x, inside = _load_rows(
        q_ptr, k_ptr, v_ptr, mean_ptr, which, head, row, q_rows, k_rows, q_stride, k_stride, v_stride, DIM
    )
    largest = tl.load(largest_ptr + which * HEADS + head).to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(largest, _MAX), _FLOOR, propagate_nan=tl.PropagateNan.ALL)
    out_ptr = q8_ptr
    if which == 1:
        out_ptr = k8_ptr
    if which == 2:
        out_ptr = v8_ptr
    offset = row.to(tl.int64)[:, None] * (HEADS * DIM) + head * DIM + tl.arange(0, DIM)[None, :]
    tl.store(out_ptr + offset, tl.div_rn(x, scale).to(tl.float8e4nv), mask=inside)
    if block == 0:
        tl.store(scale_ptr + which * HEADS + head, scale)


def quantize_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mean: torch.Tensor) -> Fp8Inputs:
    """See ``low_bit.quantize_heads``. Heads must lie behind one another in a row, as in any ``[rows, heads * dim]``."""
    (q_rows, heads, dim), k_rows = q.shape[1:], k.shape[1]
    q, k, v = (x if x.stride(3) == 1 and x.stride(2) == dim else x.contiguous() for x in (q, k, v))
    largest = torch.zeros((3, heads), dtype=torch.int32, device=q.device)
    scale = torch.empty((3, heads), dtype=torch.float32, device=q.device)
    q8, k8, v8 = (torch.empty(x.shape, dtype=E4M3, device=q.device) for x in (q, k, v))
    grid = (heads, triton.cdiv(max(q_rows, k_rows), ROWS_PER_PROGRAM), 3)
    sizes = (q_rows, k_rows, q.stride(1), k.stride(1), v.stride(1))
    constants = {"HEADS": heads, "DIM": dim, "ROWS": ROWS_PER_PROGRAM, "num_warps": 4}
    _largest_kernel[grid](q, k, v, mean, largest, *sizes, **constants)
    _quantize_kernel[grid](q, k, v, mean, largest, q8, k8, v8, scale, *sizes, **constants)
    return Fp8Inputs(q8, k8, v8, scale[0:1], scale[1:2], scale[2:3])
