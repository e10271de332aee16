# SPDX-License-Identifier: Apache-2.0
"""Every call that ``npu_int8`` makes for the real model, held against torch_npu's own schemas and meta functions.

What the oracle lets pass is in test_quantization_int8.py (refused by the backend itself) and, so that this list stays
true, tried here once more on the oracle.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from tests.unit.quantization.npu_oracle import Oracle, meta_functions
from vllm_h3_plugin.checkpoint.layout import DitConfig, LinearSpec, TextEncoderConfig, linear_layers
from vllm_h3_plugin.errors import BackendError
from vllm_h3_plugin.memory.weights import sharded
from vllm_h3_plugin.quantization.npu_int8 import NpuInt8
from vllm_h3_plugin.quantization.npu_operators import FRACTAL_NZ, OPERATORS, check_operators
from vllm_h3_plugin.quantization.plan import plan
from vllm_h3_plugin.quantization.precision import Precision
from vllm_h3_plugin.quantization.recipe import load_recipe

pytestmark = pytest.mark.oracle

BF16 = torch.bfloat16
REAL = linear_layers(DitConfig(), TextEncoderConfig())
TOKENS = 6016


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    made = Oracle(OPERATORS)
    yield made
    made.close()


@pytest.fixture
def backend(oracle: Oracle) -> NpuInt8:
    oracle.calls = dict.fromkeys(oracle.calls, 0)
    return NpuInt8(ops=oracle)


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def quantized(recipe: str) -> list[LinearSpec]:
    given = plan(load_recipe(recipe), REAL)
    return [spec for spec in REAL if given[spec.path].precision.quantized]


def test_the_table_is_the_wheels(oracle: Oracle) -> None:
    assert oracle.schemas == OPERATORS


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_quantized_layer_of_the_real_model_is_called_as_declared(backend, oracle, tp: int) -> None:
    layers = quantized("int8-text")
    assert len(layers) == 4 * (50 + 2 + 50)
    for spec in {(s.in_features, s.out_features, s.bias): s for s in (sharded(spec, tp) for spec in layers)}.values():
        k, n = spec.in_features, spec.out_features
        packed = backend.pack(meta(n, k, dtype=torch.int8), meta(n, 1, dtype=torch.float32))
        bias = meta(n) if spec.bias else None
        for shape in ((TOKENS, k), (1, 77, k)):
            y = backend.apply(meta(*shape), packed, bias)
            assert y.shape == (*shape[:-1], n) and y.dtype is BF16, spec.path
    assert oracle.calls["npu_quant_matmul"] == oracle.calls["npu_dynamic_quant"] == 2 * oracle.calls["npu_format_cast"]
    assert oracle.calls["npu_format_cast"] >= 6


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("bias", [None, "same", torch.float32])
def test_biases_are_of_a_dtype_that_is_declared(backend, bias, dtype) -> None:
    """condition_proj has one; no packaged recipe quantizes it, a recipe of one's own may."""
    packed = backend.pack(meta(5376, 5120, dtype=torch.int8), meta(5376, 1, dtype=torch.float32))
    given = None if bias is None else meta(5376, dtype=dtype if bias == "same" else bias)
    assert backend.apply(meta(9, 5120, dtype=dtype), packed, given).dtype is dtype


def test_adaln_s_width_is_two_declared_calls(backend, oracle) -> None:
    packed = backend.pack(meta(96768, 2688, dtype=torch.int8), meta(96768, 1, dtype=torch.float32))
    assert backend.apply(meta(4, 2688), packed, meta(96768)).shape == (4, 96768)
    assert oracle.calls["npu_quant_matmul"] == 2 and oracle.calls["npu_format_cast"] == 0


def test_a_call_that_the_schema_does_not_have_is_noticed(oracle) -> None:
    x, w, scale = meta(2, 8, dtype=torch.int8), meta(8, 4, dtype=torch.int8), meta(4, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"[Uu]nknown keyword"):
        oracle.npu_quant_matmul(x, w, scale, per_token_scale=scale)
    token = meta(2, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="bias_first_dim"):
        oracle.npu_quant_matmul(x, w, scale, bias=meta(3), pertoken_scale=token, output_dtype=BF16)
    with pytest.raises(RuntimeError, match="bias"):
        oracle.npu_quant_matmul(x, w, scale, bias=meta(4).half(), pertoken_scale=token, output_dtype=BF16)


def test_what_the_oracle_lets_pass_is_refused_by_the_backend(oracle) -> None:
    """If one of these starts to raise, the backend's own check of it has become a second one."""
    x, w, scale = meta(2, 8, dtype=torch.int8), meta(8, 4, dtype=torch.int8), meta(4, dtype=torch.float32)
    token = meta(2, dtype=torch.float32)
    oracle.npu_quant_matmul(x, w, scale, pertoken_scale=meta(7, dtype=torch.float32), output_dtype=BF16)
    oracle.npu_quant_matmul(meta(2, 8), w, scale, pertoken_scale=token, output_dtype=BF16)
    oracle.npu_quant_matmul(x, w, scale, pertoken_scale=token.half(), output_dtype=BF16)
    wide = meta(8, 65536, dtype=torch.int8)
    oracle.npu_quant_matmul(x, wide, meta(65536, dtype=torch.float32), pertoken_scale=token, output_dtype=BF16)
    assert oracle.npu_quant_matmul(x, w, scale, pertoken_scale=token).dtype is torch.int8, "no output dtype"
    assert oracle.npu_dynamic_quant(meta(2, 8, dtype=torch.float32))[0].dtype is torch.int8


def test_the_doctor_holds_loaded_operators_against_the_table() -> None:
    parse = torch._C.parse_schema
    live = {name: parse(f"npu::{text}") for name, text in OPERATORS.items()}
    assert check_operators(live.get) == f"{', '.join(OPERATORS)} are declared as in torch_npu 2.10.0.post4"
    longer = OPERATORS["npu_format_cast"].replace(") ->", ", int? more=None) ->")
    assert "with further options: npu_format_cast" in check_operators(
        {**live, "npu_format_cast": parse(f"npu::{longer}")}.get
    )
    shorter = OPERATORS["npu_quant_matmul"].replace("Tensor? pertoken_scale=None, ", "")
    with pytest.raises(BackendError) as caught:
        check_operators({"npu_quant_matmul": parse(f"npu::{shorter}"), "npu_format_cast": live["npu_format_cast"]}.get)
    assert "npu_dynamic_quant is missing" in caught.value.why and "npu_quant_matmul is npu::" in caught.value.why
    assert "2.10.0.post4" in caught.value.fix


def test_reading_the_wheel_leaves_nothing_behind(oracle) -> None:
    assert "npu_quant_matmul" in meta_functions()
    assert not [name for name in sys.modules if name.startswith("torch_npu")]
    assert FRACTAL_NZ == 29 and Precision.INT8.method == "int8"
