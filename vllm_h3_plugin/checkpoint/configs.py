# SPDX-License-Identifier: Apache-2.0
"""Shapes of the two networks whose weights stream through the loader, as their ``config.json`` files state them.

Defaults are the real model: the DiT as in vLLM-Omni 0.30.0 ``MiniMaxH3DiTArchConfig``, the text encoder as
Qwen3-VL-32B, of which H3 uses the first 50 decoder layers. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from vllm_h3_plugin.errors import CheckpointError

# Fixed by the host, whatever a config says (vLLM-Omni 0.30.0: encoder.py MINIMAX_H3_QWEN3VL_HIDDEN_DIM and
# MINIMAX_H3_QWEN3VL_SELECTED_LM_LAYER; pipeline and denoise_loop row widths).
TEXT_WIDTH = 5120
TEXT_LAYERS_USED = 50
VIDEO_CHANNELS = 24
AUDIO_CHANNELS = 32
ADALN_MODALITIES = 3
ADALN_OUTPUTS_PER_MODALITY = 6

NATIVE_CLASS = "MiniMaxH3DiTModel"
DIFFUSERS_CLASS = "MiniMaxH3Transformer3DModel"

# Diffusers spelling -> native spelling of the same field (`MiniMaxH3DiTArchConfig.from_mapping`).
DIFFUSERS_ALIASES: dict[str, str] = {
    "num_refiner_layers": "token_refiner_num_layers",
    "ffn_dim": "ffn_hidden_size",
    "in_channels": "latents_dim",
    "audio_in_channels": "audio_latents_dim",
    "freq_dim": "timestep_input_dim",
    "time_embed_hidden_dim": "time_embed_hidden_size",
    "rope_freq_dim": "rope_inv_freq_len",
}


def _bad(source: str, name: str, value: object, why: str) -> CheckpointError:
    return CheckpointError(
        f"{source}: {name}={value!r}",
        why=why,
        fix="Take this file from the release that the weights came from; it is not meant to be edited.",
        field=name,
    )


# A hundred times the real model's depth: beyond it a config is a typo, and listing its tensors would take minutes.
_MOST_LAYERS = 5000


def _positive_int(source: str, name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise _bad(source, name, value, "it must be a whole number of at least 1")
    if ("layers" in name or name.endswith("depth")) and value > _MOST_LAYERS:
        raise _bad(source, name, value, f"no model has more than {_MOST_LAYERS} layers")
    return value


@dataclass(frozen=True)
class DitConfig:
    """Shape of the diffusion transformer, from ``transformer/config.json``."""

    num_layers: int = 50
    token_refiner_num_layers: int = 2
    hidden_size: int = 5376
    num_attention_heads: int = 56
    attention_head_dim: int = 128
    ffn_hidden_size: int = 14336
    latents_dim: int = VIDEO_CHANNELS
    audio_latents_dim: int = AUDIO_CHANNELS
    patch_size: tuple[int, int, int] = (1, 2, 2)
    text_dim: int = TEXT_WIDTH
    timestep_input_dim: int = 256
    time_embed_hidden_size: int = 5376
    time_embed_dim: int = 2688
    adaln_out_features: int = 18 * 5376
    final_adaln_out_features: int = 2 * 5376
    rope_inv_freq_len: int = 16
    norm_eps: float = 1e-5
    qk_norm_eps: float = 1e-5
    final_norm_eps: float = 1e-5

    @property
    def inner_size(self) -> int:
        """Width of the attention's inside: heads x head width; larger than ``hidden_size`` in the real model."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def video_row(self) -> int:
        """Numbers in one video row of the packed sequence: latent channels x patch volume (96 in the real model)."""
        t, h, w = self.patch_size
        return self.latents_dim * t * h * w

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any], *, source: str = "transformer/config.json") -> DitConfig:
        """Read a native or a Diffusers config; fields that it leaves out keep the real model's values.

        Raises:
            CheckpointError: a value of the wrong type, or one that no H3 model can have; names ``source``, field
                and value.
        """
        diffusers = config.get("_class_name") == DIFFUSERS_CLASS
        known = {DIFFUSERS_ALIASES.get(name, name): value for name, value in config.items()}
        values: dict[str, Any] = {}
        for item in fields(cls):
            if item.name not in known:
                continue
            value = known[item.name]
            if item.name == "patch_size":
                if not isinstance(value, list | tuple) or len(value) != 3:
                    raise _bad(source, item.name, value, "it must hold three whole numbers: frames, rows, columns")
                values[item.name] = tuple(_positive_int(source, item.name, entry) for entry in value)
            elif item.name.endswith("_eps"):
                if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1:
                    raise _bad(source, item.name, value, "it must be a small positive number")
                values[item.name] = float(value)
            else:
                values[item.name] = _positive_int(source, item.name, value)
        if diffusers:  # The Diffusers class derives these two from the width and does not store them.
            hidden = values.get("hidden_size", cls.hidden_size)
            values.setdefault("adaln_out_features", ADALN_MODALITIES * ADALN_OUTPUTS_PER_MODALITY * hidden)
            values.setdefault("final_adaln_out_features", 2 * hidden)
        result = cls(**values)
        result._check(source)
        return result

    def _check(self, source: str) -> None:
        fixed = {"text_dim": TEXT_WIDTH, "latents_dim": VIDEO_CHANNELS, "audio_latents_dim": AUDIO_CHANNELS}
        for name, expected in fixed.items():
            if getattr(self, name) != expected:
                raise _bad(source, name, getattr(self, name), f"every H3 model has {expected}")
        derived = {
            "adaln_out_features": ADALN_MODALITIES * ADALN_OUTPUTS_PER_MODALITY * self.hidden_size,
            "final_adaln_out_features": 2 * self.hidden_size,
        }
        for name, expected in derived.items():
            if getattr(self, name) != expected:
                raise _bad(source, name, getattr(self, name), f"hidden_size {self.hidden_size} makes it {expected}")
        if 6 * self.rope_inv_freq_len > self.attention_head_dim:
            why = f"RoPE turns 6 x this many of the {self.attention_head_dim} channels of a head"
            raise _bad(source, "rope_inv_freq_len", self.rope_inv_freq_len, why)
        if self.timestep_input_dim % 2:
            why = "half of it holds cosines and half sines, so it must be even"
            raise _bad(source, "timestep_input_dim", self.timestep_input_dim, why)

    def to_native(self) -> dict[str, Any]:
        """The native ``transformer/config.json``."""
        return {"_class_name": NATIVE_CLASS, **asdict(self), "patch_size": list(self.patch_size)}

    def to_diffusers(self) -> dict[str, Any]:
        """The Diffusers ``transformer/config.json``.

        The two AdaLN widths are kept, although the Diffusers class derives them: the host's own reader takes the
        real model's values when they are absent, whatever the width.
        """
        names = {native: diffusers for diffusers, native in DIFFUSERS_ALIASES.items()}
        values = {names.get(name, name): value for name, value in self.to_native().items()}
        return {**values, "_class_name": DIFFUSERS_CLASS, "_diffusers_version": "0.40.0", "rope_theta": 10000.0}


