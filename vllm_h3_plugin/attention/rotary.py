# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and rotary embedding of queries and keys in plain torch: the twin of ``qk_norm_rope.py``."""

from __future__ import annotations

import torch


def qk_norm_rope(x: torch.Tensor, weight: torch.Tensor, rope: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize each head and rotate its first dimensions, half split.

    Args:
        x: ``[M, heads, head_dim]`` BF16.
        weight: ``[head_dim]`` BF16.
        rope: ``[M, 2 * half]`` BF16, cosines before sines; dimension ``d < half`` pairs with ``d + half``.
        eps: of the RMSNorm.

    Returns:
        ``[M, heads, head_dim]`` BF16. The normalized value is rounded to BF16 and rotated in FP32, as the host's CUDA
        kernel does (vllm_omni ``diffusion/layers/fused_qk_norm_rope.py``).
    """
    half = rope.shape[-1] // 2
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    normed = normed.to(x.dtype).float()
    cos, sin = rope[:, None, :half].float(), rope[:, None, half:].float()
    first, second, rest = normed[..., :half], normed[..., half : 2 * half], normed[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def in_place_fault(device: torch.device) -> str | None:
    """Compile the Triton kernel on a CUDA device and hold it to :func:`qk_norm_rope`.

    Returns:
        What is wrong with it, or None.

    Raises:
        Exception: whatever the compiler raises.
    """
    from vllm_h3_plugin.attention.qk_norm_rope import HEAD_DIM, ROTARY_HALF, qk_norm_rope_

    rows, heads, eps = 64, 56, 1e-5
    generator = torch.Generator(device).manual_seed(0)
    inner = heads * HEAD_DIM
    qkv = torch.randn((rows, 3 * inner), generator=generator, device=device).to(torch.bfloat16)
    weights = torch.rand((2, HEAD_DIM), generator=generator, device=device).to(torch.bfloat16)
    rope = torch.rand((rows, 2 * ROTARY_HALF), generator=generator, device=device).to(torch.bfloat16)
    want = [qk_norm_rope(part.view(rows, heads, HEAD_DIM), weights[i], rope, eps) for i, part in _two(qkv, inner)]
    values = qkv[:, 2 * inner :].clone()
    qk_norm_rope_(qkv, weights[0], weights[1], rope, eps, heads=heads)
    if not torch.equal(qkv[:, 2 * inner :], values):
        return "it changed the values"
    for i, part in _two(qkv, inner):
        error = float((part.view(rows, heads, HEAD_DIM).float() - want[i].float()).norm() / want[i].float().norm())
        if not error < 1e-3:  # NaN is no error below anything
            return f"relative error {error:.1e} to plain torch"
    return None


def _two(qkv: torch.Tensor, inner: int) -> list[tuple[int, torch.Tensor]]:
    return [(0, qkv[:, :inner]), (1, qkv[:, inner : 2 * inner])]
