# SPDX-License-Identifier: Apache-2.0
"""The oracle backend: FP8 linear layers in plain torch, on any device.

    y = (xq @ wq.T) * w_scale.T * x_scale + bias      all in FP32, rounded to x.dtype once

Every product of two E4M3 values is exact in FP32, so that only the sum over K rounds. The fast backends sum in another
order, and Hopper's FP8 tensor cores with fewer bits; they agree within a tolerance, not to the bit.

Trade-off: the weight stays resident in FP8 and is widened to FP32 in each call, at most 64 MB at a time. A CPU spends
most of a small layer's time in that conversion; a resident FP32 copy would be faster and four times the size, and the
point of this backend is to be what the fast one is: FP8 in memory, with the same bytes.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from vllm_h3_plugin.quantization import fp8
from vllm_h3_plugin.quantization.activation import QuantizedActivation
from vllm_h3_plugin.quantization.contract import LayerFacts, Packed, QuantBackend, Support
from vllm_h3_plugin.quantization.precision import Precision


class Reference(QuantBackend):
    """See the module's docstring."""

    name: ClassVar[str] = "reference"

    def supports(self, layer: LayerFacts) -> Support:
        """Every FP8 layer of any width."""
        if not layer.precision.quantized:
            return Support(False, f"{layer.path} is {layer.precision.value}, which is not quantized")
        return Support(True, "plain torch")

    def quantize_weight(
        self, weight: torch.Tensor, precision: Precision, *, path: str, amax: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`vllm_h3_plugin.quantization.fp8.quantize_weight`."""
        return fp8.quantize_weight(weight, precision, path=path, amax=amax)

    def pack(self, q: torch.Tensor, scale: torch.Tensor) -> Packed:
        """``[N, K]`` -> ``[K, N]`` view, as the CUTLASS backend keeps it: either can apply what the other packed."""
        return Packed(q.t(), scale.contiguous())

    def quantize_tokens(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`vllm_h3_plugin.quantization.fp8.quantize_activation`."""
        return fp8.quantize_activation(x)

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
    wide = values.to(torch.float32)
    y = torch.empty((wide.shape[0], n), dtype=torch.float32, device=values.device)
    rows = max(1, fp8.CHUNK_ELEMENTS // k)
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        y[:, part] = wide @ wq[part].to(torch.float32).t()
    y *= packed.scale.reshape(1, -1)
    y *= scale
    if bias is not None:
        y += bias
    return y
