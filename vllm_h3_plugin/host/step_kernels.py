# SPDX-License-Identifier: Apache-2.0
"""The kernels between a block's matrix multiplications, chosen once for a device.

Each Triton kernel is compiled and checked on the device before it is used (``quantization/fused_probe.py``). One that
fails is replaced by the host's own kernels for the same step, and the log and `vllm-h3 doctor` say so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.logger import init_logger
from vllm_omni.diffusion.models.minimax_h3 import minimax_h3_transformer as host_dit

from vllm_h3_plugin.attention.rotary import in_place_fault
from vllm_h3_plugin.quantization import fused
from vllm_h3_plugin.quantization.contract import QuantBackend
from vllm_h3_plugin.quantization.fused_probe import Probe, probe, probe_kernels

logger = init_logger(__name__)


@dataclass(frozen=True)
class StepKernels:
    """Attributes:
    fused: the four steps that end in FP8.
    rotates_in_place: whether queries and keys are normalized and rotated by the plugin's kernel.
    probes: what was tried on the device; empty on the CPU.
    """

    fused: fused.FusedKernels
    rotates_in_place: bool
    probes: tuple[Probe, ...] = ()

    def describe(self) -> str:
        """One sentence for people: how each step is computed, and why not otherwise."""
        if not self.probes:
            return "the host's kernels, then quantization: the plugin's need a CUDA device"
        return "; ".join(f"{tried.name}: {tried.reason}" for tried in self.probes)

    def rotate(
        self, qkv: torch.Tensor, attn: Any, rope_table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """RMSNorm and rotary embedding of queries and keys.

        Args:
            qkv: ``[T, (heads + 2 * kv_heads) * head_dim]`` BF16; overwritten where ``rotates_in_place``.
            attn: the host's ``MiniMaxH3Attention``.
            rope_table: ``[T, 96]`` BF16.

        Returns:
            ``(q, k, v)``: ``[T, heads, head_dim]`` views or tensors.
        """
        heads, kv_heads, dim = attn.num_heads, attn.num_kv_heads, attn.head_dim
        q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
        q, k, v = q.view(-1, heads, dim), k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim)
        weights, eps = (attn.q_norm.weight, attn.k_norm.weight), attn.q_norm.variance_epsilon
        if self.rotates_in_place and fits_in_place(heads, kv_heads, dim, rope_table):
            from vllm_h3_plugin.attention.qk_norm_rope import qk_norm_rope_

            qk_norm_rope_(qkv, *weights, rope_table, eps, heads=heads)
        else:
            q, k = host_dit.fused_qk_norm_rope(q, k, *weights, rope_table, eps)
        return q, k, v


def fits_in_place(heads: int, kv_heads: int, dim: int, rope_table: torch.Tensor) -> bool:
    """Whether the plugin's kernel is made for this geometry (H3's own)."""
    return heads == kv_heads and dim == 128 and rope_table.shape[-1] == 96


def composed(backend: QuantBackend) -> fused.FusedKernels:
    """The host's kernels for each step, and the backend's quantization behind them."""
    return fused.compose(
        # By the names under which the DiT imports them: their own modules differ between the hosts.
        host_dit.rms_norm_indexed_scale_shift,
        host_dit.indexed_gate_rms_norm_scale_shift,
        host_dit.SiluAndMul(),
        backend.quantize_tokens,
        "the host's kernel, then quantization",
    )


def choose_kernels(device: torch.device, backend: QuantBackend) -> StepKernels:
    """Probe a device's kernels and take those that are right; log one line.

    Args:
        backend: of the blocks' linear layers.
    """
    separate = composed(backend)
    if device.type != "cuda":
        return StepKernels(separate, rotates_in_place=False)
    probes = (*probe_kernels(device), probe("qk_norm_rope", lambda: in_place_fault(device)))
    right = {tried.name for tried in probes if tried.ok}
    chosen = separate
    if right & set(fused.KERNELS):
        from vllm_h3_plugin.quantization.fused_triton import TRITON

        taken = {name: getattr(TRITON, name) for name in fused.KERNELS if name in right}
        chosen = replace(separate, **taken, source={**separate.source, **{name: TRITON.source[name] for name in taken}})
    for tried in probes:
        log = logger.info if tried.ok else logger.warning
        log("H3 kernel %s: %s", tried.name, tried.reason)
    return StepKernels(chosen, rotates_in_place="qk_norm_rope" in right, probes=probes)
