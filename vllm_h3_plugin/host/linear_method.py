# SPDX-License-Identifier: Apache-2.0
"""A vLLM linear method whose weight is resident in FP8 or INT8 from the start; a :class:`QuantBackend` computes."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter
from vllm.model_executor.utils import replace_parameter

from vllm_h3_plugin.quantization.activation import QuantizedActivation
from vllm_h3_plugin.quantization.contract import Packed, QuantBackend
from vllm_h3_plugin.quantization.fp8 import CHUNK_ELEMENTS, E4M3
from vllm_h3_plugin.quantization.precision import Method, Precision

_WEIGHT_BYTES, _SCALE_BYTES = torch.uint8, torch.int32
# Bytes that no quantized weight holds: NaN of E4M3, and -128, which symmetric INT8 leaves out.
_UNFILLED: dict[Method, int] = {"fp8": 0x7F, "int8": 0x80}
_FP32_NAN = 0x7FC00000

RESIDENT_DTYPE = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP8_CHANNEL: E4M3,
    Precision.FP8_TENSOR: E4M3,
    Precision.INT8: torch.int8,
}
"""Element type of a loaded layer's weight."""


def stored(param: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """A piece as a weight loader can copy it into a parameter that is kept as integers: its bytes, not its values."""
    return piece.view(param.dtype) if param.dtype in (_WEIGHT_BYTES, _SCALE_BYTES) else piece


def is_filled(weight: torch.Tensor, scale: torch.Tensor, method: Method) -> bool:
    """Whether every row of a quantized weight and every scale was written. Weights with NaN are refused earlier."""
    if bool((scale == _FP32_NAN).any()):
        return False
    rows = max(1, CHUNK_ELEMENTS // max(1, weight.shape[1]))
    return not any(bool((part == _UNFILLED[method]).any()) for part in weight.data.split(rows))


class QuantizedLinearMethod(LinearMethodBase):
    """``weight`` in E4M3 or INT8 and ``weight_scale`` in FP32, as a layer of a quantized checkpoint has them.

    The loader (``host/loading.py``) quantizes whole tensors of the checkpoint and gives both through the layer's own
    weight loader, which takes this rank's part of them. A snapshot holds the same pairs and goes the same way. So no
    BF16 layer is ever a parameter, and scales are those of whole tensors at any tensor-parallel size.
    """

    # Until loading ends both are kept as integers of the same bytes: the host casts the text encoder's parameters to
    # BF16 after it has built them (encoder.py), which would double the weights and round the scales.
    #
    # The host's layer-wise online quantization keeps BF16 tensors of unfinished layers; it is not used.
    uses_meta_device = False

    def __init__(self, backend: QuantBackend, precision: Precision, path: str) -> None:
        method = precision.method
        assert method is not None  # only quantized layers get this method
        self.backend = backend
        self.precision = precision
        self.method: Method = method
        self.path = path

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``weight`` ``[N, K]`` and ``weight_scale`` ``[N, 1]`` or ``[1]``, N and K of this rank.

        Both start as what they cannot be, NaN or -128, so that what was never filled shows (:func:`is_filled`).
        """
        rows = sum(output_partition_sizes)
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = rows
        layer.orig_dtype = params_dtype
        loader = extra_weight_attrs["weight_loader"]
        weight = ModelWeightParameter(
            data=torch.full((rows, input_size_per_partition), _UNFILLED[self.method], dtype=_WEIGHT_BYTES),
            input_dim=1,
            output_dim=0,
            weight_loader=loader,
        )
        layer.register_parameter("weight", weight)
        split = rows != output_size or len(output_partition_sizes) > 1
        channels = (rows, 1) if self.precision.per_channel else (1,)
        data = torch.full(channels, _FP32_NAN, dtype=_SCALE_BYTES)
        if self.precision.per_channel and split:
            scale = ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=loader)
        else:
            # Whole on every rank. No loader: the text encoder's row-parallel one cuts whatever it is given by columns.
            scale = torch.nn.Parameter(data, requires_grad=False)
        layer.register_parameter("weight_scale", scale)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Put the backend's resident form in the place of the loaded one."""
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        weight = layer.weight.data.view(RESIDENT_DTYPE[self.precision])
        packed = self.backend.pack(weight, layer.weight_scale.data.view(torch.float32))
        replace_parameter(layer, "weight", packed.weight)
        replace_parameter(layer, "weight_scale", packed.scale)
        layer._already_called_process_weights_after_loading = True

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor | QuantizedActivation, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[..., K] -> [..., N]`` in the dtype of ``x``. The host's layers hand on what a fused kernel quantized."""
        packed = Packed(layer.weight, layer.weight_scale)
        if isinstance(x, QuantizedActivation):
            return self.backend.matmul(x, packed, bias)
        return self.backend.apply(x, packed, bias)
