# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's files must hold: every tensor of the DiT and the text encoder by name, shape and dtype.

Two layouts of the DiT exist. The native one fuses q, k and v into ``qkv_proj`` with rows grouped per head
``[q, k, v]`` and keeps ``fc1`` as ``[gate, up]``; the Diffusers one splits q, k and v, keeps the SwiGLU projection as
``[up, gate]`` and leaves ``rope.inv_freq`` out (vLLM-Omni 0.30.0 ``fasth3.py`` ``_resolve_native_target``, diffusers
0.40.0 ``MiniMaxH3Transformer3DModel``). The text encoder has one layout. Importing this module does not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vllm_h3_plugin.checkpoint.configs import (
    TEXT_LAYERS_USED,
    DitConfig,
    TextEncoderConfig,
    VisionConfig,
)
from vllm_h3_plugin.checkpoint.linears import LinearSpec, linear_layers

__all__ = [
    "DTYPE_BYTES",
    "FP32_BUFFERS",
    "FP32_TENSORS",
    "DiffusersTensor",
    "DitConfig",
    "LinearSpec",
    "TensorSpec",
    "TextEncoderConfig",
    "VisionConfig",
    "dit_tensors",
    "dit_tensors_diffusers",
    "host_drops_text_tensor",
    "linear_layers",
    "text_encoder_tensors",
    "to_diffusers",
]

# Bytes per element of the safetensors dtypes that this project reads.
DTYPE_BYTES: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip

# The six layers that stay FP32 in every precision (vLLM-Omni 0.30.0 MINIMAX_H3_FP32_PARAM_NAMES).
FP32_LAYERS: tuple[str, ...] = (
    "video_patch_proj",
    "audio_patch_proj",
    "time_embedder.proj_in",
    "time_embedder.proj_out",
    "final_layer.video_out",
    "final_layer.audio_out",
)
FP32_TENSORS: frozenset[str] = frozenset(f"{layer}.{kind}" for layer in FP32_LAYERS for kind in ("weight", "bias"))
FP32_BUFFERS: frozenset[str] = frozenset({"rope.inv_freq"})


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint: name within its part, shape, dtype as safetensors spells it (``BF16``, ``F32``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * DTYPE_BYTES[self.dtype]


def dit_tensors(config: DitConfig) -> dict[str, TensorSpec]:
    """Every tensor of the native DiT, in module order."""
    return {
        name: TensorSpec(name, shape, "F32" if name in FP32_TENSORS or name in FP32_BUFFERS else "BF16")
        for name, shape in _dit_shapes(config)
    }


def _dit_shapes(config: DitConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    linears = {spec.sources[0].removesuffix(".weight"): spec for spec in _transformer_linears(config)}

    def linear(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        spec = linears[name]
        yield f"{name}.weight", (spec.out_features, spec.in_features)
        if spec.bias:
            yield f"{name}.bias", (spec.out_features,)

    def block(prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{prefix}.norm1.weight", (config.hidden_size,)
        yield f"{prefix}.norm2.weight", (config.hidden_size,)
        yield from linear(f"{prefix}.attn.qkv_proj")
        yield f"{prefix}.attn.q_norm.weight", (config.attention_head_dim,)
        yield f"{prefix}.attn.k_norm.weight", (config.attention_head_dim,)
        for name in ("attn.out_proj", "mlp.fc1", "mlp.fc2"):
            yield from linear(f"{prefix}.{name}")

    for name in ("video_patch_proj", "audio_patch_proj", "condition_proj"):
        yield from linear(name)
    yield from linear("time_embedder.proj_in")
    yield from linear("time_embedder.proj_out")
    yield "rope.inv_freq", (config.rope_inv_freq_len,)
    for i in range(config.token_refiner_num_layers):
        yield from block(f"token_refiner.blocks.{i}")
    yield "token_refiner.final_norm.weight", (config.hidden_size,)
    for i in range(config.num_layers):
        yield from block(f"blocks.{i}")
        yield from linear(f"blocks.{i}.adaln_proj.linear")
    yield "final_layer.norm.weight", (config.hidden_size,)
    for name in ("adaln_proj.linear", "video_out", "audio_out"):
        yield from linear(f"final_layer.{name}")


def _transformer_linears(config: DitConfig) -> Iterator[LinearSpec]:
    for spec in linear_layers(config, TextEncoderConfig(num_hidden_layers=1)):
        if spec.part == "transformer":
            yield spec


@dataclass(frozen=True)
class DiffusersTensor:
    """Where a native tensor's rows are in the Diffusers layout.

    ``piece`` is ``whole``; ``q``, ``k`` or ``v`` (that third of every head's rows, heads in order); or ``swapped``
    (second half of the rows first).
    """

    name: str
    piece: Literal["whole", "q", "k", "v", "swapped"]


_MODEL_LEVEL = {
    "video_patch_proj": "proj_in",
    "audio_patch_proj": "audio_proj_in",
    "condition_proj": "context_embedder",
    "time_embedder.proj_in": "time_embedder.linear_1",
    "time_embedder.proj_out": "time_embedder.linear_2",
    "token_refiner.final_norm": "token_refiner.final_norm",
    "final_layer.norm": "norm_out.norm",
    "final_layer.adaln_proj.linear": "norm_out.linear",
    "final_layer.video_out": "proj_out",
    "final_layer.audio_out": "audio_proj_out",
}
_BLOCK_LEVEL = {
    "norm1": "norm1",
    "norm2": "norm2",
    "attn.q_norm": "attn.norm_q",
    "attn.k_norm": "attn.norm_k",
    "attn.out_proj": "attn.to_out.0",
    "mlp.fc2": "ff.net.2",
    "adaln_proj.linear": "adaln_proj.linear",
}
_BLOCK = re.compile(r"(token_refiner\.)?blocks\.(\d+)\.(.+)")


def to_diffusers(native: str) -> tuple[DiffusersTensor, ...]:
    """The Diffusers tensors that hold one native DiT tensor; empty for ``rope.inv_freq``, which is computed there.

    Raises:
        KeyError: ``native`` is no tensor of the native layout.
    """
    if native in FP32_BUFFERS:
        return ()
    module, _, kind = native.rpartition(".")
    block = _BLOCK.fullmatch(module)
    if block is None:
        return (DiffusersTensor(f"{_MODEL_LEVEL[module]}.{kind}", "whole"),)
    refiner, index, suffix = block.groups()
    prefix = f"token_refiner.refiner_blocks.{index}" if refiner else f"transformer_blocks.{index}"
    if suffix == "attn.qkv_proj":
        return (
            DiffusersTensor(f"{prefix}.attn.to_q.{kind}", "q"),
            DiffusersTensor(f"{prefix}.attn.to_k.{kind}", "k"),
            DiffusersTensor(f"{prefix}.attn.to_v.{kind}", "v"),
        )
    if suffix == "mlp.fc1":
        return (DiffusersTensor(f"{prefix}.ff.net.0.proj.{kind}", "swapped"),)
    return (DiffusersTensor(f"{prefix}.{_BLOCK_LEVEL[suffix]}.{kind}", "whole"),)


def dit_tensors_diffusers(config: DitConfig) -> dict[str, TensorSpec]:
    """Every tensor of the DiT in the Diffusers layout."""
    result: dict[str, TensorSpec] = {}
    for spec in dit_tensors(config).values():
        targets = to_diffusers(spec.name)
        for target in targets:
            shape = (spec.shape[0] // len(targets), *spec.shape[1:])
            result[target.name] = TensorSpec(target.name, shape, spec.dtype)
    return result


def text_encoder_tensors(config: TextEncoderConfig) -> dict[str, TensorSpec]:
    """Every tensor of the text encoder that the host loads; all are BF16.

    The files may hold more: see :func:`host_drops_text_tensor`.
    """
    return {name: TensorSpec(name, shape, "BF16") for name, shape in _text_shapes(config)}


def host_drops_text_tensor(name: str) -> bool:
    """Whether the host reads this text encoder tensor and throws it away (``encoder.py`` ``_map_weight_name``).

    H3 uses the hidden states after decoder layer 50, so later layers, the final norm and the LM head have no place.
    """
    if name in ("lm_head.weight", "model.language_model.norm.weight"):
        return True
    match = re.match(r"model\.language_model\.layers\.(\d+)\.", name)
    return match is not None and int(match.group(1)) >= TEXT_LAYERS_USED


def _text_shapes(config: TextEncoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_rows = config.num_attention_heads * config.head_dim
    kv_rows = config.num_key_value_heads * config.head_dim
    yield "model.language_model.embed_tokens.weight", (config.vocab_size, hidden)
    for i in range(config.layers_used):
        prefix = f"model.language_model.layers.{i}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (q_rows, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (kv_rows, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (kv_rows, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, q_rows)
        yield f"{prefix}.self_attn.q_norm.weight", (config.head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (config.head_dim,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (ffn, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (ffn, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, ffn)
    yield from _vision_shapes(config.vision)


def _vision_shapes(vision: VisionConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    def layer(name: str, *weight: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"model.visual.{name}.weight", weight
        yield f"model.visual.{name}.bias", (weight[0],)

    hidden, merged, patch = vision.hidden_size, vision.merged_size, vision.patch_size
    yield from layer("patch_embed.proj", hidden, vision.in_channels, vision.temporal_patch_size, patch, patch)
    yield "model.visual.pos_embed.weight", (vision.num_position_embeddings, hidden)
    for i in range(vision.depth):
        yield from layer(f"blocks.{i}.norm1", hidden)
        yield from layer(f"blocks.{i}.norm2", hidden)
        yield from layer(f"blocks.{i}.attn.qkv", 3 * hidden, hidden)
        yield from layer(f"blocks.{i}.attn.proj", hidden, hidden)
        yield from layer(f"blocks.{i}.mlp.linear_fc1", vision.intermediate_size, hidden)
        yield from layer(f"blocks.{i}.mlp.linear_fc2", hidden, vision.intermediate_size)
    # The merger norms each patch before merging, the DeepStack mergers norm the merged patch.
    mergers = [("merger", hidden)]
    mergers += [(f"deepstack_merger_list.{i}", merged) for i in range(len(vision.deepstack_visual_indexes))]
    for name, normed in mergers:
        yield from layer(f"{name}.norm", normed)
        yield from layer(f"{name}.linear_fc1", merged, merged)
        yield from layer(f"{name}.linear_fc2", vision.out_hidden_size, merged)
