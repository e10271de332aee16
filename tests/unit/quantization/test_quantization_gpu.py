# SPDX-License-Identifier: Apache-2.0
"""On a CUDA device: the host's compiled operators compute what the shared arithmetic and the reference say."""

from __future__ import annotations

import pytest
import torch

from vllm_h3_plugin.quantization import fp8
from vllm_h3_plugin.quantization.contract import choose_backend
from vllm_h3_plugin.quantization.cutlass_fp8 import CutlassFp8, system_facts
from vllm_h3_plugin.quantization.precision import Precision
from vllm_h3_plugin.quantization.reference import Reference

pytestmark = [pytest.mark.host, pytest.mark.gpu]

CHANNEL, TENSOR = Precision.FP8_CHANNEL, Precision.FP8_TENSOR


@pytest.fixture(scope="module", autouse=True)
def operators():
    """The host's compiled library; importing it registers ``torch.ops._C``."""
    import vllm._C_stable_libtorch  # noqa: F401

    return torch.ops._C


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_cutlass_is_chosen_on_this_device():
    backend, reason = choose_backend(None, system_facts(torch.device("cuda")))
    assert backend.name == "cutlass_fp8", reason


@pytest.mark.parametrize("factor", [1.0, 1e-4, 3e4, 1e-7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activation_operator_equals_the_shared_arithmetic_to_the_bit(operators, factor, dtype):
    x = (gaussian(257, 5376) * min(factor, 1e4 if dtype is torch.float16 else factor)).to(dtype)
    x[5] = 0
    q, scale = torch.empty_like(x, dtype=fp8.E4M3), torch.empty(257, 1, device="cuda")
    operators.dynamic_per_token_scaled_fp8_quant(q, x, scale, None)
    want_q, want_scale = fp8.quantize_activation(x)
    assert torch.equal(scale, want_scale) and same_bits(q, want_q)


def test_per_tensor_weight_equals_the_hosts_static_operator_to_the_bit(operators):
    weight = gaussian(512, 1024, seed=1)
    q, scale = fp8.quantize_weight(weight, TENSOR, path="w")
    host_q = torch.empty_like(weight, dtype=fp8.E4M3)
    operators.static_scaled_fp8_quant(host_q, weight, scale, None)
    assert same_bits(q, host_q)


@pytest.mark.parametrize("precision", [CHANNEL, TENSOR])
def test_weights_quantize_to_the_same_bits_on_cpu_and_gpu(precision):
    weight = gaussian(512, 1024, seed=2)
    q, scale = fp8.quantize_weight(weight, precision, path="w")
    cpu_q, cpu_scale = fp8.quantize_weight(weight.cpu(), precision, path="w")
    assert same_bits(q.cpu(), cpu_q) and torch.equal(scale.cpu(), cpu_scale)


@pytest.mark.parametrize("precision", [CHANNEL, TENSOR])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 5376, 5376), (257, 5376, 21504), (64, 14336, 5376), (6016, 7168, 5376)])
def test_cutlass_agrees_with_the_reference(precision, with_bias, m, k, n):
    """Same FP8 operands; the sums differ in order and, on Hopper, in the width of the accumulator."""
    backend = CutlassFp8()
    weight, x = gaussian(n, k, seed=3) * k**-0.5, gaussian(m, k, seed=4)
    bias = gaussian(n, seed=5) if with_bias else None
    packed = backend.pack(*backend.quantize_weight(weight, precision, path="w"))
    got, want = backend.apply(x, packed, bias).double(), Reference().apply(x, packed, bias).double()
    assert float((got - want).norm() / want.norm()) < 0.005
    exact = x.double() @ weight.double().t() + (bias.double() if bias is not None else 0)
    assert float((got - exact).norm() / exact.norm()) < 0.04


def test_cutlass_takes_no_tokens_and_one():
    backend = CutlassFp8()
    packed = backend.pack(*backend.quantize_weight(gaussian(64, 32), CHANNEL, path="w"))
    assert backend.apply(gaussian(0, 32), packed, None).shape == (0, 64)
    assert backend.apply(gaussian(2, 1, 32), packed, None).shape == (2, 1, 64)
