# SPDX-License-Identifier: Apache-2.0
"""What a plan weighs, against the published sizes of the real model and against counting by hand."""

from __future__ import annotations

import pytest

from vllm_h3_plugin.checkpoint.layout import (
    DitConfig,
    LinearSpec,
    TextEncoderConfig,
    dit_tensors,
    linear_layers,
    text_encoder_tensors,
)
from vllm_h3_plugin.quantization.footprint import (
    GIB,
    Weight,
    grouped,
    linear_bytes,
    linear_weights,
    other_weights,
    total_of,
)
from vllm_h3_plugin.quantization.plan import plan
from vllm_h3_plugin.quantization.precision import Precision
from vllm_h3_plugin.quantization.recipe import load_recipe


def weights_of(recipe: str, dit: DitConfig, text: TextEncoderConfig) -> list[Weight]:
    linears = linear_layers(dit, text)
    given = plan(load_recipe(recipe), linears)
    return linear_weights(given, linears) + other_weights(dit, text, given.vision)


@pytest.mark.parametrize(
    ("precision", "bias", "nbytes"),
    [
        (Precision.FP32, True, 64 * 32 * 4 + 64 * 4),
        (Precision.BF16, True, 64 * 32 * 2 + 64 * 2),
        (Precision.BF16, False, 64 * 32 * 2),
        (Precision.FP8_CHANNEL, True, 64 * 32 + 64 * 4 + 64 * 2),
        (Precision.FP8_TENSOR, False, 64 * 32 + 4),
        (Precision.INT8, True, 64 * 32 + 64 * 4 + 64 * 2),
    ],
)
def test_bytes_of_one_linear(precision, bias, nbytes):
    assert linear_bytes(LinearSpec("p", "transformer", 32, 64, bias, ()), precision) == nbytes


def test_bf16_weighs_what_the_checkpoint_holds():
    dit, text = DitConfig(num_layers=3), TextEncoderConfig(num_hidden_layers=2)
    total = total_of(weights_of("bf16", dit, text))
    tensors = [*dit_tensors(dit).values(), *text_encoder_tensors(text).values()]
    assert total.parameters == sum(tensor.numel for tensor in tensors)
    assert total.nbytes == sum(tensor.nbytes for tensor in tensors)


# Published totals in GiB: DiT and VAEs apart, text encoder with its vision tower. Scales and the BF16 condition_proj,
# 0.07 GiB together, are not in the published figures.
@pytest.mark.parametrize(
    ("recipe", "part", "gib", "tolerance"),
    [
        ("bf16", ("transformer",), 119.9 - 47.97 - 10.24, 0.06),
        ("bf16", ("text_encoder", "vision"), 47.97, 0.01),
        ("fp8", ("text_encoder", "vision"), 25.26, 0.03),
        ("fp8-tensor", ("text_encoder", "vision"), 25.26, 0.01),
        ("fp8", ("transformer",), 55.1 - 25.26 - 10.24 - 0.97e9 / GIB, 0.15),
        ("fp8-tensor", ("transformer",), 55.1 - 25.26 - 10.24 - 0.97e9 / GIB + 24.29, 0.15),
        ("bf16-table", ("transformer",), 119.9 - 47.97 - 10.24 - 24.29, 0.06),
        ("fp8-text-bf16", ("text_encoder", "vision"), 47.97, 0.01),
        ("int8", ("text_encoder", "vision"), 47.97, 0.01),
        ("int8-text", ("text_encoder", "vision"), 25.26, 0.03),
        ("int8", ("transformer",), 55.1 - 25.26 - 10.24 - 0.97e9 / GIB, 0.15),
    ],
)
def test_the_real_model_weighs_what_is_published(recipe, part, gib, tolerance):
    weights = weights_of(recipe, DitConfig(), TextEncoderConfig())
    assert total_of(weight for weight in weights if weight.part in part).gib == pytest.approx(gib, abs=tolerance)


def test_a_vision_tower_in_fp32_weighs_twice_as_much_norms_and_embeddings_too():
    dit, text = DitConfig(num_layers=1), TextEncoderConfig(num_hidden_layers=1)
    plain, wide = (
        total_of(weight for weight in weights_of(recipe, dit, text) if weight.part == "vision")
        for recipe in ("fp8", "fp8-vision-fp32")
    )
    assert wide.nbytes == 2 * plain.nbytes and wide.parameters == plain.parameters
    assert plain.gib == pytest.approx(1.1, abs=0.05)


def test_the_real_dit_has_its_published_parameters():
    weights = weights_of("fp8", DitConfig(), TextEncoderConfig())
    dit = [weight for weight in weights if weight.part == "transformer"]
    assert total_of(dit).parameters == pytest.approx(33.123e9, abs=5e5)
    for word, published in (("transformer.blocks.", 19.268e9), ("token_refiner", 0.771e9), ("adaln_proj", 13.04e9)):
        chosen = [w for w in dit if word in w.label and ("adaln" in w.label) == (word == "adaln_proj")]
        assert total_of(chosen).parameters == pytest.approx(published, abs=1e6)


def test_alike_layers_share_a_line(tiny):
    lines = {weight.label: weight for weight in grouped(linear_weights(plan(load_recipe("fp8"), tiny), tiny))}
    fc1 = lines["transformer.blocks.{0..1}.mlp.fc1"]
    assert fc1.count == 2 and fc1.parameters == 2 * 2 * 128 * 64 and fc1.nbytes == fc1.parameters + 2 * 256 * 4
    assert lines["transformer.token_refiner.blocks.0.mlp.fc1"].count == 1
    assert lines["transformer.condition_proj"].count == 1


def test_a_layer_with_a_precision_of_its_own_leaves_a_gap_in_its_group(write, recipe_dict, real):
    recipe_dict["rules"].insert(0, {"match": "transformer.blocks.7.mlp.fc2", "precision": "bf16", "why": "test"})
    weights = linear_weights(plan(load_recipe(write(recipe_dict)), real), real)
    labels = [weight.label for weight in grouped(weights)]
    assert "transformer.blocks.{0..6,8..49}.mlp.fc2" in labels and "transformer.blocks.7.mlp.fc2" in labels


def test_grouping_loses_nothing(real):
    weights = linear_weights(plan(load_recipe("fp8"), real), real)
    assert total_of(grouped(weights)) == total_of(weights)
    assert sum(weight.count for weight in grouped(weights)) == len(real)
