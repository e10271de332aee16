# SPDX-License-Identifier: Apache-2.0
"""The recipe as a vLLM quantization config: which linear method each layer of H3 gets."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from vllm_h3_plugin.errors import RecipeError
from vllm_h3_plugin.host.linear_method import QuantizedLinearMethod
from vllm_h3_plugin.host.npu_text import keep_quantized_text_mlp
from vllm_h3_plugin.quantization.contract import QuantBackend
from vllm_h3_plugin.quantization.plan import PrecisionPlan
from vllm_h3_plugin.quantization.precision import Precision

TEXT_ENCODER_PREFIX = "text_encoder."


def canonical_path(prefix: str) -> str:
    """Module path as recipes spell it, from the prefix that the host passes to a layer.

    The DiT's prefixes come without ``transformer.`` (minimax_h3_transformer.py:1006-1100), the text encoder's with
    ``text_encoder.`` (encoder.py).
    """
    return prefix if prefix.startswith(TEXT_ENCODER_PREFIX) else f"transformer.{prefix}"


class H3QuantizationConfig(QuantizationConfig):
    """Gives each linear layer the method that the precision plan names.

    The host asks :meth:`get_quant_method` while it builds a layer, before any memory is taken for its weight. The six
    FP32 layers and the vision tower are built with no quantization config at all and never ask.

    Raises (from ``__init__``):
        HostError: the text encoder is quantized and something has replaced its MLP by one that would bypass that.
    """

    def __init__(self, plan: PrecisionPlan, backend: QuantBackend | None) -> None:
        super().__init__()
        self.plan = plan
        self.backend = backend
        keep_quantized_text_mlp(plan)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The linear method of one layer.

        Raises:
            RecipeError: the plan does not know the layer, or gives a precision that this path cannot build.
        """
        if not isinstance(layer, LinearBase):
            return None
        path = canonical_path(prefix)
        precision = self.plan[path].precision
        if precision is Precision.BF16:
            return UnquantizedLinearMethod()
        if precision.quantized and self.backend is not None:
            return QuantizedLinearMethod(self.backend, precision, path)
        raise RecipeError(
            f"{path} cannot be built in {precision.value}",
            why="the host builds this layer in BF16 or quantized",
            fix="Give it bf16 or a quantized precision in the recipe.",
            path=path,
        )

    def get_name(self) -> str:  # type: ignore[override]  # vLLM types it as a closed Literal
        return f"h3-{self.plan.recipe.name}"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> H3QuantizationConfig:
        """Not available: the config is built from a recipe and the checkpoint's own configs."""
        raise NotImplementedError("H3QuantizationConfig is built by the H3 pipeline from a recipe")
