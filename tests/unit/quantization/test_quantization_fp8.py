# SPDX-License-Identifier: Apache-2.0
"""The FP8 arithmetic: scales, rounding, error bounds, odd inputs, and equality with the host's own to the bit."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_h3_plugin.errors import BackendError, RecipeError
from vllm_h3_plugin.quantization import fp8
from vllm_h3_plugin.quantization.precision import Precision

CHANNEL, TENSOR = Precision.FP8_CHANNEL, Precision.FP8_TENSOR
FLOOR = 1.0 / (448 * 512)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def test_channel_scale_is_amax_over_448_per_row():
    weight = torch.tensor([[1.0, -448.0], [2.0, 0.5]], dtype=torch.bfloat16)
    q, scale = fp8.quantize_weight(weight, CHANNEL, path="w")
    assert q.shape == (2, 2) and q.dtype is torch.float8_e4m3fn and q.is_contiguous()
    assert scale.shape == (2, 1) and scale.dtype is torch.float32
    assert scale.flatten().tolist() == [1.0, float(torch.tensor(2.0) / torch.tensor(448.0))]
    assert q.float().tolist() == [[1.0, -448.0], [448.0, 112.0]]


def test_tensor_scale_is_one_number():
    q, scale = fp8.quantize_weight(torch.tensor([[1.0, -224.0], [2.0, 0.5]]), TENSOR, path="w")
    assert scale.shape == (1,) and scale.item() == 0.5
    assert q.float().tolist() == [[2.0, -448.0], [4.0, 1.0]]


@pytest.mark.parametrize("precision", [CHANNEL, TENSOR])
def test_weight_error_is_within_half_a_step_of_e4m3(precision):
    """Relative step 2^-3, so an element errs by at most 2^-4 of itself, or 2^-10 of a scale below the normal range."""
    weight = gaussian(256, 512)
    q, scale = fp8.quantize_weight(weight, precision, path="w")
    error = (fp8.dequantize(q, scale) - weight.float()).abs()
    assert bool((error <= torch.maximum(weight.float().abs() * 2**-4, scale * 2**-10) * 1.0001).all())
    assert 0.02 < relative_error(fp8.dequantize(q, scale), weight) < 0.03


def test_channel_is_clearly_better_than_tensor_on_outlier_rows():
    """E4M3 has 2^15 of normal range, so that only far outliers push the other rows of a tensor below it."""
    weight = gaussian(256, 512, dtype=torch.float32) * 0.02
    weight[::16] *= 32768
    quiet = torch.ones(256, dtype=torch.bool)
    quiet[::16] = False
    errors = {}
    for precision in (CHANNEL, TENSOR):
        got = fp8.dequantize(*fp8.quantize_weight(weight, precision, path="w"))
        errors[precision] = relative_error(got[quiet], weight[quiet])
    assert errors[CHANNEL] < 0.03 and errors[TENSOR] > 5 * errors[CHANNEL]


@pytest.mark.parametrize("precision", [CHANNEL, TENSOR])
def test_all_zero_weights_stay_zero_with_the_floor_as_scale(precision):
    q, scale = fp8.quantize_weight(torch.zeros(3, 16, dtype=torch.bfloat16), precision, path="w")
    assert scale.unique().tolist() == pytest.approx([FLOOR]) and not q.float().any()


def test_a_zero_row_among_others_is_exact():
    weight = gaussian(4, 32)
    weight[2] = 0
    q, scale = fp8.quantize_weight(weight, CHANNEL, path="w")
    assert scale[2].item() == pytest.approx(FLOOR) and not fp8.dequantize(q, scale)[2].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("precision", [CHANNEL, TENSOR])
def test_a_weight_that_is_not_finite_names_layer_and_rows(value, precision):
    weight = gaussian(8, 32)
    weight[3, 5] = weight[6, 0] = value
    with pytest.raises(RecipeError) as caught:
        fp8.quantize_weight(weight, precision, path="transformer.blocks.7.mlp.fc1")
    message = str(caught.value)
    assert "transformer.blocks.7.mlp.fc1: 2 of 8 weight rows" in message and "rows 3, 6" in message
    assert "checksums" in message


def test_a_finite_amax_from_elsewhere_does_not_hide_a_bad_weight():
    weight = gaussian(2, 16)
    weight[0, 0] = float("nan")
    with pytest.raises(RecipeError, match="rows 0"):
        fp8.quantize_weight(weight, CHANNEL, path="w", amax=torch.ones(2, 1))


def test_a_precision_that_is_not_fp8_is_refused():
    with pytest.raises(BackendError, match="bf16 is not FP8"):
        fp8.quantize_weight(gaussian(2, 16), Precision.BF16, path="w")


@pytest.mark.parametrize("precision", [CHANNEL, TENSOR])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_with_the_joint_amax_equal_the_whole(precision, dim):
    """Tensor parallelism changes no bit: a rank that holds a shard quantizes it as part of the whole weight."""
    weight = gaussian(32, 64)
    whole, whole_scale = fp8.quantize_weight(weight, precision, path="w")
    shards = weight.chunk(2, dim=dim)
    amaxes = [fp8.weight_amax(shard, precision) for shard in shards]
    if dim == 1 or precision is TENSOR:
        amaxes = [torch.maximum(*amaxes)] * 2
    parts = [fp8.quantize_weight(s, precision, path="w", amax=a) for s, a in zip(shards, amaxes, strict=True)]
    assert torch.equal(torch.cat([q for q, _ in parts], dim=dim).float(), whole.float())
    if dim == 0 and precision is CHANNEL:
        assert torch.equal(torch.cat([scale for _, scale in parts]), whole_scale)
    else:
        assert all(torch.equal(scale, whole_scale) for _, scale in parts)


def test_chunking_changes_nothing(monkeypatch):
    weight = gaussian(70, 48)
    want = fp8.quantize_weight(weight, CHANNEL, path="w"), fp8.quantize_weight(weight, TENSOR, path="w")
    monkeypatch.setattr(fp8, "CHUNK_ELEMENTS", 48 * 9)
    got = fp8.quantize_weight(weight, CHANNEL, path="w"), fp8.quantize_weight(weight, TENSOR, path="w")
    for (q, scale), (want_q, want_scale) in zip(got, want, strict=True):
        assert torch.equal(q.float(), want_q.float()) and torch.equal(scale, want_scale)


def test_a_weight_that_is_not_contiguous_gives_the_same_bits():
    weight = gaussian(48, 32)
    q, scale = fp8.quantize_weight(weight.t().contiguous().t(), CHANNEL, path="w")
    want_q, want_scale = fp8.quantize_weight(weight, CHANNEL, path="w")
    assert q.is_contiguous() and torch.equal(q.float(), want_q.float()) and torch.equal(scale, want_scale)


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_activation_has_one_scale_per_token(tokens, dtype):
    x = gaussian(tokens, 64, dtype=dtype)
    q, scale = fp8.quantize_activation(x)
    assert q.shape == (tokens, 64) and q.dtype is torch.float8_e4m3fn
    assert scale.shape == (tokens, 1) and scale.dtype is torch.float32
    if tokens:
        amax = x.float().abs().amax(dim=1, keepdim=True)
        assert torch.equal(scale, amax / torch.tensor(448.0))
        assert torch.equal(q.float().abs().amax(dim=1), torch.full((tokens,), 448.0))


def test_a_silent_token_gets_the_floor_and_leaves_its_neighbours_alone():
    x = gaussian(3, 64)
    want, _ = fp8.quantize_activation(x)
    x[1] = 0
    q, scale = fp8.quantize_activation(x)
    assert scale[1].item() == pytest.approx(FLOOR) and not q[1].float().any()
    assert torch.equal(q[0].float(), want[0].float()) and torch.equal(q[2].float(), want[2].float())


def test_a_sliced_activation_gives_the_same_bits():
    x = gaussian(6, 128)
    for view in (x[:, 32:96], x[::2], x.t()[:6, :6].t()):
        q, scale = fp8.quantize_activation(view)
        want_q, want_scale = fp8.quantize_activation(view.contiguous())
        assert torch.equal(q.float(), want_q.float()) and torch.equal(scale, want_scale)


# Magnitudes around the floor and far from it; enough values to hit quotients next to E4M3 midpoints.
HARD = [gaussian(64, 256, seed=s) * factor for s, factor in ((1, 1.0), (2, 1e-4), (3, 3e4), (4, 1e-7))]


@pytest.fixture(scope="module")
def host() -> SimpleNamespace:
    """The host's own scale and quantization functions, run from their source.

    Importing their modules takes most of a minute, because they reach for every MoE kernel of vLLM.
    """
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.submodule_search_locations, "tests marked `host` run where vLLM is installed"
    layers = Path(found.submodule_search_locations[0]) / "model_executor/layers/quantization"
    wanted = {
        layers / "online/fp8.py": {"_fp8_max", "_fp8_scale", "_fp8_channel_scale", "_fp8_quant_per_channel"},
        layers / "utils/quant_utils.py": {"weight_amax"},
    }
    names: dict[str, Any] = {
        "torch": torch,
        "get_fp8_min_max": lambda: (-448.0, 448.0),
        "current_platform": SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn),
        "_QUANT_CHUNK_ELEMS": 1000,
    }
    for path, functions in wanted.items():
        tree = ast.parse(path.read_text())
        tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in functions]
        assert {node.name for node in tree.body} == functions, f"{path} changed"
        exec(compile(tree, str(path), "exec"), names)
    return SimpleNamespace(**names)


@pytest.mark.host
def test_per_channel_equals_the_host_to_the_bit(host):
    for weight in HARD:
        q, scale = fp8.quantize_weight(weight, CHANNEL, path="w")
        amax = host.weight_amax(weight, dim=-1, keepdim=True)
        assert torch.equal(fp8.weight_amax(weight, CHANNEL), amax)
        host_scale = host._fp8_channel_scale(amax)
        assert torch.equal(scale, host_scale)
        assert torch.equal(q.view(torch.uint8), host._fp8_quant_per_channel(weight, host_scale).view(torch.uint8))


@pytest.mark.host
def test_per_tensor_scale_equals_the_host_to_the_bit(host):
    for weight in HARD:
        _, scale = fp8.quantize_weight(weight, TENSOR, path="w")
        assert torch.equal(scale, host._fp8_scale(host.weight_amax(weight).reshape(1)))
