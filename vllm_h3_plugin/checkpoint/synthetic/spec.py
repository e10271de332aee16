# SPDX-License-Identifier: Apache-2.0
"""What a synthetic checkpoint is to hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vllm_h3_plugin.checkpoint.configs import DitConfig, TextEncoderConfig, VisionConfig
from vllm_h3_plugin.checkpoint.synthetic.vit_vae import VitVae
from vllm_h3_plugin.errors import UsageError

Layout = Literal["native", "diffusers"]

# Largest shard unless the caller says otherwise: 5 GB, as published checkpoints have.
MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Partition:
    """One of the two checkpoints of a release: its folder, its name in ``model_index.json`` and its tasks."""

    folder: str
    name: str
    tasks: tuple[str, ...]


FL2VA = Partition("FL2VA", "fl2va", ("t2va", "fl2va"))
REF2VA = Partition("Ref2VA", "ref2va", ("ref2va",))
PARTITIONS: dict[str, tuple[Partition, ...]] = {"fl2va": (FL2VA,), "ref2va": (REF2VA,), "both": (FL2VA, REF2VA)}


def tiny_dit(
    *, layers: int = 2, refiner_layers: int = 1, hidden: int = 64, heads: int = 4, head_dim: int = 16, ffn: int = 128
) -> DitConfig:
    """A DiT of any width; what no option sets shrinks with it.

    Raises:
        UsageError: a width that no CUTLASS or NPU kernel takes, or a head too narrow for RoPE.
    """
    for name, value in (("--hidden", hidden), ("--heads x --head-dim", heads * head_dim), ("--ffn", ffn)):
        if value < 16 or value % 16:
            raise UsageError(
                f"{name} = {value}",
                why="quantized kernels need widths that are multiples of 16",
                fix=f"Use {max(16, (value + 15) // 16 * 16)}.",
            )
    for name, value, least in (
        ("--layers", layers, 1),
        ("--refiner-layers", refiner_layers, 1),
        ("--heads", heads, 1),
        ("--head-dim", head_dim, 8),
    ):
        if value < least:
            raise UsageError(f"{name} = {value}", why="too small for an H3", fix=f"Use at least {least}.")
    true = DitConfig()
    return DitConfig(
        num_layers=layers,
        token_refiner_num_layers=refiner_layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        ffn_hidden_size=ffn,
        timestep_input_dim=true.timestep_input_dim if hidden == true.hidden_size else 32,
        time_embed_hidden_size=hidden,
        time_embed_dim=max(16, hidden // 2 // 16 * 16),
        adaln_out_features=18 * hidden,
        final_adaln_out_features=2 * hidden,
        rope_inv_freq_len=head_dim // 8,  # the real model turns 96 of a head's 128 channels
    )


def tiny_text(*, layers: int = 1) -> TextEncoderConfig:
    """A text encoder that is narrow inside; its width of 5120 is fixed by the host."""
    return TextEncoderConfig(
        vocab_size=320,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=64,
        vision=VisionConfig(
            depth=2,
            hidden_size=32,
            num_heads=2,
            intermediate_size=64,
            num_position_embeddings=64,
            deepstack_visual_indexes=(0,),
        ),
    )


def true_width_text(*, layers: int = 1) -> TextEncoderConfig:
    """Qwen3-VL-32B with few decoder layers and its whole vision tower."""
    return TextEncoderConfig(num_hidden_layers=layers)


@dataclass(frozen=True)
class SynthSpec:
    """A synthetic checkpoint: which partitions, in which layout, how wide and deep.

    Attributes:
        partition: ``fl2va``, ``ref2va`` or ``both``.
        layout: of the DiT's tensors; everything else has one layout.
        outliers: multiply a few rows of each quantizable linear by 30, which a scale per tensor handles badly.
        shard_bytes: largest shard in bytes of tensor data. None: 5 GB, and at least two shards a part.
        seed: the same seed and options give the same bytes.
        video_vae: the released video VAE's network with random weights; None: a small codec whose clips look like
            something.
    """

    partition: str = "fl2va"
    layout: Layout = "native"
    dit: DitConfig = field(default_factory=tiny_dit)
    text: TextEncoderConfig = field(default_factory=tiny_text)
    outliers: bool = False
    shard_bytes: int | None = None
    seed: int = 0
    video_vae: VitVae | None = None

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The partitions to write."""
        return PARTITIONS[self.partition]
