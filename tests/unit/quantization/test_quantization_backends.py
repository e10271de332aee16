# SPDX-License-Identifier: Apache-2.0
"""The two FP8 backends: the reference against FP64, what CUTLASS is called with, and what each refuses."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from vllm_h3_plugin.errors import BackendError
from vllm_h3_plugin.quantization import cutlass_fp8, fp8
from vllm_h3_plugin.quantization.contract import LayerFacts, Packed
from vllm_h3_plugin.quantization.cutlass_fp8 import CutlassFp8
from vllm_h3_plugin.quantization.precision import Precision
from vllm_h3_plugin.quantization.reference import Reference

CHANNEL, TENSOR = Precision.FP8_CHANNEL, Precision.FP8_TENSOR
BF16 = torch.bfloat16
NAMESPACE = "h3_test_cutlass"


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def layer(**changes) -> LayerFacts:
    facts = {
        "path": "transformer.blocks.0.mlp.fc1",
        "in_features": 64,
        "out_features": 128,
        "bias": False,
        "precision": CHANNEL,
        "device": "cuda",
        "capability": 90,
    }
    return LayerFacts(**{**facts, **changes})


class FakeOperators:
    """The host's operators on the CPU: they hold every demand of ``scaled_mm_entry.cu`` and record their arguments."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []
        self.library = torch.library.Library(NAMESPACE, "DEF")
        for schema, function in (
            (
                "dynamic_per_token_scaled_fp8_quant"
                "(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
                self.quantize,
            ),
            (
                "cutlass_scaled_mm"
                "(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()",
                self.multiply,
            ),
        ):
            self.library.define(schema)
            self.library.impl(schema.partition("(")[0], function, "CPU")
        self.library.define("cutlass_scaled_mm_supports_fp8(int cuda_device_capability) -> bool")
        self.library.impl(
            "cutlass_scaled_mm_supports_fp8", lambda capability: capability >= 89, "CompositeImplicitAutograd"
        )

    def quantize(self, result, input, scale, scale_ub):
        assert input.stride(-1) == 1 and result.stride(-1) == 1 and result.dtype is torch.float8_e4m3fn
        assert input.ndim == 2 and result.shape == input.shape and input.shape[0] > 0
        assert scale.dtype is torch.float32 and scale.numel() == input.shape[0]
        assert scale_ub is None
        q, s = fp8.quantize_activation(input)
        result.copy_(q)
        scale.copy_(s)

    def multiply(self, out, a, b, a_scales, b_scales, bias):
        m, k, n = a.shape[0], a.shape[1], b.shape[1]
        assert a.ndim == b.ndim == out.ndim == 2 and out.shape == (m, n) and b.shape[0] == k and m > 0
        assert a.dtype is b.dtype is torch.float8_e4m3fn
        assert a.stride() == (k, 1) and out.stride() == (n, 1), "row-major"
        assert b.stride() == (1, k), "column-major"
        assert k % 16 == 0 and n % 16 == 0
        assert a_scales.dtype is b_scales.dtype is torch.float32
        assert a_scales.shape == (m, 1) and a_scales.is_contiguous() and b_scales.is_contiguous()
        assert b_scales.shape in ((n, 1), (1,))
        assert bias is None or (bias.shape == (n,) and bias.is_contiguous() and bias.dtype is out.dtype)
        self.calls.append(SimpleNamespace(m=m, k=k, n=n, b_scales=tuple(b_scales.shape), bias=bias is not None))
        y = a.float() @ b.float() * b_scales.reshape(1, -1) * a_scales
        out.copy_(y + bias if bias is not None else y)


@pytest.fixture(scope="module")
def operators() -> Iterator[FakeOperators]:
    fake = FakeOperators()
    yield fake
    fake.library._destroy()


@pytest.fixture
def cutlass(operators) -> CutlassFp8:
    operators.calls.clear()
    return CutlassFp8(ops=getattr(torch.ops, NAMESPACE))


def packed_for(backend, precision=CHANNEL, n=128, k=64, seed=1) -> tuple[Packed, torch.Tensor]:
    weight = gaussian(n, k, seed=seed) * k**-0.5
    return backend.pack(*backend.quantize_weight(weight, precision, path="w")), weight


