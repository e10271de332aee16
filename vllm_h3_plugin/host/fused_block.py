# SPDX-License-Identifier: Apache-2.0
"""The DiT block with everything between its matrix multiplications in few kernels that end in FP8.

A subclass under the host's class name, which TeaCache, Cache-DiT, regional compile and offloading look for; it takes
and returns what the host's block does. Its layers are the host's, so tensor parallelism, LoRA and sequence parallelism
work as they did. Until :func:`fuse` gives a block its kernels, it computes what the host's block computes.

A block also begins the next one: the kernel that adds its last gated residual normalizes and quantizes the sum for the
next block in the same pass, which saves reading it again. The next block takes that only if it is called with the very
tensors it was made for; a cache that steps in between calls it with others, and it computes its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm_omni.diffusion.models.minimax_h3 import minimax_h3_transformer as host_dit

from vllm_h3_plugin.host.linear_method import QuantizedLinearMethod
from vllm_h3_plugin.host.step_kernels import StepKernels
from vllm_h3_plugin.quantization.activation import QuantizedActivation

HostBlock = host_dit.MiniMaxH3DiTBlock


@dataclass(frozen=True, eq=False)
class Begun:
    """A block's first step, made by the block before it, and what it was made for."""

    x: torch.Tensor
    t_emb: torch.Tensor
    index: torch.Tensor
    modulation: tuple[torch.Tensor, ...]
    activation: QuantizedActivation

    def is_for(self, x: torch.Tensor, t_emb: torch.Tensor, index: torch.Tensor) -> bool:
        return self.x is x and self.t_emb is t_emb and self.index is index


class FusedSiluAndMul(nn.Module):
    """Stands in the place of an MLP's activation and hands ``fc2`` its input quantized."""

    def __init__(self, kernels: StepKernels, mlp: nn.Module) -> None:
        super().__init__()
        self._kernels = kernels
        self._mlp = (mlp,)  # in a tuple: this module is a part of it

    def forward(self, x: torch.Tensor) -> QuantizedActivation:
        """``[M, 2F] -> FP8 [M, F]``."""
        return self._kernels.fused.silu_mul(x, keep=reads_unquantized(self._mlp[0].fc2))


class MiniMaxH3DiTBlock(HostBlock):  # type: ignore[valid-type,misc]  # the host's types are not followed
    """See the module's docstring."""

    _kernels: StepKernels | None = None
    _next: tuple[MiniMaxH3DiTBlock, ...] = ()
    _begun: Begun | None = None

    def forward(
        self,
        x: torch.Tensor,
        *,
        t_emb: torch.Tensor,
        combined_indices: torch.Tensor,
        rope_table: torch.Tensor,
        **layout: Any,
    ) -> torch.Tensor:
        """``[T, H] -> [T, H]`` BF16; arguments and result are those of the host's block."""
        begun, self._begun = self._begun, None
        kernels = self._kernels
        if kernels is None:
            return super().forward(x, t_emb=t_emb, combined_indices=combined_indices, rope_table=rope_table, **layout)
        if begun is None or not begun.is_for(x, t_emb, combined_indices):
            begun = self._begin(kernels, x, t_emb, combined_indices)
        _, _, gate_msa, shift_mlp, scale_mlp, gate_mlp = begun.modulation
        branch = attend(self.attn, begun.activation, kernels, rope_table, **layout)
        del begun
        x, activation = kernels.fused.gate_norm_modulate(
            x,
            gate_msa,
            branch,
            self.norm2.weight,
            shift_mlp,
            scale_mlp,
            combined_indices,
            self.norm2.variance_epsilon,
            keep=reads_unquantized(self.mlp.fc1),
        )
        del branch  # a row of BF16 each, while the MLP is at its widest
        branch = self.mlp(activation)
        following = self._following()
        if following is None:
            return host_dit.indexed_gate(x, gate_mlp, branch, combined_indices)
        modulation = following.adaln_proj(t_emb)
        x, activation = kernels.fused.gate_norm_modulate(
            x,
            gate_mlp,
            branch,
            following.norm1.weight,
            modulation[0],
            modulation[1],
            combined_indices,
            following.norm1.variance_epsilon,
            keep=reads_unquantized(following.attn.qkv_proj),
        )
        following._begun = Begun(x, t_emb, combined_indices, modulation, activation)
        return x

    def forget(self) -> None:
        """Let go of what the block before has begun: rows of a request that may have ended."""
        self._begun = None

    def _begin(self, kernels: StepKernels, x: torch.Tensor, t_emb: torch.Tensor, index: torch.Tensor) -> Begun:
        modulation = self.adaln_proj(t_emb)
        activation = kernels.fused.norm_modulate(
            x,
            self.norm1.weight,
            modulation[0],
            modulation[1],
            index,
            self.norm1.variance_epsilon,
            keep=reads_unquantized(self.attn.qkv_proj),
        )
        return Begun(x, t_emb, index, modulation, activation)

    def _following(self) -> MiniMaxH3DiTBlock | None:
        """The next block, unless something may change this one's output on its way there."""
        if not self._next or self._forward_hooks or self._next[0]._forward_pre_hooks:
            return None
        return self._next[0]


