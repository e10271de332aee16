# SPDX-License-Identifier: Apache-2.0
"""INT8: the arithmetic, the reference against FP64, and what the Ascend backend hands the operators and refuses."""

from __future__ import annotations

import pickle
import sys

import pytest
import torch

from tests.unit.quantization.npu_emulation import Call, EmulatedNpu
from vllm_h3_plugin.errors import BackendError, RecipeError
from vllm_h3_plugin.quantization import int8, npu_int8
from vllm_h3_plugin.quantization.activation import QuantizedActivation
from vllm_h3_plugin.quantization.contract import LayerFacts, Packed
from vllm_h3_plugin.quantization.cutlass_fp8 import CutlassFp8
from vllm_h3_plugin.quantization.npu_int8 import NpuInt8
from vllm_h3_plugin.quantization.plan import plan
from vllm_h3_plugin.quantization.precision import Precision
from vllm_h3_plugin.quantization.recipe import load_recipe
from vllm_h3_plugin.quantization.reference import Reference

INT8, BF16 = Precision.INT8, torch.bfloat16


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.fixture
def npu() -> EmulatedNpu:
    return EmulatedNpu()


@pytest.fixture
def backend(npu: EmulatedNpu) -> NpuInt8:
    return NpuInt8(ops=npu)


def packed_for(backend, n: int = 96, k: int = 80, seed: int = 1) -> tuple[Packed, torch.Tensor]:
    weight = gaussian(n, k, seed=seed) * k**-0.5
    return backend.pack(*backend.quantize_weight(weight, INT8, path="w")), weight


def layer(**changes) -> LayerFacts:
    facts = {
        "path": "transformer.blocks.0.mlp.fc1",
        "in_features": 5376,
        "out_features": 28672,
        "bias": False,
        "precision": INT8,
        "device": "npu",
    }
    return LayerFacts(**{**facts, **changes})


# The arithmetic.


def test_weights_are_symmetric_with_the_largest_of_a_row_at_127_and_halves_rounded_to_even():
    weight = torch.tensor([[127.0, -127.0, 0.5, 1.5, 2.5, -0.5], [254.0, 1.0, 3.0, 5.0, -1.0, 0.0]])
    q, scale = int8.quantize_weight(weight, INT8, path="w")
    assert q.tolist() == [[127, -127, 0, 2, 2, 0], [127, 0, 2, 2, 0, 0]]
    assert scale.tolist() == [[1.0], [2.0]] and q.dtype is torch.int8 and scale.dtype is torch.float32


def test_rows_of_zeros_and_of_subnormals_stay_finite():
    weight = torch.zeros(2, 8)
    weight[1] = 1e-42
    q, scale = int8.quantize_weight(weight, INT8, path="w")
    assert not q.any() and bool((scale > 0).all()) and bool(torch.isfinite(1 / scale).all())
    x = torch.zeros(3, 8, dtype=BF16)
    assert not Reference("int8").apply(x, Packed(q.t(), scale), None).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_layer_and_row(bad):
    weight = gaussian(8, 16)
    weight[5, 3] = bad
    with pytest.raises(RecipeError, match=r"blocks\.0: 1 of 8 weight rows hold NaN or infinity \(rows 5\)"):
        int8.quantize_weight(weight, INT8, path="blocks.0")


def test_a_token_that_is_not_finite_gives_a_result_that_is_not_and_leaves_others_alone():
    backend = Reference("int8")
    packed, _ = packed_for(backend)
    x = gaussian(3, 80)
    want = backend.apply(x, packed, None)
    x[1, 4] = float("inf")
    got = backend.apply(x, packed, None)
    assert not torch.isfinite(got[1].float()).any() and torch.equal(got[[0, 2]], want[[0, 2]])


def test_minus_128_is_never_a_value():
    q, _ = int8.quantize_weight(-gaussian(64, 64).abs(), INT8, path="w")
    assert int(q.min()) == -127