@pytest.mark.parametrize("precision", [CHANNEL, TENSOR])
@pytest.mark.parametrize("with_bias", [False, True])
def test_reference_equals_an_fp64_oracle_up_to_one_rounding(precision, with_bias):
    backend = Reference()
    packed, _ = packed_for(backend, precision, n=96, k=80)
    x, bias = gaussian(33, 80, seed=2), gaussian(96, seed=3) if with_bias else None
    xq, xs = fp8.quantize_activation(x)
    want = (xq.double() @ packed.weight.double()) * xs.double() * packed.scale.double().reshape(1, -1)
    want = want + bias.double() if bias is not None else want
    got = backend.apply(x, packed, bias)
    assert got.dtype is BF16 and got.shape == (33, 96)
    # One rounding to BF16 errs by at most 2^-8 of the value; FP32 sums of 80 terms by far less.
    assert bool(((got.double() - want).abs() <= want.abs() * 2**-8 + 1e-6).all())


@pytest.mark.parametrize("precision", [CHANNEL, TENSOR])
def test_one_linear_on_gaussian_data_errs_by_less_than_four_percent(precision):
    """Two E4M3 roundings of about 2.65 % each add up to 3.75 %."""
    backend = Reference()
    packed, weight = packed_for(backend, precision, n=256, k=512)
    x = gaussian(128, 512, seed=5)
    error = relative_error(backend.apply(x, packed, None), x.double() @ weight.double().t())
    assert 0.035 < error < 0.04


def test_outlier_rows_cost_the_other_outputs_nothing_per_channel():
    weight = gaussian(256, 512, seed=6, dtype=torch.float32)
    weight[::16] *= 32768
    quiet = torch.ones(256, dtype=torch.bool)
    quiet[::16] = False
    backend, x, errors = Reference(), gaussian(64, 512, seed=7, dtype=torch.float32), {}
    want = x.double() @ weight.double().t()
    for precision in (CHANNEL, TENSOR):
        y = backend.apply(x, backend.pack(*backend.quantize_weight(weight, precision, path="w")), None)
        errors[precision] = relative_error(y[:, quiet], want[:, quiet])
    assert errors[CHANNEL] < 0.04 and errors[TENSOR] > 3 * errors[CHANNEL]


@pytest.mark.parametrize("make", [Reference, None])
@pytest.mark.parametrize("shape", [(5, 64), (1, 64), (0, 64), (2, 3, 64), (2, 0, 64), (64,)])
def test_any_number_of_leading_dimensions_and_tokens(make, shape, cutlass):
    backend = make() if make else cutlass
    packed, _ = packed_for(backend)
    x = gaussian(*shape)
    y = backend.apply(x, packed, None)
    assert y.shape == (*shape[:-1], 128) and y.dtype is BF16
    rows = backend.apply(x.reshape(-1, 64), packed, None)
    assert torch.equal(y.reshape(-1, 128), rows)


@pytest.mark.parametrize("make", [Reference, None])
def test_activations_that_are_not_contiguous_give_the_same_bits(make, cutlass):
    backend = make() if make else cutlass
    packed, _ = packed_for(backend)
    wide = gaussian(12, 128)
    for view in (wide[:, 32:96], wide[::3, :64], gaussian(64, 12).t(), gaussian(4, 64, 3).transpose(1, 2)):
        assert torch.equal(backend.apply(view, packed, None), backend.apply(view.contiguous(), packed, None))


def test_reference_output_does_not_depend_on_its_chunks(monkeypatch):
    backend = Reference()
    packed, _ = packed_for(backend, n=112, k=48)
    x = gaussian(9, 48)
    want = backend.apply(x, packed, None)
    monkeypatch.setattr(fp8, "CHUNK_ELEMENTS", 48 * 16)
    assert torch.allclose(backend.apply(x, packed, None).float(), want.float(), rtol=2**-8, atol=1e-6)


def test_packing_copies_nothing():
    for backend in (Reference(), CutlassFp8()):
        q, scale = backend.quantize_weight(gaussian(32, 16), CHANNEL, path="w")
        packed = backend.pack(q, scale)
        assert packed.weight.shape == (16, 32) and packed.weight.stride() == (1, 16)
        assert packed.weight.data_ptr() == q.data_ptr() and packed.scale.data_ptr() == scale.data_ptr()


@pytest.mark.parametrize("precision", [CHANNEL, TENSOR])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_cutlass_hands_the_kernel_what_it_demands(cutlass, operators, precision, with_bias, dtype):
    packed, _ = packed_for(cutlass, precision)
    x, bias = gaussian(2, 7, 64, dtype=dtype), gaussian(128, dtype=dtype) if with_bias else None
    y = cutlass.apply(x, packed, bias)
    (call,) = operators.calls
    scales = (128, 1) if precision is CHANNEL else (1,)
    assert call == SimpleNamespace(m=14, k=64, n=128, b_scales=scales, bias=with_bias)
    assert torch.equal(y, Reference().apply(x, packed, bias))


