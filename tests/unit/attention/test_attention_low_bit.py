# SPDX-License-Identifier: Apache-2.0
"""Attention in few bits: what is quantized and how, what is refused, and that the recipe alone asks for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_h3_plugin.attention.exact import reference_rows
from vllm_h3_plugin.attention.low_bit import (
    MAX_TOKENS,
    SCALE_FLOOR,
    check_tokens,
    fp8_attention,
    fp8_support,
    int8_attention,
    means,
    quantize_heads,
    reference_attention,
    refuse,
)
from vllm_h3_plugin.data import data_path
from vllm_h3_plugin.errors import RecipeError, UsageError
from vllm_h3_plugin.quantization.recipe import AttentionPrecision, load_recipe, recipe_names

SCALE = 128**-0.5


def qkv(rows: int = 200, heads: int = 2, offset: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    fused = torch.randn(1, rows, 3 * heads * 128, generator=generator)
    q, k, v = (x.view(1, rows, heads, 128) for x in fused.split(heads * 128, -1))
    k = k + offset * torch.randn(1, 1, heads, 128, generator=generator)
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want).norm() / want.norm()).item()


def test_subtracting_one_vector_from_all_keys_changes_no_attention():
    q, k, v = (x.float() for x in qkv())
    shifted = k - means(k, v)[0]
    assert torch.allclose(
        reference_rows(q, shifted, v, SCALE, 200), reference_rows(q, k, v, SCALE, 200), rtol=1e-4, atol=1e-5
    )


def test_means_are_taken_over_rows_of_all_the_sequence():
    k = torch.zeros(1, 5000, 1, 128)
    k[:, 2500:] = 1.0
    found = means(k, 3 * k)
    assert found.shape == (2, 1, 128) and (found - torch.tensor([0.5, 1.5])[:, None, None]).abs().max() < 0.03
    last = k[:, 4999:]
    assert torch.equal(means(last, last), torch.ones(2, 1, 128)), "one row is its own mean"


def test_what_is_taken_from_the_values_is_in_the_result_again():
    q, k, v = qkv()
    shifted = (v.float() + 2.0).bfloat16()
    exact = reference_rows(q, k, shifted, SCALE, 200)
    got = reference_attention(q, k, shifted, SCALE)[0, :, 0].float()
    # Of the part that differs between tokens, not of the constant 2.
    assert (got - exact).norm() / (exact - 2.0).norm() < 0.15
    assert (quantize_heads(q, k, shifted, means(k, shifted)).v_scale < 0.012).all(), "values around zero"


def test_scales_are_per_head_and_elements_come_back():
    q, k, v = qkv()
    q = q * torch.tensor([1.0, 1000.0])[:, None]
    x = quantize_heads(q, k, v, means(k, v))
    assert [t.dtype for t in x[:3]] == [torch.float8_e4m3fn] * 3 and x.q_scale.shape == (1, 2)
    assert x.q_scale[0, 1] / x.q_scale[0, 0] > 500
    for element, scale, want in zip(x[:3], x[3:], (q, k - means(k, v)[0], v - means(k, v)[1]), strict=True):
        assert relative(element.float() * scale[0, :, None], want.float()) < 0.04  # E4M3 rounds to 1 in 16


def test_smoothed_keys_keep_keys_that_lie_far_off_centre_apart():
    q, k, v = qkv(offset=30.0)
    exact = reference_rows(q, k, v, SCALE, 200)
    smoothed = relative(reference_attention(q, k, v, SCALE)[0, :, 0], exact)
    x = quantize_heads(q, k, v, torch.zeros(2, 2, 128))
    keys, queries = x.k[0, :, 0].float() * x.k_scale[0, 0], x.q[0, :, 0].float() * x.q_scale[0, 0]
    values = x.v[0, :, 0].float() * x.v_scale[0, 0]
    as_they_are = relative(((queries @ keys.T) * SCALE).softmax(-1) @ values, exact)
    assert smoothed < 0.08 < 5 * smoothed < as_they_are


def test_a_head_of_zeros_has_a_scale_and_stays_zero():
    q, k, _ = qkv()
    x = quantize_heads(q, k, torch.zeros_like(k), means(k, torch.zeros_like(k)))
    assert (x.v_scale == SCALE_FLOOR).all() and (x.v.float() == 0).all()
    assert (reference_attention(q, k, torch.zeros_like(k), SCALE) == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_infinities_and_nan_come_out_as_nan_in_their_head_and_no_other(value):
    q, k, v = qkv()
    v = v.clone()
    v[0, 3, 1, 5] = value
    out = reference_attention(q, k, v, SCALE)
    assert out[..., 0, :].isfinite().all() and out[:, :, 1, 5].isnan().all()


def test_fa3_is_handed_eight_bits_and_a_scale_per_head():
    seen = {}

    def function(q, k, v, **options):
        seen.update(options, q=q, k=k, v=v)
        return torch.zeros(q.shape, dtype=torch.bfloat16), torch.zeros(1)

    q, k, v = qkv()
    out = fp8_attention(function, quantize_heads)(q, k[:, :150], v[:, :150], SCALE)
    assert out.shape == q.shape and out.dtype == torch.bfloat16
    assert (seen["softmax_scale"], seen["causal"]) == (SCALE, False)
    for name, rows in (("q", 200), ("k", 150), ("v", 150)):
        assert seen[name].dtype == torch.float8_e4m3fn and seen[name].shape == (1, rows, 2, 128)
        assert seen[f"{name}_descale"].shape == (1, 2) and seen[f"{name}_descale"].dtype == torch.float32


def test_sageattention_gets_rows_before_heads_and_never_the_callers_keys_to_change():
    def function(q, k, v, *, tensor_layout, is_causal, sm_scale):
        assert (tensor_layout, is_causal, sm_scale) == ("NHD", False, SCALE)
        k -= k.mean(1, keepdim=True)  # what 1.0.6 does
        return q

    q, k, v = qkv(offset=3.0)
    before = k.clone()
    assert torch.equal(int8_attention(function, changes_keys=True)(q, k, v, SCALE), q)
    assert torch.equal(k, before)


def test_views_that_32_bit_offsets_cannot_reach_are_copied(monkeypatch):
    from vllm_h3_plugin.attention import exact

    monkeypatch.setattr(exact, "_INT32_MAX", 200 * 3 * 2 * 128 - 1)
    q, k, v = qkv()
    fused = torch.stack([q, k, v], 2).flatten(2, 3)
    view = fused[:, :, 2:4]
    assert not view.is_contiguous()
    seen = []
    int8_attention(lambda q, k, v, **_: seen.extend([q, k, v]) or q, changes_keys=False)(view, k, view, SCALE)
    assert [x.is_contiguous() for x in seen] == [True, True, True] and torch.equal(seen[0], view)


@pytest.mark.parametrize(
    ("capability", "flash", "words"),
    [
        (121, "fa3 (fa3_fwd 0.0.3)", ("SM 12.1", "Hopper")),
        (100, None, ("SM 10.0",)),
        (None, None, ("CPU",)),
        (90, None, ("fa3_fwd",)),
        (90, "fa2 (flash-attn 2.8)", ("fa3_fwd",)),
    ],
)
def test_fp8_that_cannot_run_names_chip_or_package(capability, flash, words):
    support = fp8_support(capability, flash)
    assert not support and all(word in support.reason for word in words)
    message = str(refuse(AttentionPrecision.FP8, support.reason))
    assert '"attention": "fp8" cannot run here' in message and '"exact"' in message and '"int8"' in message


def test_fp8_runs_on_hopper_with_fa3():
    assert fp8_support(90, "fa3 (fa3_fwd 0.0.3)")


@pytest.mark.parametrize("precision", [AttentionPrecision.FP8, AttentionPrecision.INT8])
def test_a_request_beyond_the_largest_size_is_refused_with_both_numbers(precision):
    limit = MAX_TOKENS[precision]
    check_tokens(precision, limit)
    with pytest.raises(UsageError) as caught:
        check_tokens(precision, limit + 64)
    message = str(caught.value)
    assert str(limit + 64) in message and str(limit) in message and precision.value in message
    assert "fewer frames" in message and "exact" in message


def test_exact_attention_has_no_largest_size():
    check_tokens(AttentionPrecision.EXACT, 10**9)


def test_triton_kernels_quantize_as_the_reference_does(tmp_path):
    """In Triton's interpreter, whose own conversion to E4M3 rounds ties up, cuts subnormals off and loses carries when
    a mantissa reaches the next power of two; the compiled kernel is held to all bits by the GPU tests."""
    code = """
