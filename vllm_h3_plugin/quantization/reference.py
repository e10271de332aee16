# SPDX-License-Identifier: Apache-2.0
"""The oracle backend: quantized linear layers in plain torch, on any device.

    y = (xq @ wq.T) * w_scale.T * x_scale + bias      all in FP32, rounded to x.dtype once

FP8: every product of two E4M3 values is exact in FP32, so that only the sum over K rounds. The fast backends sum in
another order, and Hopper's FP8 tensor cores with fewer bits; they agree within a tolerance, not to the bit.

INT8: the sum over K is exact too, as it is on the hardware, which sums in INT32. 1024 products of two magnitudes of at
most 127 stay below 2^24, so that a GEMM in FP32 over 1024 columns rounds nothing, in whatever order it sums; these
partial sums are added as integers.

Trade-off: the weight stays resident in one byte an element and is widened to FP32 in each call, at most 64 MB at a
time. A CPU spends most of a small layer's time in that conversion; a resident FP32 copy would be faster and four times
the size, and the point of this backend is to be what the fast ones are, with the same bytes.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from vllm_h3_plugin.quantization import fp8, int8
from vllm_h3_plugin.quantization.activation import QuantizedActivation
from vllm_h3_plugin.quantization.contract import LayerFacts, Packed, QuantBackend, Support
from vllm_h3_plugin.quantization.precision import Method, Precision

EXACT_COLUMNS = 1024
"""``1024 * 127**2 < 2**24``: the most INT8 products whose sum FP32 holds exactly."""


class Reference(QuantBackend):
    """See the module's docstring.

    Args:
        method: what its layers are quantized by; a recipe has one.
    """

    name: ClassVar[str] = "reference"

    def __init__(self, method: Method = "fp8") -> None:
        self.method = method

    def supports(self, layer: LayerFacts) -> Support:
        """Every layer of its method, of any width."""
        if not layer.precision.quantized:
            return Support(False, f"{layer.path} is {layer.precision.value}, which is not quantized")
        if layer.precision.method != self.method:
            return Support(False, f"{layer.path} is {layer.precision.value} in a recipe of method {self.method}")
        return Support(True, "plain torch")

    def quantize_weight(
        self, weight: torch.Tensor, precision: Precision, *, path: str, amax: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`vllm_h3_plugin.quantization.fp8.quantize_weight` and its namesake for INT8."""
        arithmetic = int8 if self.method == "int8" else fp8
        return arithmetic.quantize_weight(weight, precision, path=path, amax=amax)

    def pack(self, q: torch.Tensor, scale: torch.Tensor) -> Packed:
        """``[N, K]`` -> ``[K, N]`` view, as the CUTLASS backend keeps it: either can apply what the other packed."""
        return Packed(q.t(), scale.contiguous())

    def quantize_tokens(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`vllm_h3_plugin.quantization.fp8.quantize_activation` and its namesake for INT8."""
        return int8.quantize_activation(x) if self.method == "int8" else fp8.quantize_activation(x)

    def matmul(self, x: QuantizedActivation, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
        """``[M, K]`` -> ``[M, N]`` BF16."""
        return _multiply(x.values, x.scale, packed, bias).to(x.dtype)

    def apply(self, x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
        """``[..., K]`` -> ``[..., N]`` in ``x.dtype``."""
        values, scale = self.quantize_tokens(x.reshape(-1, x.shape[-1]))
        y = _multiply(values, scale, packed, bias)
        return y.to(x.dtype).reshape(*x.shape[:-1], y.shape[-1])


def _multiply(values: torch.Tensor, scale: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    wq = packed.weight.t()
    n, k = wq.shape
    y = torch.empty((values.shape[0], n), dtype=torch.float32, device=values.device)
    product = _int8_product if values.dtype is torch.int8 else _fp8_product
    rows = max(1, fp8.CHUNK_ELEMENTS // k)
    wide = values.to(torch.float32)
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        y[:, part] = product(wide, wq[part].to(torch.float32))
    y *= packed.scale.reshape(1, -1)
    y *= scale
    if bias is not None:
        y += bias
    return y


def _fp8_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.t()


def _int8_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``[M, K] @ [N, K].T`` of FP32 tensors that hold integers; the exact sums, rounded to FP32 once."""
    pairs = zip(x.split(EXACT_COLUMNS, dim=1), w.split(EXACT_COLUMNS, dim=1), strict=True)
    total = torch.zeros((x.shape[0], w.shape[0]), dtype=torch.int32, device=x.device)
    for x_part, w_part in pairs:
        total += (x_part @ w_part.t()).to(torch.int32)
    return total.to(torch.float32)
