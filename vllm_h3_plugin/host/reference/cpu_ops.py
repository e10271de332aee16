# SPDX-License-Identifier: Apache-2.0
"""FP8 quantization ops of the host (``torch.ops._C``) in plain torch, for the *stock* host's FP8 on a CPU.

The plugin's own linears never call these: they use :mod:`vllm_h3_plugin.quantization`. They exist so that the stock
host can be run beside the plugin on the reference platform, in the same process image and with the same arithmetic as
its CUDA kernels (``csrc/quantization/w8a8/fp8/common.cu``: scale = max(amax / 448, 1 / (448 * 512))).
"""

from __future__ import annotations

import torch

_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
_MIN_SCALE = 1.0 / (_FP8_MAX * 512.0)
_SCHEMAS = {
    "dynamic_scaled_fp8_quant": "(Tensor! result, Tensor input, Tensor! scale) -> ()",
    "dynamic_per_token_scaled_fp8_quant": "(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
    "static_scaled_fp8_quant": "(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
}
_library: torch.library.Library | None = None


def _store(result: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> None:
    rows = values.shape[0]
    result[:rows].copy_((values.float() / scale).clamp(-_FP8_MAX, _FP8_MAX).to(_FP8))
    result[rows:].zero_()


def _dynamic(result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor) -> None:
    scale.fill_((input.float().abs().max() / _FP8_MAX).clamp(min=_MIN_SCALE))
    _store(result, input, scale)


def _dynamic_per_token(
    result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, scale_ub: torch.Tensor | None
) -> None:
    amax = input.float().abs().amax(dim=-1, keepdim=True)
    if scale_ub is not None:
        amax = amax.clamp(max=scale_ub)
    rows = input.shape[0]
    scale[:rows].copy_((amax / _FP8_MAX).clamp(min=_MIN_SCALE))
    scale[rows:].fill_(1.0)
    _store(result, input, scale[:rows])


def _static(
    result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, group_shape: list[int] | None = None
) -> None:
    values = scale.float()
    if values.numel() > 1 and values.ndim == 1:
        per_column = group_shape is not None and group_shape[0] == -1
        values = values.view(1, -1) if per_column else values.view(-1, 1)
    _store(result, input, values)


def define_missing_ops() -> None:
    """Define the three ops for CPU tensors where no loaded library has them. Idempotent."""
    global _library
    if _library is not None or hasattr(torch.ops._C, "dynamic_scaled_fp8_quant"):
        return
    _library = torch.library.Library("_C", "FRAGMENT")
    for name, implementation in zip(_SCHEMAS, (_dynamic, _dynamic_per_token, _static), strict=True):
        _library.define(name + _SCHEMAS[name])
        _library.impl(name, implementation, "CPU")
