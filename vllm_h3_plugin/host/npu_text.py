# SPDX-License-Identifier: Apache-2.0
"""The text encoder's MLP on Ascend, where the 0.28 host multiplies with raw weights.

Why: ``platforms/npu/models/minimax_h3.py:103`` of vLLM-Omni 0.28.0 replaces ``MiniMaxH3Qwen3VLTextMLP.forward`` by one
that calls ``F.linear(x, self.gate_up_proj.weight)``. A quantized layer's weight is not what that expects: in another
layout, in INT8, without its scales.
Scope: text encoders with quantized layers, in hosts whose patch reads the weight. The replacement is what 0.30.0 has in
the same place (``self.gate_up_proj(x)``): the layer's own method, then the same fused SwiGLU.
Removal: with the 0.28.0 host.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from vllm.logger import init_logger
from vllm_omni.diffusion.models.minimax_h3 import encoder

from vllm_h3_plugin.errors import HostError
from vllm_h3_plugin.quantization.plan import PrecisionPlan

logger = init_logger(__name__)

_NPU_PATCH = "vllm_omni.platforms.npu.models.minimax_h3"
_TEXT_LAYERS = "text_encoder.text_model."


def keep_quantized_text_mlp(plan: PrecisionPlan) -> str:
    """See that the text encoder's MLP computes with its layers' methods; replace the host's patch if it does not.

    Args:
        plan: of the model that is about to be built.

    Returns:
        What was found or done, for the log.

    Raises:
        HostError: the MLP was replaced by something that reads weights and that this module does not know.
    """
    if not any(path.startswith(_TEXT_LAYERS) for path in plan.quantized):
        return "the text encoder is not quantized"
    forward = encoder.MiniMaxH3Qwen3VLTextMLP.forward
    if getattr(forward, "__module__", None) == encoder.__name__:
        return "the host's own MLP, which uses its layers' methods"
    if not _reads_weights(forward):
        return f"{forward.__module__}.{forward.__qualname__}, which uses its layers' methods"
    swiglu = getattr(forward, "__globals__", {}).get("npu_swiglu_from_packed")
    if forward.__module__ != _NPU_PATCH or swiglu is None:
        raise HostError(
            f"the text encoder's MLP is {forward.__module__}.{forward.__qualname__}",
            why="it reads its layers' weights and would leave out their scales",
            fix="Use a recipe whose text encoder is BF16 (int8, fp8-text-bf16), or remove what replaces the MLP.",
        )
    encoder.MiniMaxH3Qwen3VLTextMLP.forward = packed_mlp(swiglu)
    logger.info("H3 text encoder: the host's MLP for NPU reads raw weights; its layers' own methods are used instead")
    return "the host's MLP for NPU was replaced: it reads raw weights"


def packed_mlp(swiglu: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """A forward of the host's text MLP that leaves both products to the layers.

    Args:
        swiglu: ``[..., 2F] -> [..., F]``, gate before up.
    """

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """``[..., H] -> [..., H]``."""
        return self.down_proj(swiglu(self.gate_up_proj(x)))

    return forward


def _reads_weights(forward: Any) -> bool:
    """Whether a function touches an attribute ``weight``. What cannot be looked into counts as one that does."""
    return not isinstance(forward, FunctionType) or "weight" in forward.__code__.co_names