def test_another_precision_is_refused():
    with pytest.raises(BackendError, match="fp8_channel is not INT8"):
        int8.quantize_weight(gaussian(2, 4), Precision.FP8_CHANNEL, path="w")


def test_chunks_change_no_bit(monkeypatch):
    weight = gaussian(37, 48)
    want = int8.quantize_weight(weight, INT8, path="w")
    monkeypatch.setattr(int8, "CHUNK_ELEMENTS", 48 * 5)
    got = int8.quantize_weight(weight, INT8, path="w")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# The reference.


@pytest.mark.parametrize("k", [80, 1024, 2500])
@pytest.mark.parametrize("with_bias", [False, True])
def test_reference_sums_exactly_and_rounds_once(k, with_bias):
    backend = Reference("int8")
    q = torch.full((16, k), 127, dtype=torch.int8)
    q[1::2] = torch.randint(-127, 128, (8, k), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    packed = backend.pack(q, torch.rand(16, 1, generator=torch.Generator().manual_seed(1)))
    x, bias = gaussian(5, k, seed=2), gaussian(16, seed=3) if with_bias else None
    xq, xs = int8.quantize_activation(x)
    sums = (xq.to(torch.int64) @ q.t().to(torch.int64)).to(torch.float32)
    want = sums * packed.scale.reshape(1, -1) * xs
    want = want if bias is None else want + bias
    assert torch.equal(backend.apply(x, packed, bias), want.to(BF16))


@pytest.mark.parametrize(("k", "most"), [(1024, 0.013), (5376, 0.013), (14336, 0.014)])
def test_one_linear_on_gaussian_data_errs_by_little_more_than_one_percent(backend, record_property, k, most):
    """The wider a row, the larger its largest of K normal numbers, and with it the step: 1.10 % at 1024 columns, 1.28 %
    at the DiT's width, 1.35 % at its FFN's."""
    x = gaussian(64, k, seed=5)
    for computing in (Reference("int8"), backend):
        packed, weight = packed_for(computing, n=128, k=k)
        error = relative_error(computing.apply(x, packed, None), x.double() @ weight.double().t())
        record_property(f"int8_relative_error_{computing.name}_{k}", error)
        assert 0.008 < error < most


def test_reference_refuses_a_layer_of_the_other_method():
    assert not Reference("int8").supports(layer(precision=Precision.FP8_CHANNEL))
    assert not Reference().supports(layer()) and Reference("int8").supports(layer(device="cpu"))
    assert not CutlassFp8().supports(layer(device="cuda", capability=90))
    assert pickle.loads(pickle.dumps(Reference("int8"))).method == "int8"


# The Ascend backend against the reference, on the emulated operators.


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_ascend_agrees_with_the_reference(backend, npu, with_bias, dtype):
    packed, _ = packed_for(backend)
    reference, _ = packed_for(Reference("int8"))
    x = gaussian(2, 7, 80, dtype=dtype)
    bias = gaussian(96, dtype=dtype) if with_bias else None
    got, want = backend.apply(x, packed, bias), Reference("int8").apply(x, reference, bias)
    assert got.shape == (2, 7, 96) and got.dtype is dtype
    # The operator multiplies by 127 / amax where the reference divides: a value may differ by one step.
    assert relative_error(got, want) < 1e-3
    assert npu.calls == [Call(14, 80, 96, dtype if with_bias else None, dtype, nz=True)]


def test_a_bias_in_fp32_is_taken_and_one_in_int32_is_refused(backend, npu):
    packed, _ = packed_for(backend)
    backend.apply(gaussian(2, 80), packed, gaussian(96, dtype=torch.float32))
    assert npu.calls[0].bias is torch.float32
    with pytest.raises(BackendError, match=r"bias \(96,\) of torch.int32"):
        backend.apply(gaussian(2, 80), packed, torch.zeros(96, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(5, 80), (1, 80), (0, 80), (2, 3, 80), (2, 0, 80), (80,)])
def test_any_number_of_leading_dimensions_and_tokens(backend, npu, shape):
    packed, _ = packed_for(backend)
    y = backend.apply(gaussian(*shape), packed, None)
    assert y.shape == (*shape[:-1], 96) and y.dtype is BF16
    assert len(npu.calls) == (0 if 0 in shape else 1)


def test_activations_that_are_not_contiguous_give_the_same_bits(backend):
    packed, _ = packed_for(backend)
    wide = gaussian(12, 160)
    for view in (wide[:, 40:120], wide[::3, :80], gaussian(80, 12).t(), gaussian(4, 80, 3).transpose(1, 2)):
        assert torch.equal(backend.apply(view, packed, None), backend.apply(view.contiguous(), packed, None))


def test_activations_that_a_fused_step_quantized_give_the_same_bits(backend):
    packed, _ = packed_for(backend)
    x = gaussian(9, 80)
    quantized = QuantizedActivation(*backend.quantize_tokens(x))
    assert quantized.scale.shape == (9, 1)
    assert torch.equal(backend.matmul(quantized, packed, None), backend.apply(x, packed, None))


def test_packed_weights_are_not_transposed_and_in_the_cards_format(backend, npu):
    q, scale = backend.quantize_weight(gaussian(96, 80), INT8, path="w")
    packed = backend.pack(q, scale)
    assert packed.weight.shape == (80, 96) and packed.weight.is_contiguous() and torch.equal(packed.weight.t(), q)
    assert packed.scale.shape == (96,) and packed.weight.data_ptr() in npu.nz
    assert backend.weight_format == "FRACTAL_NZ"


def test_a_refused_cast_keeps_plain_weights_and_says_so_once(caplog):
    npu = EmulatedNpu(refuse_cast="format 29 is not supported\nstack")
    backend = NpuInt8(ops=npu)
    want, _ = packed_for(NpuInt8(ops=EmulatedNpu()))
    for _ in range(2):
        packed, _ = packed_for(backend)
        assert torch.equal(packed.weight, want.weight) and packed.weight.is_contiguous()
    assert backend.weight_format == "ND, the cast was refused: format 29 is not supported"
    assert len(caplog.records) == 1 and "refused" in caplog.text
    backend.apply(gaussian(2, 80), packed, None)
    assert not npu.calls[0].nz


@pytest.mark.parametrize(
    ("out_features", "parts"), [(1, 1), (65535, 1), (96768, 2), (193536, 3), (65537, None), (131072, 4)]
)
def test_wide_layers_divide_into_the_fewest_equal_parts(out_features, parts):
    assert npu_int8.parts_of(out_features) == parts


def test_adaln_s_width_is_cut_in_two_and_equal_to_the_bit(backend, npu):
    """96768 columns are two calls of 48384; each column is what it would be in one."""
    k, n = 8, 96768
    q = torch.randint(-127, 128, (n, k), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    scale = torch.rand(n, 1, generator=torch.Generator().manual_seed(1))
    x, bias = gaussian(3, k), gaussian(n)
    y = backend.apply(x, backend.pack(q, scale), bias)
    assert [(call.m, call.k, call.n) for call in npu.calls] == [(3, 8, 48384)] * 2
    columns = torch.tensor([0, 1, 48383, 48384, 48385, n - 1])
    few = backend.apply(x, backend.pack(q[columns], scale[columns]), bias[columns])
    assert torch.equal(y[:, columns], few)
    values, x_scale = npu.npu_dynamic_quant(x)
    whole = (values.double() @ q.double().t()).float() * scale.t() * x_scale[:, None] + bias
    assert torch.equal(y, whole.to(BF16))


def test_a_product_of_more_than_2_to_the_31_results_is_cut_between_rows(backend, npu, monkeypatch):
    packed, _ = packed_for(backend)
    x = gaussian(700, 80)
    whole = backend.apply(x, packed, None)
    npu.calls.clear()
    monkeypatch.setattr(npu_int8, "_INT32_MAX", 96 * 300)
    assert torch.equal(backend.apply(x, packed, None), whole)
    assert [call.m for call in npu.calls] == [256, 256, 188]


# What the meta functions let pass and the card does not.


@pytest.mark.parametrize(
    ("x", "named"),
    [
        (gaussian(2, 80, dtype=torch.float32), "torch.float32 activations"),
        (gaussian(2, 64), "activations of width 64; the weight takes 80"),
    ],
)
def test_activations_that_the_operator_does_not_take_are_refused(backend, npu, x, named):
    packed, _ = packed_for(backend)
    with pytest.raises(BackendError) as caught:
        backend.apply(x, packed, None)
    assert named in str(caught.value) and caught.value.fix and not npu.calls


def test_tokens_of_one_dimension_are_refused(backend):
    with pytest.raises(BackendError, match="rows of two dimensions"):
        backend.quantize_tokens(gaussian(80))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p, x: (p, QuantizedActivation(x.values, x.scale[:2])), r"per-token scales \(2,\)"),
        (lambda p, x: (p, QuantizedActivation(x.values, x.scale.half())), "of torch.float16"),
        (lambda p, x: (p, QuantizedActivation(x.values.float(), x.scale)), "operands of torch.float32"),
        (lambda p, x: (Packed(p.weight.to(torch.int32), p.scale), x), "operands of torch.int8 and torch.int32"),
        (lambda p, x: (Packed(p.weight, p.scale.half()), x), r"per-channel scales \(96,\) of torch.float16"),
        (lambda p, x: (Packed(p.weight, p.scale[:1]), x), r"per-channel scales \(1,\)"),
        (lambda p, x: (Packed(p.weight.t().contiguous().t(), p.scale), x), "layout is not what pack"),
    ],
)
def test_what_only_the_card_would_refuse_is_refused_before_it(backend, npu, change, named):
    packed, _ = packed_for(backend)
    packed, x = change(packed, QuantizedActivation(*backend.quantize_tokens(gaussian(3, 80))))
    with pytest.raises(BackendError, match=named):
        backend.matmul(x, packed, None)
    assert not npu.calls