def test_a_product_of_more_than_2_to_the_31_elements_is_cut_between_rows(cutlass, operators, monkeypatch):
    packed, _ = packed_for(cutlass)
    x = gaussian(700, 64)
    whole = cutlass.apply(x, packed, None)
    operators.calls.clear()
    monkeypatch.setattr(cutlass_fp8, "_INT32_MAX", 128 * 300)
    assert torch.equal(cutlass.apply(x, packed, None), whole)
    assert [call.m for call in operators.calls] == [256, 256, 188]
    monkeypatch.undo()
    assert cutlass_fp8._most_rows(5376, 28672) * 28672 < 2**31 <= 109184 * 28672


def test_cutlass_calls_no_kernel_for_no_tokens(cutlass, operators):
    packed, _ = packed_for(cutlass)
    assert cutlass.apply(gaussian(0, 64), packed, None).shape == (0, 128) and not operators.calls


def test_cutlass_traces_into_one_graph(cutlass):
    """The host compiles whole blocks with a dynamic number of tokens."""
    packed, _ = packed_for(cutlass)
    bias = gaussian(128)
    compiled = torch.compile(cutlass.apply, backend="eager", fullgraph=True, dynamic=True)
    for tokens in (6, 9):
        x = gaussian(tokens, 64)
        assert torch.equal(compiled(x, packed, bias), cutlass.apply(x, packed, bias))


@pytest.mark.parametrize(
    ("x", "bias", "named"),
    [
        (gaussian(2, 64, dtype=torch.float32), None, "float32 activations"),
        (gaussian(2, 48), None, "width 48"),
        (gaussian(2, 64), gaussian(128, dtype=torch.float32), "bias (128,) of torch.float32"),
        (gaussian(2, 64), gaussian(64), "bias (64,)"),
    ],
)
def test_cutlass_refuses_what_the_kernel_does_not_take(cutlass, operators, x, bias, named):
    packed, _ = packed_for(cutlass)
    with pytest.raises(BackendError) as caught:
        cutlass.apply(x, packed, bias)
    assert named in str(caught.value) and not operators.calls


def test_cutlass_refuses_a_weight_whose_layout_was_lost(cutlass):
    packed, _ = packed_for(cutlass)
    with pytest.raises(BackendError, match="column-major"):
        cutlass.apply(gaussian(2, 64), Packed(packed.weight.contiguous(), packed.scale), None)


def test_cutlass_supports_fp8_layers_on_cuda(cutlass):
    answer = cutlass.supports(layer())
    assert answer and answer.reason == "CUTLASS FP8 GEMM for compute capability 9.0"
    assert cutlass.supports(layer(precision=TENSOR, capability=121)).reason.endswith("12.1")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "is on 'cpu' and CUTLASS needs a CUDA device"),
        ({"in_features": 72}, "in_features 72 and CUTLASS needs multiples of 16"),
        ({"in_features": 72, "out_features": 100}, "in_features 72 and out_features 100"),
        ({"out_features": 24}, "out_features 24"),
        ({"precision": Precision.BF16}, "is bf16, which is not quantized"),
        ({"capability": 80}, "not built for compute capability 8.0"),
        ({"capability": None}, "no CUDA compute capability"),
    ],
)
def test_cutlass_says_why_it_does_not_support_a_layer(cutlass, changes, reason):
    answer = cutlass.supports(layer(**changes))
    assert not answer and reason in answer.reason


def test_cutlass_without_the_hosts_library_says_so():
    empty = SimpleNamespace(cutlass_scaled_mm=None)
    answer = CutlassFp8(ops=empty).supports(layer())
    assert not answer and "dynamic_per_token_scaled_fp8_quant" in answer.reason and "not loaded" in answer.reason
    assert not cutlass_fp8.probe(90, ops=empty)


def test_every_width_of_the_real_model_suits_cutlass(cutlass, real):
    from vllm_h3_plugin.quantization.plan import plan
    from vllm_h3_plugin.quantization.recipe import load_recipe

    for name in ("fp8", "fp8-tensor"):
        given = plan(load_recipe(name), real)
        for spec in real:
            if not given[spec.path].precision.quantized:
                continue
            facts = layer(
                path=spec.path,
                in_features=spec.in_features,
                out_features=spec.out_features,
                precision=given[spec.path].precision,
            )
            assert cutlass.supports(facts), facts


def test_reference_supports_fp8_of_any_width_anywhere():
    assert Reference().supports(layer(device="cpu", in_features=7, out_features=3, capability=None))
    assert not Reference().supports(layer(precision=Precision.BF16))


def test_backends_survive_pickling_between_processes():
    assert type(pickle.loads(pickle.dumps(CutlassFp8()))) is CutlassFp8
    assert type(pickle.loads(pickle.dumps(Reference()))) is Reference
