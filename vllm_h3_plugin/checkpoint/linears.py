# SPDX-License-Identifier: Apache-2.0
"""Every linear layer of the model as the host builds it, by module path.

Paths carry the part they belong to: ``transformer.blocks.0.attn.qkv_proj``,
``text_encoder.text_model.layers.0.mlp.gate_up_proj``, ``text_encoder.vision.blocks.0.attn.qkv``. They are the names
in the host pipeline's module tree (vLLM-Omni 0.28.0 and 0.30.0), so a precision recipe can match globs against them
before anything is built. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vllm_h3_plugin.checkpoint.configs import DitConfig, TextEncoderConfig

Part = Literal["transformer", "text_encoder", "vision"]


@dataclass(frozen=True)
class LinearSpec:
    """One linear layer: ``y = x W^T + b`` with W of shape ``(out_features, in_features)``.

    Attributes:
        path: module path in the host pipeline, part prefix included.
        part: ``transformer``, ``text_encoder`` (its decoder layers) or ``vision`` (its vision tower).
        sources: checkpoint tensors (native layout, named as in the part's files) that fill it: weights in the order
            of the fused rows, then the bias.
    """

    path: str
    part: Part
    in_features: int
    out_features: int
    bias: bool
    sources: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        return self.out_features * (self.in_features + int(self.bias))


def linear_layers(dit: DitConfig, text: TextEncoderConfig) -> tuple[LinearSpec, ...]:
    """Every linear layer of the DiT, the text decoder and the vision tower, in module order."""
    return (*_dit(dit), *_text(text), *_vision(text))


def _dit_linear(name: str, in_features: int, out_features: int, bias: bool) -> LinearSpec:
    sources = (f"{name}.weight", f"{name}.bias") if bias else (f"{name}.weight",)
    return LinearSpec(f"transformer.{name}", "transformer", in_features, out_features, bias, sources)


def _dit_block(prefix: str, config: DitConfig) -> Iterator[LinearSpec]:
    hidden, inner, ffn = config.hidden_size, config.inner_size, config.ffn_hidden_size
    yield _dit_linear(f"{prefix}.attn.qkv_proj", hidden, 3 * inner, False)
    yield _dit_linear(f"{prefix}.attn.out_proj", inner, hidden, False)
    yield _dit_linear(f"{prefix}.mlp.fc1", hidden, 2 * ffn, False)
    yield _dit_linear(f"{prefix}.mlp.fc2", ffn, hidden, False)


def _dit(config: DitConfig) -> Iterator[LinearSpec]:
    hidden, time = config.hidden_size, config.time_embed_dim
    yield _dit_linear("video_patch_proj", config.video_row, hidden, True)
    yield _dit_linear("audio_patch_proj", config.audio_latents_dim, hidden, True)
    yield _dit_linear("condition_proj", config.text_dim, hidden, True)
    yield _dit_linear("time_embedder.proj_in", config.timestep_input_dim, config.time_embed_hidden_size, True)
    yield _dit_linear("time_embedder.proj_out", config.time_embed_hidden_size, time, True)
    for i in range(config.token_refiner_num_layers):
        yield from _dit_block(f"token_refiner.blocks.{i}", config)
    for i in range(config.num_layers):
        yield from _dit_block(f"blocks.{i}", config)
        yield _dit_linear(f"blocks.{i}.adaln_proj.linear", time, config.adaln_out_features, True)
    yield _dit_linear("final_layer.adaln_proj.linear", time, config.final_adaln_out_features, True)
    yield _dit_linear("final_layer.video_out", hidden, config.video_row, True)
    yield _dit_linear("final_layer.audio_out", hidden, config.audio_latents_dim, True)


def _text(config: TextEncoderConfig) -> Iterator[LinearSpec]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_rows = config.num_attention_heads * config.head_dim
    kv_rows = config.num_key_value_heads * config.head_dim
    for i in range(config.layers_used):
        path, source = f"text_encoder.text_model.layers.{i}", f"model.language_model.layers.{i}"

        def weights(group: str, *names: str, source: str = source) -> tuple[str, ...]:
            return tuple(f"{source}.{group}.{name}.weight" for name in names)

        qkv = weights("self_attn", "q_proj", "k_proj", "v_proj")
        yield LinearSpec(f"{path}.self_attn.qkv_proj", "text_encoder", hidden, q_rows + 2 * kv_rows, False, qkv)
        yield LinearSpec(
            f"{path}.self_attn.o_proj", "text_encoder", q_rows, hidden, False, weights("self_attn", "o_proj")
        )
        gate_up = weights("mlp", "gate_proj", "up_proj")
        yield LinearSpec(f"{path}.mlp.gate_up_proj", "text_encoder", hidden, 2 * ffn, False, gate_up)
        yield LinearSpec(f"{path}.mlp.down_proj", "text_encoder", ffn, hidden, False, weights("mlp", "down_proj"))


def _vision_linear(name: str, in_features: int, out_features: int) -> LinearSpec:
    sources = (f"model.visual.{name}.weight", f"model.visual.{name}.bias")
    return LinearSpec(f"text_encoder.vision.{name}", "vision", in_features, out_features, True, sources)


def _vision(config: TextEncoderConfig) -> Iterator[LinearSpec]:
    vision = config.vision
    hidden, ffn, merged = vision.hidden_size, vision.intermediate_size, vision.merged_size
    for i in range(vision.depth):
        yield _vision_linear(f"blocks.{i}.attn.qkv", hidden, 3 * hidden)
        yield _vision_linear(f"blocks.{i}.attn.proj", hidden, hidden)
        yield _vision_linear(f"blocks.{i}.mlp.linear_fc1", hidden, ffn)
        yield _vision_linear(f"blocks.{i}.mlp.linear_fc2", ffn, hidden)
    mergers = ("merger", *(f"deepstack_merger_list.{i}" for i in range(len(vision.deepstack_visual_indexes))))
    for name in mergers:
        yield _vision_linear(f"{name}.linear_fc1", merged, merged)
        yield _vision_linear(f"{name}.linear_fc2", merged, vision.out_hidden_size)