@dataclass(frozen=True)
class VisionConfig:
    """Shape of the text encoder's vision tower (Qwen3-VL)."""

    depth: int = 27
    hidden_size: int = 1152
    num_heads: int = 16
    intermediate_size: int = 4304
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    num_position_embeddings: int = 2304
    out_hidden_size: int = TEXT_WIDTH
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)

    @property
    def merged_size(self) -> int:
        """Width of one merged patch: ``spatial_merge_size`` squared patches side by side."""
        return self.hidden_size * self.spatial_merge_size**2


@dataclass(frozen=True)
class TextEncoderConfig:
    """Shape of the text encoder, from ``text_encoder/config.json`` (Qwen3-VL)."""

    vocab_size: int = 151936
    hidden_size: int = TEXT_WIDTH
    num_hidden_layers: int = 64
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 25600
    vision: VisionConfig = field(default_factory=VisionConfig)

    @property
    def layers_used(self) -> int:
        """Decoder layers that the host builds: H3 reads the hidden states after layer 50."""
        return min(self.num_hidden_layers, TEXT_LAYERS_USED)

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any], *, source: str = "text_encoder/config.json") -> TextEncoderConfig:
        """Read a Qwen3-VL config; fields that it leaves out keep Qwen3-VL-32B's values.

        Raises:
            CheckpointError: a section is missing, a value has the wrong type, or no H3 model can have it.
        """
        if config.get("model_type") != "qwen3_vl":
            raise _bad(source, "model_type", config.get("model_type"), "H3's text encoder is a qwen3_vl")
        text, vision = (config.get(name) for name in ("text_config", "vision_config"))
        for name, section in (("text_config", text), ("vision_config", vision)):
            if not isinstance(section, Mapping):
                raise _bad(source, name, section, "the section is missing or is not an object")
        assert isinstance(text, Mapping) and isinstance(vision, Mapping)
        vision_values: dict[str, Any] = {}
        for item in fields(VisionConfig):
            if item.name not in vision:
                continue
            name, value = f"vision_config.{item.name}", vision[item.name]
            if item.name != "deepstack_visual_indexes":
                vision_values[item.name] = _positive_int(source, name, value)
            elif isinstance(value, list) and all(type(entry) is int for entry in value):
                vision_values[item.name] = tuple(value)
            else:
                raise _bad(source, name, value, "it must be a list of layer numbers")
        text_values = {
            item.name: _positive_int(source, f"text_config.{item.name}", text[item.name])
            for item in fields(cls)
            if item.name in text
        }
        result = cls(**text_values, vision=VisionConfig(**vision_values))
        result._check(source)
        return result

    def _check(self, source: str) -> None:
        for name, value in (
            ("text_config.hidden_size", self.hidden_size),
            ("vision_config.out_hidden_size", self.vision.out_hidden_size),
        ):
            if value != TEXT_WIDTH:
                raise _bad(source, name, value, f"every H3 model has {TEXT_WIDTH}")
        if self.num_attention_heads % self.num_key_value_heads:
            why = f"it must divide num_attention_heads {self.num_attention_heads}"
            raise _bad(source, "text_config.num_key_value_heads", self.num_key_value_heads, why)
        if self.vision.hidden_size % self.vision.num_heads:
            why = f"it must divide the tower's hidden_size {self.vision.hidden_size}"
            raise _bad(source, "vision_config.num_heads", self.vision.num_heads, why)
        for index in self.vision.deepstack_visual_indexes:
            if not 0 <= index < self.vision.depth:
                why = f"the tower has layers 0 to {self.vision.depth - 1}"
                raise _bad(source, "vision_config.deepstack_visual_indexes", index, why)