def test_operands_wider_than_65535_are_refused(backend, npu):
    n = 65536
    packed = Packed(torch.zeros(4, n, dtype=torch.int8), torch.ones(n))
    with pytest.raises(BackendError, match="65536 wide; at most 65535"):
        backend.apply(gaussian(1, 4), packed, None)
    assert not npu.calls


def test_a_weight_without_equal_parts_is_refused(backend):
    with pytest.raises(BackendError, match="65537 columns"):
        backend.pack(torch.zeros(65537, 1, dtype=torch.int8), torch.ones(65537, 1))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cuda"}, "is on 'cuda' and npu_int8 needs an Ascend card"),
        ({"precision": Precision.FP8_CHANNEL}, "is fp8_channel and npu_int8 computes int8"),
        ({"in_features": 70000}, "in_features 70000 and npu_quant_matmul takes at most 65535"),
        ({"out_features": 65537}, "out_features 65537, above 65535 and without equal parts"),
    ],
)
def test_ascend_says_why_it_does_not_support_a_layer(backend, changes, reason):
    answer = backend.supports(layer(**changes))
    assert not answer and reason in answer.reason


def test_ascend_supports_every_quantized_layer_of_the_real_model(backend, real):
    for name in ("int8", "int8-text"):
        given = plan(load_recipe(name), real)
        for spec in real:
            facts = layer(
                path=spec.path,
                in_features=spec.in_features,
                out_features=spec.out_features,
                precision=given[spec.path].precision,
            )
            assert bool(backend.supports(facts)) == given[spec.path].precision.quantized, facts


def test_without_torch_npu_the_backend_says_so_and_nothing_imports_it():
    answer = NpuInt8().supports(layer())
    assert not answer and "torch_npu cannot be imported" in answer.reason
    assert "torch_npu" not in sys.modules
    assert "lacks npu_dynamic_quant" in npu_int8.probe(object()).reason


def test_backend_survives_pickling_between_processes():
    assert type(pickle.loads(pickle.dumps(NpuInt8()))) is NpuInt8
