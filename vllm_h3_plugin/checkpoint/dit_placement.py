# SPDX-License-Identifier: Apache-2.0
"""Where each tensor of the DiT goes in the host's model, for the native and the Diffusers layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from vllm_h3_plugin.checkpoint.layout import DitConfig, dit_tensors, to_diffusers
from vllm_h3_plugin.checkpoint.loader import Placement, first_half, second_half, ungroup_qkv

Place = Callable[[str], tuple[Placement, ...] | None]

ROPE = "rope.inv_freq"


def native_placement(config: DitConfig) -> Place:
    """Placements of the native layout: qkv rows are regrouped once, fc1 is ``[gate, up]``, the rest goes as it is."""
    qkv = partial(ungroup_qkv, heads=config.num_attention_heads, head_dim=config.attention_head_dim)
    table: dict[str, tuple[Placement, ...]] = {}
    for name in dit_tensors(config):
        if name.endswith(".attn.qkv_proj.weight"):
            table[name] = (Placement(name, rows=qkv),)
        elif name.endswith(".mlp.fc1.weight"):
            table[name] = (Placement(name, 0, first_half), Placement(name, 1, second_half))
        else:
            table[name] = (Placement(name),)
    return table.get


def diffusers_placement(config: DitConfig) -> Place:
    """Placements of the Diffusers layout: q, k and v go to their shards, its ``[up, gate]`` is taken crosswise.

    The layout has no :data:`ROPE`; the loader adds the tensor of :func:`rope_inv_freq` under the native name.
    """
    table: dict[str, tuple[Placement, ...]] = {ROPE: (Placement(ROPE),)}
    for native in dit_tensors(config):
        for source in to_diffusers(native):
            if source.piece == "swapped":
                table[source.name] = (Placement(native, 0, second_half), Placement(native, 1, first_half))
            elif source.piece == "whole":
                table[source.name] = (Placement(native),)
            else:
                table[source.name] = (Placement(native, source.piece),)
    return table.get


def rope_inv_freq(length: int, theta: float = 10000.0) -> torch.Tensor:
    """``theta ** -(2 i / (2 length))`` for i < length, FP32 on the CPU, as the host computes it for Diffusers weights.

    Source: vLLM-Omni 0.30.0 minimax_h3_transformer.py:1424-1429 (1 / theta ** (arange(0, 2n, 2) / (2n))).
    """
    steps = torch.arange(0, 2 * length, 2, dtype=torch.float32, device="cpu")
    return 1.0 / (theta ** (steps / (2 * length)))
