# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and rotary embedding of queries and keys in place, one launch for both, as a Triton kernel.

The host's kernel (vllm_omni ``diffusion/layers/fused_qk_norm_rope.py``) computes the same with a launch and a new
tensor for each, and loads every pair twice. Here a row's heads are loaded once and written where they were, in the
output of the QKV projection; attention kernels take its strides.

Import this module only where there is a CUDA device (or Triton's interpreter).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HEAD_DIM = 128
ROTARY_HALF = 48
"""H3 rotates 96 of 128 head dimensions: dimension d < 48 pairs with d + 48, the last 32 pass."""

HEADS_PER_PROGRAM = 16


@triton.jit
def _qk_norm_rope_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    rope_ptr,
    rows,
    row_stride,
    rope_stride,
    HEADS: tl.constexpr,
    EPS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAD: tl.constexpr,
    REST: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = (rows - 1 - tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    real = head < 2 * HEADS
    is_query = head < HEADS
    half = tl.arange(0, PAD)
    rest = tl.arange(0, REST)
    low = real[:, None] & (half < HALF)[None, :]
    base = qkv_ptr + row * row_stride + head[:, None] * DIM
    first = tl.load(base + half[None, :], mask=low, other=0.0).to(tl.float32)
    second = tl.load(base + HALF + half[None, :], mask=low, other=0.0).to(tl.float32)
    third = tl.load(base + 2 * HALF + rest[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1) + tl.sum(third * third, axis=1)
    inverse = tl.rsqrt(square / DIM + EPS)[:, None]

    # One weight vector for queries and one for keys: a program may hold heads of both.
    inside = half < HALF
    q_first = tl.load(q_weight_ptr + half, mask=inside, other=0.0).to(tl.float32)
    k_first = tl.load(k_weight_ptr + half, mask=inside, other=0.0).to(tl.float32)
    q_second = tl.load(q_weight_ptr + HALF + half, mask=inside, other=0.0).to(tl.float32)
    k_second = tl.load(k_weight_ptr + HALF + half, mask=inside, other=0.0).to(tl.float32)
    q_third = tl.load(q_weight_ptr + 2 * HALF + rest).to(tl.float32)
    k_third = tl.load(k_weight_ptr + 2 * HALF + rest).to(tl.float32)
    pick = is_query[:, None]
    first = (first * inverse * tl.where(pick, q_first[None, :], k_first[None, :])).to(tl.bfloat16).to(tl.float32)
    second = (second * inverse * tl.where(pick, q_second[None, :], k_second[None, :])).to(tl.bfloat16).to(tl.float32)
    third = third * inverse * tl.where(pick, q_third[None, :], k_third[None, :])

    cos = tl.load(rope_ptr + row * rope_stride + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(rope_ptr + row * rope_stride + HALF + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(base + half[None, :], (first * cos - second * sin).to(tl.bfloat16), mask=low)
    tl.store(base + HALF + half[None, :], (second * cos + first * sin).to(tl.bfloat16), mask=low)
    tl.store(base + 2 * HALF + rest[None, :], third.to(tl.bfloat16), mask=real[:, None])


def qk_norm_rope_(
    qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, rope: torch.Tensor, eps: float, *, heads: int
) -> None:
    """Normalize and rotate the queries and keys of ``qkv`` in place; values stay as they are.

    Args:
        qkv: ``[M, 3 * heads * 128]`` BF16, rows contiguous: queries, keys, values, a head at a time.
        q_weight: ``[128]`` BF16; ``k_weight`` likewise.
        rope: ``[M, 96]`` BF16, cosines before sines.
        eps: of the RMSNorm.
        heads: query heads of this rank; as many key and value heads.
    """
    rows = qkv.shape[0]
    if rows:
        _qk_norm_rope_kernel[(rows, triton.cdiv(2 * heads, HEADS_PER_PROGRAM))](
            qkv,
            q_weight,
            k_weight,
            rope,
            rows,
            qkv.stride(0),
            rope.stride(0),
            HEADS=heads,
            EPS=eps,
            DIM=HEAD_DIM,
            HALF=ROTARY_HALF,
            PAD=64,
            REST=HEAD_DIM - 2 * ROTARY_HALF,
            GROUP=HEADS_PER_PROGRAM,
            num_warps=4,
        )
