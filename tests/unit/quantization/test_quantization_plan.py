# SPDX-License-Identifier: Apache-2.0
"""Recipes against models: every layer accounted for, every rule used, nothing given a precision it cannot have."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest

from vllm_h3_plugin.checkpoint.layout import FP32_LAYERS
from vllm_h3_plugin.errors import RecipeError
from vllm_h3_plugin.quantization.plan import plan
from vllm_h3_plugin.quantization.precision import Precision
from vllm_h3_plugin.quantization.recipe import load_recipe, recipe_names

CHANNEL, TENSOR, BF16, FP32 = Precision.FP8_CHANNEL, Precision.FP8_TENSOR, Precision.BF16, Precision.FP32


@pytest.fixture
def refused(write, recipe_dict, tiny):
    """Apply a change to the default recipe and return the message with which the tiny model refuses it."""

    def _refused(change) -> str:
        change(recipe_dict["rules"])
        recipe = load_recipe(write(recipe_dict))
        with pytest.raises(RecipeError) as caught:
            plan(recipe, tiny)
        assert recipe.source in str(caught.value)
        return str(caught.value)

    return _refused


def index_of(rules, match: str) -> int:
    return next(i for i, rule in enumerate(rules) if rule["match"] == match)


def rule(match: str, precision: str) -> dict[str, str]:
    return {"match": match, "precision": precision, "why": "test"}


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.parametrize("model", ["tiny", "real"])
def test_packaged_recipe_covers_every_linear(name, model, request):
    linears = request.getfixturevalue(model)
    result = plan(load_recipe(name), linears)
    assert list(result.assignments) == [spec.path for spec in linears]


@pytest.mark.parametrize("name", recipe_names())
def test_fp32_adaln_and_vision_are_the_same_in_every_packaged_recipe(name, real):
    result = plan(load_recipe(name), real)
    tower = {spec.path for spec in real if spec.part == "vision"}
    fp32 = {path for path, given in result.assignments.items() if given.precision is FP32 and path not in tower}
    assert fp32 == {f"transformer.{layer}" for layer in FP32_LAYERS} and len(fp32) == 6
    adaln = {given.precision for path, given in result.assignments.items() if "adaln" in path}
    vision = {result[path].precision for path in tower}
    assert adaln == {BF16} and vision == {FP32 if name == "fp8-vision-fp32" else BF16} == {result.vision}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp8", {"block": CHANNEL, "refiner": CHANNEL, "condition": BF16, "text": CHANNEL}),
        ("fp8-vision-fp32", {"block": CHANNEL, "refiner": CHANNEL, "condition": BF16, "text": CHANNEL}),
        ("fp8-text-bf16", {"block": CHANNEL, "refiner": CHANNEL, "condition": BF16, "text": BF16}),
        ("fp8-tensor", {"block": TENSOR, "refiner": TENSOR, "condition": TENSOR, "text": TENSOR}),
        ("bf16", {"block": BF16, "refiner": BF16, "condition": BF16, "text": BF16}),
    ],
)
def test_what_each_packaged_recipe_does(name, expected, real):
    result = plan(load_recipe(name), real)
    seen: dict[str, set[Precision]] = {}
    for path, given in result.assignments.items():
        parts = path.split(".")
        if "adaln_proj" in parts or given.precision is FP32 or "vision" in parts:
            continue
        kind = {"blocks": "block", "token_refiner": "refiner", "condition_proj": "condition", "text_model": "text"}
        seen.setdefault(kind[parts[1]], set()).add(given.precision)
    assert seen == {kind: {precision} for kind, precision in expected.items()}


def test_quantized_lists_what_a_backend_computes(real):
    result = plan(load_recipe("fp8"), real)
    counts = Counter(path.split(".")[1] for path in result.quantized)
    assert counts == {"token_refiner": 2 * 4, "blocks": 50 * 4, "text_model": 50 * 4}
    assert plan(load_recipe("bf16"), real).quantized == ()


def test_first_match_wins(write, recipe_dict, tiny):
    recipe_dict["rules"].insert(0, rule("transformer.blocks.1.mlp.fc2", "bf16"))
    result = plan(load_recipe(write(recipe_dict)), tiny)
    assert result["transformer.blocks.1.mlp.fc2"].precision is BF16
    assert result["transformer.blocks.1.mlp.fc2"].rule.why == "test"
    assert result["transformer.blocks.0.mlp.fc2"].precision is CHANNEL


def test_unmatched_linear_is_named_with_how_many(refused):
    message = refused(lambda rules: rules.pop(index_of(rules, "text_encoder.text_model.**")))
    assert "no rule matches linear layer text_encoder.text_model.layers.0.self_attn.qkv_proj and 7 more" in message


def test_a_rule_that_matches_nothing_is_named(refused):
    message = refused(lambda rules: rules.append(rule("transformer.block.**", "bf16")))
    assert "rule 10 (transformer.block.**) matches no linear layer" in message


def test_a_shadowed_rule_names_the_rules_that_shadow_it(refused):
    message = refused(lambda rules: rules.append(rule("transformer.blocks.*.attn.*", "bf16")))
    assert "rule 10 (transformer.blocks.*.attn.*) decides nothing" in message
    assert "rule 7 (transformer.blocks.**)" in message and "Move the narrower rule up" in message


def test_a_rule_shadowed_by_two_names_both(refused):
    def change(rules):
        rules.append(rule("transformer.**.mlp.fc1", "bf16"))

    message = refused(change)
    assert "rule 6 (transformer.token_refiner.**) and rule 7 (transformer.blocks.**)" in message


@pytest.mark.parametrize("layer", FP32_LAYERS)
@pytest.mark.parametrize("precision", ["bf16", "fp8_channel", "fp8_tensor"])
def test_an_fp32_layer_in_anything_else_is_refused(refused, layer, precision):
    message = refused(lambda rules: rules.insert(0, rule(f"transformer.{layer}", precision)))
    assert f"gives transformer.{layer} {precision}" in message and "Give it fp32" in message


@pytest.mark.parametrize("precision", ["fp32", "fp8_channel", "fp8_tensor"])
@pytest.mark.parametrize(
    "path", ["transformer.blocks.1.adaln_proj.linear", "transformer.final_layer.adaln_proj.linear"]
)
def test_adaln_in_anything_but_bf16_is_refused(refused, path, precision):
    message = refused(lambda rules: rules.insert(0, rule(path, precision)))
    assert f"rule 1 ({path}) gives {path} {precision}" in message and "AdaLN stays BF16" in message


@pytest.mark.parametrize("precision", ["fp8_channel", "fp8_tensor"])
def test_a_quantized_vision_tower_is_refused(refused, precision):
    message = refused(lambda rules: rules.insert(0, rule("text_encoder.vision.blocks.**", precision)))
    assert f"text_encoder.vision.blocks.0.attn.qkv {precision}" in message and "vision tower" in message
    assert "Give it bf16" in message


def test_a_vision_tower_in_two_precisions_is_refused(refused):
    message = refused(lambda rules: rules.insert(0, rule("text_encoder.vision.blocks.**", "fp32")))
    assert "gives the vision tower bf16 and fp32" in message and "one precision" in message


def test_fp32_is_for_the_vision_tower_and_not_for_what_stands_beside_it(refused):
    message = refused(lambda rules: rules.insert(0, rule("text_encoder.text_model.**", "fp32")))
    assert "builds this layer in BF16" in message


def test_fp32_for_a_layer_that_the_host_builds_in_bf16_is_refused(refused):
    message = refused(lambda rules: rules.insert(0, rule("transformer.condition_proj", "fp32")))
    assert "transformer.condition_proj fp32" in message and "builds this layer in BF16" in message


def test_a_broad_rule_over_an_fp32_layer_is_refused_by_name(refused):
    message = refused(lambda rules: rules.insert(0, rule("transformer.**", "fp8_channel")))
    assert "gives transformer.video_patch_proj fp8_channel" in message and "by a rule before this one" in message


def test_asking_for_a_layer_outside_the_plan_names_it(tiny):
    with pytest.raises(
        RecipeError, match=r"transformer\.blocks\.9\.mlp\.fc1 is not in the precision plan of recipe fp8"
    ):
        plan(load_recipe("fp8"), tiny)["transformer.blocks.9.mlp.fc1"]


def test_a_plan_survives_pickling_between_processes(tiny):
    result = plan(load_recipe("fp8"), tiny)
    assert pickle.loads(pickle.dumps(result)) == result