def attend(
    attn: Any,
    x: QuantizedActivation,
    kernels: StepKernels,
    rope_table: torch.Tensor,
    *,
    packed_total: int | None = None,
    sp_seq_lens: list[int] | None = None,
    **layout: Any,
) -> torch.Tensor:
    """What ``MiniMaxH3Attention.forward`` of both hosts computes, with queries and keys rotated in place.

    Args:
        x: ``[T, H]`` of this sequence-parallel rank.

    Returns:
        ``[T, H]`` BF16.
    """
    del sp_seq_lens  # the host takes it and does not read it
    total = x.shape[0]
    qkv, _ = attn.qkv_proj(x)
    q, k, v = kernels.rotate(qkv, attn, rope_table)
    out = attn._run_packed_attention(q, k, v, packed_total=packed_total or total, **layout)
    del qkv, q, k, v
    out = out.reshape(total, attn.num_heads * attn.head_dim)
    out, _ = attn.out_proj(kernels.fused.quantize(out, keep=reads_unquantized(attn.out_proj)))
    return out


def reads_unquantized(layer: nn.Module) -> bool:
    """Whether a LoRA is active on a layer: its low-rank path takes the activation as it was before quantization."""
    return any(getattr(layer, "_diffusion_lora_active_slices", None) or ())


def _is_quantized(layer: nn.Module) -> bool:
    return isinstance(getattr(layer, "quant_method", None), QuantizedLinearMethod)


def can_fuse(block: nn.Module) -> str | None:
    """Why a block keeps the host's own steps; None if it can be fused."""
    layers = {
        "attn.qkv_proj": block.attn.qkv_proj,
        "attn.out_proj": block.attn.out_proj,
        "mlp.fc1": block.mlp.fc1,
        "mlp.fc2": block.mlp.fc2,
    }
    plain = [name for name, layer in layers.items() if not _is_quantized(layer)]
    if plain:
        return f"{', '.join(plain)} {'is' if len(plain) == 1 else 'are'} not quantized"
    if getattr(block.attn, "to_gate_compress", None) is not None:
        return "its attention has a compression gate, which reads the unquantized activation"
    return None


def fuse(dit: nn.Module, kernels: StepKernels) -> str | None:
    """Give a loaded DiT's blocks their kernels.

    Args:
        dit: built with :class:`MiniMaxH3DiTBlock` in the place of the host's block.

    Returns:
        Why they keep the host's own steps, or None.
    """
    blocks = list(dit.blocks)
    for block in blocks:
        reason = can_fuse(block)
        if reason is not None:
            return f"{block.attn.attention.prefix.removesuffix('.attn')}: {reason}"
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        block._kernels = kernels
        block._next = () if following is None else (following,)
        block.mlp.act_fn = FusedSiluAndMul(kernels, block.mlp)
    return None
