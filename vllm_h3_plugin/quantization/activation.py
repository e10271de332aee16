# SPDX-License-Identifier: Apache-2.0
"""Activations that a fused kernel has quantized already."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class QuantizedActivation:
    """Stands where a linear layer takes its input; :class:`QuantizedLinearMethod` unpacks it.

    A LoRA layer of the host runs its low-rank path on the unquantized activation, which it reads through
    :meth:`reshape` (vllm_omni ``diffusion/lora/layers/base_linear.py``). Whoever makes one for such a layer keeps it.

    Attributes:
        values: ``[M, K]`` E4M3 or INT8, contiguous.
        scale: ``[M, 1]`` FP32, one per token.
        original: ``[M, K]`` BF16 that was quantized, or None if nobody reads it.
    """

    values: torch.Tensor
    scale: torch.Tensor
    original: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """``[M, K]``."""
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of what layers return for it."""
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        """Where both tensors are."""
        return self.values.device

    def reshape(self, *shape: int) -> torch.Tensor:
        """The unquantized activation in another shape.

        Raises:
            AssertionError: it was not kept.
        """
        if self.original is None:
            raise AssertionError("the unquantized activation was not kept, and a layer reads it")
        return self.original.reshape(*shape)
