# SPDX-License-Identifier: Apache-2.0
"""Symmetric INT8 quantization of weights and activations: the arithmetic that every INT8 backend shares.

``scale = amax / 127`` of a row, ``q = clamp(round_half_even(v / scale), -127, 127)``, as ``npu_dynamic_quant``
documents it (torch_npu 2.10.0.post4, ``_op_plugin_docs.py``). -128 is never a value, which leaves it free to mean
"not filled" while weights are loaded.

An Ascend card multiplies activations by ``127 / amax`` where this module divides, so that a value within one FP32
rounding of a half may come out one step apart.
"""

from __future__ import annotations

import torch

from vllm_h3_plugin.errors import BackendError
from vllm_h3_plugin.quantization.finite import check_finite
from vllm_h3_plugin.quantization.precision import Precision

INT8_MAX = 127.0
SCALE_FLOOR = torch.finfo(torch.float32).tiny
"""Smallest scale, the smallest normal FP32 number: all-zero rows stay finite, also where subnormals are flushed."""

CHUNK_ELEMENTS = 16 * 1024 * 1024
"""Rows are quantized in chunks whose FP32 intermediates stay under 64 MB."""


def row_amax(values: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each row of ``[N, K]``, ``[N, 1]`` in the same dtype. NaN and infinity come through."""
    # Not abs().amax(): no copy of the weight's size.
    return torch.maximum(values.amax(dim=-1, keepdim=True), -values.amin(dim=-1, keepdim=True))


def quantize_weight(
    weight: torch.Tensor, precision: Precision, *, path: str, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize one weight; see :meth:`vllm_h3_plugin.quantization.contract.QuantBackend.quantize_weight`.

    Returns:
        ``(q, scale)``: ``[N, K]`` INT8 contiguous; FP32 ``[N, 1]``.

    Raises:
        RecipeError: the weight is not finite; the message names the layer and the first bad rows.
        BackendError: the precision is not INT8.
    """
    if precision is not Precision.INT8:
        raise BackendError(
            f"precision {precision.value} is not INT8", fix="Only INT8 layers go through an INT8 backend."
        )
    own = row_amax(weight)
    check_finite(weight, own, path)
    scale = _scale(own if amax is None else amax)
    return _quantize_rows(weight, scale), scale


def quantize_activation(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations with one dynamic scale per token.

    Args:
        x: ``[M, K]`` floating point, any strides, M may be 0. Not checked for NaN or infinity: a row that holds one
            gets a scale that is not finite, and so is its result.

    Returns:
        ``(xq, scale)``: ``[M, K]`` INT8 contiguous; ``[M, 1]`` FP32.
    """
    scale = _scale(row_amax(x))
    return _quantize_rows(x, scale), scale


def dequantize(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``[N, K]`` FP32 from ``[N, K]`` INT8 and its scales ``[N, 1]``."""
    return q.to(torch.float32) * scale


def _scale(amax: torch.Tensor) -> torch.Tensor:
    # A tensor as divisor: devices turn division by a Python float into a multiplication by its reciprocal.
    scale = amax.to(torch.float32) / torch.tensor(INT8_MAX, dtype=torch.float32, device=amax.device)
    return scale.clamp_min(SCALE_FLOOR)


def _quantize_rows(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    out = torch.empty(values.shape, dtype=torch.int8, device=values.device)
    rows = max(1, CHUNK_ELEMENTS // values.shape[1])
    for start in range(0, values.shape[0], rows):
        part = slice(start, start + rows)
        scaled = values[part].to(torch.float32) / scale[part]
        # torch.round rounds halves to even.
        out[part] = scaled.round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return out
