# SPDX-License-Identifier: Apache-2.0
"""A synthetic video VAE with the released one's network, of any width: names and shapes, config, random weights.

Names are those of diffusers' ``AutoencoderKLMiniMaxH3`` (0.40, autoencoder_kl_minimax_h3.py), which the remote code in
``templates/vit_video_vae/`` runs; the defaults below are its defaults, which are the released VAE's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm_h3_plugin.checkpoint.configs import VIDEO_CHANNELS
from vllm_h3_plugin.checkpoint.layout import TensorSpec
from vllm_h3_plugin.checkpoint.synthetic.plan import TensorPlan
from vllm_h3_plugin.checkpoint.synthetic.values import Distribution

PREFIX = "model."
"""In front of every name: the remote code wraps the network."""

_SPATIAL, _TEMPORAL = (2, 2, 2, 2, 1, 1), (1, 2, 2, 1, 1, 1)
_HEAD_DIM, _REGISTERS, _FFN_MULT = 64, 4, 4
_PATCH = 3 * math.prod(_SPATIAL) ** 2 * math.prod(_TEMPORAL)
_GROUPS = 32


@dataclass(frozen=True)
class VitVae:
    """Width and depth.

    Attributes:
        layers, heads: of the decoder; a head is 64 wide.
        channels: of the encoder's six levels, multiples of 32.
        blocks: residual blocks a level.
        tile, overlap: pixels of a tile's side, and what two neighbours have in common at least.
    """

    layers: int = 36
    heads: int = 32
    channels: tuple[int, ...] = (128, 256, 256, 512, 512, 1024)
    blocks: int = 2
    tile: int = 256
    overlap: int = 64

    @property
    def width(self) -> int:
        """Of the decoder."""
        return self.heads * _HEAD_DIM

    def config(self) -> dict[str, Any]:
        """``config.json`` of the folder, its ``auto_map`` and latents included."""
        return {
            "model_type": "synthetic_h3_video_vae",
            "auto_map": {"AutoModel": "modeling_video_vae.SyntheticH3ViTVideoVAE"},
            "latent_channels": VIDEO_CHANNELS,
            "latents_mean": [0.0] * VIDEO_CHANNELS,
            "latents_std": [1.0] * VIDEO_CHANNELS,
            "vae_tile_size": self.tile,
            "vae_tile_overlap_min": self.overlap,
            "network": {
                "block_out_channels": list(self.channels),
                "layers_per_block": self.blocks,
                "spatial_downsample_factors": list(_SPATIAL),
                "temporal_downsample_factors": list(_TEMPORAL),
                "norm_num_groups": _GROUPS,
                "decoder_num_layers": self.layers,
                "decoder_num_attention_heads": self.heads,
                "decoder_attention_head_dim": _HEAD_DIM,
                "decoder_num_register_tokens": _REGISTERS,
                "decoder_ffn_mult": _FFN_MULT,
                "clip_length": 17,
                "token_drop": 3,
            },
        }

    def plans(self, scope: str) -> list[TensorPlan]:
        """Every tensor, FP32; ``scope`` names the random numbers."""
        return [
            TensorPlan(
                TensorSpec(PREFIX + name, shape, "F32"),
                f"{scope}.{name}",
                (("all", shape[0]),),
                (("all", shape[0]),),
                _distribution(name, shape),
            )
            for name, shape in self._shapes()
        ]

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self._encoder()
        yield from _layer("quant_conv", 2 * VIDEO_CHANNELS, 2 * VIDEO_CHANNELS, 1, 1, 1)
        yield from _layer("post_quant_conv", VIDEO_CHANNELS, VIDEO_CHANNELS, 1, 1, 1)
        width = self.width
        yield "decoder.register_tokens", (1, _REGISTERS, width)
        yield from _layer("decoder.proj_in", width, VIDEO_CHANNELS)
        for number in range(self.layers):
            block = f"decoder.transformer_blocks.{number}"
            for name in ("scale1", "scale2", "norm1.weight", "norm2.weight"):
                yield f"{block}.{name}", (width,)
            for name in ("to_q", "to_k", "to_v", "to_out.0"):
                yield from _layer(f"{block}.attn.{name}", width, width)
            yield from _layer(f"{block}.ff.net.0.proj", 2 * _FFN_MULT * width, width)
            yield from _layer(f"{block}.ff.net.2", width, _FFN_MULT * width)
        yield from _layer("decoder.norm_out", width)
        yield from _layer("decoder.proj_out", _PATCH, width)

    def _encoder(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        before = self.channels[0]
        yield from _layer("encoder.conv_in", before, 3, 3, 3, 3)
        for level, (channels, space, time) in enumerate(zip(self.channels, _SPATIAL, _TEMPORAL, strict=True)):
            for number in range(self.blocks):
                block = f"encoder.down_blocks.{level}.resnets.{number}"
                yield from _layer(f"{block}.norm1", before)
                yield from _layer(f"{block}.conv1", channels, before, 3, 3, 3)
                yield from _layer(f"{block}.norm2", channels)
                yield from _layer(f"{block}.conv2", channels, channels, 3, 3, 3)
                if before != channels:
                    yield from _layer(f"{block}.conv_shortcut", channels, before, 1, 1, 1)
                before = channels
            if space * time > 1:
                yield from _layer(f"encoder.down_blocks.{level}.downsamplers.0.conv", channels, channels, 3, 3, 3)
        yield from _layer("encoder.norm_out", before)
        yield from _layer("encoder.conv_out", 2 * VIDEO_CHANNELS, before, 3, 3, 3)


def tiny_vit(*, tile: int = 256, overlap: int = 64) -> VitVae:
    """The same network, small: for a CPU."""
    return VitVae(layers=2, heads=2, channels=(32,) * 6, blocks=1, tile=tile, overlap=overlap)


def _layer(name: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def _distribution(name: str, shape: tuple[int, ...]) -> Distribution:
    """Values for which activations keep their scale, and pictures their middle."""
    if name.endswith(".bias"):
        return Distribution(0.0, 0.02)
    if name.endswith((".scale1", ".scale2")):
        return Distribution(0.2, 0.02)
    if name.endswith("register_tokens"):
        return Distribution(0.0, 1.0)
    if len(shape) == 1:
        return Distribution(1.0, 0.02)  # a norm's weight
    fan_in = math.prod(shape[1:])
    return Distribution(0.0, (0.5 if name.startswith("decoder.proj_out") else 1.0) / math.sqrt(fan_in))
