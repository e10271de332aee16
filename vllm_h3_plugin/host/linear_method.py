# SPDX-License-Identifier: Apache-2.0
"""A vLLM linear method that quantizes its weight while it loads and computes through a :class:`QuantBackend`."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.utils.quant_utils import amax_for_tp_weight_quant
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import replace_parameter

from vllm_h3_plugin.quantization.contract import Packed, QuantBackend
from vllm_h3_plugin.quantization.fp8 import weight_amax
from vllm_h3_plugin.quantization.precision import Precision


class QuantizedLinearMethod(LinearMethodBase):
    """Weights arrive in BF16 on the meta device's promise and leave as ``weight`` + ``weight_scale``.

    The host's layer-wise loading (vllm/model_executor/model_loader/reload/layerwise.py) buffers a layer's tensors,
    materializes the layer when the last has come, and calls :meth:`process_weights_after_loading`; so at most one
    BF16 layer is resident beside the quantized ones.
    """

    uses_meta_device = True

    def __init__(self, backend: QuantBackend, precision: Precision, path: str) -> None:
        self.backend = backend
        self.precision = precision
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
        """Register ``weight`` as ``[sum(output_partition_sizes), input_size_per_partition]`` on the meta device."""
        rows = sum(output_partition_sizes)
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = rows
        layer.orig_dtype = params_dtype
        # weight_scale is registered by process_weights_after_loading; a bias, where there is one, by the layer itself.
        weight = ModelWeightParameter(
            data=torch.empty(rows, input_size_per_partition, device="meta", dtype=params_dtype),
            input_dim=1,
            output_dim=0,
            weight_loader=extra_weight_attrs["weight_loader"],
        )
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Quantize the materialized BF16 weight and put the resident form in its place."""
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        amax = amax_for_tp_weight_quant(weight_amax(layer.weight, self.precision), self._amax_is_sharded(layer))
        q, scale = self.backend.quantize_weight(layer.weight, self.precision, path=self.path, amax=amax)
        packed = self.backend.pack(q, scale)
        replace_parameter(layer, "weight", packed.weight)
        replace_parameter(layer, "weight_scale", packed.scale)
        layer._already_called_process_weights_after_loading = True

    def _amax_is_sharded(self, layer: torch.nn.Module) -> bool:
        """Whether the maxima span ranks: row-parallel always, column-parallel only for one scale per tensor."""
        if layer.tp_size == 1:
            return False
        rows_split = layer.output_size != layer.output_size_per_partition
        columns_split = layer.input_size != layer.input_size_per_partition
        return columns_split or (rows_split and self.precision is Precision.FP8_TENSOR)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``[..., K] -> [..., N]`` in the dtype of ``x``."""
        return self.backend.apply(x, Packed(layer.weight, layer.weight_scale), bias)
