# SPDX-License-Identifier: Apache-2.0
"""FP8 (E4M3) quantization of weights and activations: the arithmetic that every FP8 backend shares.

``scale = amax / 448``, ``q = round_to_e4m3(clamp(v / scale, -448, 448))``. It follows the host to the bit:

* per channel: vLLM 0.30.0 ``layers/quantization/online/fp8.py`` (``_fp8_channel_scale``, ``_fp8_quant_per_channel``);
* per token: ``dynamic_per_token_scaled_fp8_quant`` of vLLM ``csrc/.../quantization/w8a8/fp8/common.cu``, which divides
  by the scale and has the same floor;
* per tensor: ``_fp8_scale`` and ``static_scaled_fp8_quant`` of the same files, which multiplies by the reciprocal.

They differ where an activation is NaN: the CUDA kernel clamps it to 448, torch keeps NaN. Weights with NaN are refused.
"""

from __future__ import annotations

import torch

from vllm_h3_plugin.errors import BackendError
from vllm_h3_plugin.quantization.finite import check_finite
from vllm_h3_plugin.quantization.precision import Precision

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SCALE_FLOOR = 1.0 / (E4M3_MAX * 512.0)
"""Smallest scale per channel and per token, vLLM's ``min_scaling_factor``. Keeps all-zero rows finite."""

CHUNK_ELEMENTS = 16 * 1024 * 1024
"""Rows are quantized in chunks whose FP32 intermediates stay under 64 MB (vLLM's ``_QUANT_CHUNK_ELEMS``)."""


def weight_amax(weight: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Largest magnitude per scale. NaN and infinity come through.

    Where a rank holds a shard of a layer, reduce this with MAX over the tensor-parallel group (per channel: only if the
    input width is sharded) and hand the result to :func:`quantize_weight`: all ranks then use the unsharded scale.

    Args:
        weight: ``[N, K]`` floating point.
        precision: ``FP8_CHANNEL`` or ``FP8_TENSOR``.

    Returns:
        ``[N, 1]`` or ``[1]`` in the weight's dtype.

    Raises:
        BackendError: another precision.
    """
    # aminmax instead of abs().amax(): no copy of the weight's size.
    if precision is Precision.FP8_CHANNEL:
        low, high = weight.aminmax(dim=-1, keepdim=True)
    elif precision is Precision.FP8_TENSOR:
        low, high = weight.aminmax()
        low, high = low.reshape(1), high.reshape(1)
    else:
        raise BackendError(
            f"precision {precision.value} is not FP8", fix="Only quantized layers go through a quantization backend."
        )
    return torch.maximum(low.abs(), high.abs())


def weight_scale(amax: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Scales from :func:`weight_amax`, FP32, same shape.

    Per channel they are floored as in vLLM. Per tensor vLLM has no floor and an all-zero weight would divide by zero,
    so that there the floor stands in for zero alone.
    """
    scale = _over_e4m3_max(amax)
    if precision is Precision.FP8_CHANNEL:
        return scale.clamp_min(SCALE_FLOOR)
    return torch.where(scale > 0, scale, torch.full_like(scale, SCALE_FLOOR))


def quantize_weight(
    weight: torch.Tensor, precision: Precision, *, path: str, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize one weight; see :meth:`vllm_h3_plugin.quantization.contract.QuantBackend.quantize_weight`.

    Returns:
        ``(q, scale)``: ``[N, K]`` E4M3 contiguous; FP32 ``[N, 1]`` or ``[1]``.

    Raises:
        RecipeError: the weight is not finite; the message names the layer and the first bad rows.
        BackendError: the precision is not FP8.
    """
    own = weight_amax(weight, precision)
    check_finite(weight, own, path)
    scale = weight_scale(own if amax is None else amax, precision)
    if precision is Precision.FP8_CHANNEL:
        return _quantize_rows(weight, scale), scale
    # The host's static kernel inverts the scale once and multiplies.
    return _quantize_rows(weight, scale.reciprocal(), multiply=True), scale


def quantize_activation(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations with one dynamic scale per token.

    Args:
        x: ``[M, K]`` floating point, any strides, M may be 0. Not checked for NaN or infinity.

    Returns:
        ``(xq, scale)``: ``[M, K]`` E4M3 contiguous; ``[M, 1]`` FP32.
    """
    scale = _over_e4m3_max(weight_amax(x, Precision.FP8_CHANNEL)).clamp_min(SCALE_FLOOR)
    return _quantize_rows(x, scale), scale


def dequantize(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``[N, K]`` FP32 from ``[N, K]`` E4M3 and its scales, ``[N, 1]`` or ``[1]``."""
    return q.to(torch.float32) * scale


def _over_e4m3_max(amax: torch.Tensor) -> torch.Tensor:
    # A tensor as divisor: on CUDA torch turns division by a Python float into a multiplication by its reciprocal.
    return amax.to(torch.float32) / torch.tensor(E4M3_MAX, dtype=torch.float32, device=amax.device)


def _quantize_rows(values: torch.Tensor, factor: torch.Tensor, *, multiply: bool = False) -> torch.Tensor:
    out = torch.empty(values.shape, dtype=E4M3, device=values.device)
    rows = max(1, CHUNK_ELEMENTS // values.shape[1])
    for start in range(0, values.shape[0], rows):
        part = slice(start, start + rows)
        f = factor if factor.ndim == 1 else factor[part]
        scaled = values[part].to(torch.float32) * f if multiply else values[part] / f
        out[part] = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return out
