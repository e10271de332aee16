# SPDX-License-Identifier: Apache-2.0
"""Kernels that can compute a linear layer's product, each on operands that are given to it in its own form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_h3_plugin.errors import BackendError
from vllm_h3_plugin.quantization import fp8
from vllm_h3_plugin.quantization.activation import QuantizedActivation
from vllm_h3_plugin.quantization.contract import LayerFacts
from vllm_h3_plugin.quantization.cutlass_fp8 import CutlassFp8, system_facts
from vllm_h3_plugin.quantization.precision import Precision
from vllm_h3_plugin.quantization.reference import Reference

CUTLASS_CHANNEL = "cutlass_fp8, per channel"
CUTLASS_TENSOR = "cutlass_fp8, per tensor"
SCALED_MM = "torch._scaled_mm, per row"
SCALED_MM_TENSOR = "torch._scaled_mm, per tensor"
BF16 = "torch.mm, BF16"
REFERENCE = "reference"

SAMPLE_ROWS = 256
"""Rows of a result that are compared."""


@dataclass(frozen=True, order=True)
class Shape:
    """``[m, k] x [n, k]^T``: which layer it is of, and how many tokens it is given."""

    layer: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k

    def nbytes(self, element: int) -> int:
        """Bytes of both operands and of the BF16 result, each moved once."""
        return (self.m + self.n) * self.k * element + 2 * self.m * self.n


class Operands:
    """Random operands of one shape: activations ``N(0, 1)``, weights ``N(0, 1/k)``, and both in FP8."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(0)
        draw = {"device": device, "dtype": torch.bfloat16, "generator": generator}
        self.shape, self.device = shape, device
        self.x = torch.randn(shape.m, shape.k, **draw)  # type: ignore[call-overload]
        self.weight = torch.randn(shape.n, shape.k, **draw) * shape.k**-0.5  # type: ignore[call-overload]
        self.quantized = QuantizedActivation(*fp8.quantize_activation(self.x))
        self.sample = torch.linspace(0, shape.m - 1, min(shape.m, SAMPLE_ROWS), device=device).long()

    def copies(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """The weight and as many clones as it takes to be larger than the device's cache twice over."""
        if self.device.type != "cuda":
            return [weight]
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return [weight, *(weight.clone() for _ in range(2 * cache // weight.nbytes))]


@dataclass(frozen=True)
class Prepared:
    """One kernel on its operands: the calls to take in turn, and what the sampled rows should be."""

    works: list[Callable[[], torch.Tensor]]
    expected: Callable[[], torch.Tensor]


Kernel = Callable[[Operands], Prepared]


def _expected(operands: Operands, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    reference, rows = Reference(), operands.sample
    x = QuantizedActivation(operands.quantized.values[rows], operands.quantized.scale[rows])
    return reference.matmul(x, reference.pack(q, scale), None)


def _cutlass(precision: Precision) -> Kernel:
    def prepare(operands: Operands) -> Prepared:
        shape, backend = operands.shape, CutlassFp8()
        facts = system_facts(operands.device)
        support = backend.supports(
            LayerFacts(shape.layer, shape.k, shape.n, False, precision, facts.device, facts.capability)
        )
        if not support:
            raise BackendError(support.reason)
        q, scale = backend.quantize_weight(operands.weight, precision, path=shape.layer)

        def call(weight: torch.Tensor) -> Callable[[], torch.Tensor]:
            packed = backend.pack(weight, scale)
            return lambda: backend.matmul(operands.quantized, packed, None)

        return Prepared([call(copy) for copy in operands.copies(q)], lambda: _expected(operands, q, scale))

    return prepare


def _require_cuda(operands: Operands) -> None:
    if operands.device.type != "cuda":
        raise BackendError("torch._scaled_mm", why=f"it needs a CUDA device and this one is {operands.device.type!r}")


def _scaled_mm(operands: Operands) -> Prepared:
    _require_cuda(operands)
    q, scale = fp8.quantize_weight(operands.weight, Precision.FP8_CHANNEL, path=operands.shape.layer)
    columns = scale.view(1, -1)
    return Prepared(
        [_scaled_call(operands, copy, operands.quantized.scale, columns) for copy in operands.copies(q)],
        lambda: _expected(operands, q, scale),
    )


def _scaled_mm_tensor(operands: Operands) -> Prepared:
    """One scale an operand: cuBLAS at its best. For the roofline; H3's activations have a scale a token."""
    _require_cuda(operands)
    q, scale = fp8.quantize_weight(operands.weight, Precision.FP8_TENSOR, path=operands.shape.layer)
    one = torch.ones(1, dtype=torch.float32, device=operands.device)
    return Prepared([_scaled_call(operands, copy, one, scale) for copy in operands.copies(q)], lambda: operands.x)


def _scaled_call(operands: Operands, q: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    def work() -> torch.Tensor:
        # Fast accumulation, as CUTLASS's kernels have it on Hopper.
        product: torch.Tensor = torch._scaled_mm(
            operands.quantized.values, q.t(), scale_a=a, scale_b=b, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return product

    return work


def _bf16(operands: Operands) -> Prepared:
    shape, x = operands.shape, operands.x
    out = torch.empty(shape.m, shape.n, dtype=torch.bfloat16, device=operands.device)

    def call(weight: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: torch.mm(x, weight.t(), out=out)

    return Prepared(
        [call(copy) for copy in operands.copies(operands.weight)],
        lambda: x[operands.sample].float() @ operands.weight.float().t(),
    )


def _reference(operands: Operands) -> Prepared:
    reference = Reference()
    q, scale = reference.quantize_weight(operands.weight, Precision.FP8_CHANNEL, path=operands.shape.layer)
    packed = reference.pack(q, scale)
    return Prepared([lambda: reference.matmul(operands.quantized, packed, None)], lambda: _expected(operands, q, scale))


def kernels(device: torch.device) -> dict[str, Kernel]:
    """By name; those that cannot run here say so when they are prepared."""
    known: dict[str, Kernel] = {
        CUTLASS_CHANNEL: _cutlass(Precision.FP8_CHANNEL),
        CUTLASS_TENSOR: _cutlass(Precision.FP8_TENSOR),
        SCALED_MM: _scaled_mm,
        BF16: _bf16,
    }
    return known if device.type == "cuda" else known | {REFERENCE: _reference}


def roofline_kernels(device: torch.device) -> dict[str, Kernel]:
    """Those whose best large square product is taken for what the device can do."""
    return kernels(device) | {SCALED_MM_TENSOR: _scaled_mm_tensor}


def dtype_of(kernel: str) -> str:
    """``fp8`` or ``bf16``: what a kernel multiplies."""
    return "bf16" if kernel == BF16 else "fp8"
