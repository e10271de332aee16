# SPDX-License-Identifier: Apache-2.0
"""The layout of the real model adds up to its published size, and every linear is accounted for once."""

from __future__ import annotations

from collections import Counter

import pytest

from vllm_h3_plugin.checkpoint.configs import DitConfig, TextEncoderConfig
from vllm_h3_plugin.checkpoint.layout import (
    FP32_TENSORS,
    LinearSpec,
    dit_tensors,
    dit_tensors_diffusers,
    linear_layers,
    text_encoder_tensors,
    to_diffusers,
)

GIGA = 1e9


@pytest.fixture(scope="module")
def linears() -> tuple[LinearSpec, ...]:
    return linear_layers(DitConfig(), TextEncoderConfig())


def parameters(linears: tuple[LinearSpec, ...], prefix: str) -> float:
    return sum(spec.parameters for spec in linears if spec.path.startswith(prefix)) / GIGA


def test_the_dit_has_33_billion_parameters() -> None:
    assert sum(spec.numel for spec in dit_tensors(DitConfig()).values()) / GIGA == pytest.approx(33.123, abs=5e-4)


def test_where_the_dit_parameters_are(linears) -> None:
    adaln = sum(spec.parameters for spec in linears if ".adaln_proj." in spec.path) / GIGA
    assert adaln == pytest.approx(13.04, abs=5e-3)
    blocks = sum(
        spec.parameters for spec in linears if spec.path.startswith("transformer.blocks.") and "adaln" not in spec.path
    )
    assert blocks / GIGA == pytest.approx(19.268, abs=5e-4)
    assert parameters(linears, "transformer.token_refiner.") == pytest.approx(0.771, abs=5e-4)
    assert parameters(linears, "transformer.condition_proj") == pytest.approx(0.0275, abs=5e-5)
    fp32 = sum(spec.numel for name, spec in dit_tensors(DitConfig()).items() if name in FP32_TENSORS)
    assert fp32 / GIGA == pytest.approx(0.017, abs=5e-4)


def test_adaln_is_24_gib_in_bf16() -> None:
    config = DitConfig()
    one = dit_tensors(config)["blocks.0.adaln_proj.linear.weight"]
    assert one.shape == (96768, 2688)
    assert config.num_layers * one.nbytes / 2**30 == pytest.approx(24.2, abs=0.05)


def test_the_text_encoder_is_48_gib_whatever_layers_the_files_hold() -> None:
    for layers in (50, 64):
        tensors = text_encoder_tensors(TextEncoderConfig(num_hidden_layers=layers))
        assert sum(spec.nbytes for spec in tensors.values()) / 2**30 == pytest.approx(47.97, abs=5e-3)


def test_twelve_tensors_and_the_rope_buffer_are_fp32() -> None:
    tensors = dit_tensors(DitConfig(num_layers=1))
    assert len(FP32_TENSORS) == 12
    fp32 = {name for name, spec in tensors.items() if spec.dtype == "F32"}
    assert fp32 == FP32_TENSORS | {"rope.inv_freq"}
    assert {spec.dtype for spec in tensors.values()} == {"F32", "BF16"}


def test_every_2d_weight_belongs_to_one_linear(linears) -> None:
    """A recipe that matches every linear misses no matrix; only the embeddings are looked up and not multiplied."""
    sources = Counter(name for spec in linears for name in spec.sources)
    assert max(sources.values()) == 1
    dit, text = dit_tensors(DitConfig()), text_encoder_tensors(TextEncoderConfig())
    matrices = {name for name, spec in {**dit, **text}.items() if len(spec.shape) == 2}
    weights = {name for name in sources if name.endswith(".weight")}
    assert matrices - weights == {"model.language_model.embed_tokens.weight", "model.visual.pos_embed.weight"}
    assert weights <= matrices


def test_a_linear_is_as_large_as_its_sources(linears) -> None:
    tensors = {**dit_tensors(DitConfig()), **text_encoder_tensors(TextEncoderConfig())}
    for spec in linears:
        assert sum(tensors[name].numel for name in spec.sources) == spec.parameters, spec.path
        assert all(tensors[name].shape[-1] == spec.in_features for name in spec.sources if name.endswith("weight"))
        assert spec.bias == spec.sources[-1].endswith(".bias")


def test_module_paths(linears) -> None:
    by_path = {spec.path: spec for spec in linears}
    assert len(by_path) == len(linears)
    fc1 = by_path["transformer.blocks.49.mlp.fc1"]
    assert (fc1.part, fc1.in_features, fc1.out_features, fc1.bias) == ("transformer", 5376, 2 * 14336, False)
    qkv = by_path["text_encoder.text_model.layers.49.self_attn.qkv_proj"]
    prefix = "model.language_model.layers.49.self_attn"
    assert qkv.sources == tuple(f"{prefix}.{name}_proj.weight" for name in "qkv")
    assert by_path["text_encoder.vision.deepstack_merger_list.2.linear_fc2"].part == "vision"
    assert "transformer.final_layer.adaln_proj.linear" in by_path


def test_the_diffusers_layout_holds_the_same_parameters_but_for_rope() -> None:
    config = DitConfig()
    native, diffusers = dit_tensors(config), dit_tensors_diffusers(config)
    count = sum(spec.numel for spec in native.values()) - config.rope_inv_freq_len
    assert sum(spec.numel for spec in diffusers.values()) == count
    assert to_diffusers("rope.inv_freq") == ()
    assert diffusers["transformer_blocks.0.attn.to_k.weight"].shape == (7168, 5376)
    assert diffusers["proj_out.bias"].dtype == "F32"


def test_a_diffusers_config_reads_back_as_the_same_model() -> None:
    config = DitConfig(num_layers=3)
    for written in (config.to_native(), config.to_diffusers()):
        assert DitConfig.from_mapping(written) == config
    short = {name: value for name, value in DitConfig(hidden_size=64).to_diffusers().items() if "adaln_out" not in name}
    assert DitConfig.from_mapping(short).adaln_out_features == 18 * 64