import torch
from vllm_h3_plugin.attention.low_bit import means, quantize_heads as reference
from vllm_h3_plugin.attention.low_bit_triton import quantize_heads
torch.manual_seed(0)
fused = torch.randn(1, 130, 3 * 2 * 128).bfloat16()
q, k, v = (x.view(1, 130, 2, 128) for x in fused.split(256, -1))
k, v = k[:, :101], v[:, :101] * 100
for _ in range(2):
    mean = means(k, v)
    want, got = reference(q, k, v, mean), quantize_heads(q, k, v, mean)
    for name, x, y in zip(want._fields, want, got):
        assert x.shape == y.shape and x.dtype == y.dtype and y.is_contiguous(), name
        if name.endswith("scale"):
            assert torch.equal(x, y), name
        else:
            x, y = x.float(), y.float()
            carried = (x == 2 * y) & (x != 0)
            near = (x - y).abs() <= (x.abs() / 8).clamp(min=2**-9)
            assert (near | carried).all() and (x == y).float().mean() > 0.9, name
    q, k, v = q[:, :1], k[:, :1], v[:, :1]  # one row
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def recipe(folder: Path, **keys: str) -> Path:
    content = json.loads((data_path("quant") / "fp8.json").read_text()) | keys
    path = folder / "mine.json"
    path.write_text(json.dumps(content))
    return path


def test_attention_is_exact_unless_a_recipe_says_otherwise(tmp_path):
    assert load_recipe(recipe(tmp_path)).attention is AttentionPrecision.EXACT
    assert load_recipe(recipe(tmp_path, attention="exact")).attention is AttentionPrecision.EXACT
    low = {name for name in recipe_names() if load_recipe(name).attention is not AttentionPrecision.EXACT}
    assert low == {"fp8-attn-fp8", "fp8-attn-int8"}


@pytest.mark.parametrize("word", ["fp8", "int8"])
def test_the_packaged_recipes_differ_from_fp8_in_attention_alone(word):
    ours, base = load_recipe(f"fp8-attn-{word}"), load_recipe("fp8")
    assert ours.attention.value == word
    assert (ours.rules, ours.adaln, ours.method) == (base.rules, base.adaln, base.method)


@pytest.mark.parametrize("word", ["int4", "FP8", ""])
def test_another_word_is_refused_with_the_allowed_ones(tmp_path, word):
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe(tmp_path, attention=word))
    message = str(caught.value)
    assert "attention" in message and repr(word).replace("'", '"') in message
    assert "'exact', 'fp8' or 'int8'" in message


def test_the_key_is_not_among_the_required_ones(tmp_path):
    path = recipe(tmp_path)
    content = json.loads(path.read_text())
    del content["adaln"]
    path.write_text(json.dumps(content))
    with pytest.raises(RecipeError, match=r"Required keys: name, description, method, adaln, rules\.$"):
        load_recipe(path)
