# SPDX-License-Identifier: Apache-2.0
"""The precisions that a linear layer can have. Imports no torch."""

from __future__ import annotations

from enum import Enum
from typing import Literal

Method = Literal["fp8", "int8"]
"""A family of quantized precisions; the words are the host's, after ``--quantization``."""


class Precision(Enum):
    """Precision of one linear layer. The value is the word that recipes use."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8_CHANNEL = "fp8_channel"
    """E4M3 weights with one FP32 scale per output channel; activations E4M3 with one scale per token."""
    FP8_TENSOR = "fp8_tensor"
    """E4M3 weights with one FP32 scale per tensor; activations E4M3 with one scale per token."""
    INT8 = "int8"
    """Symmetric INT8 weights with one FP32 scale per output channel; activations INT8 with one scale per token."""

    @property
    def method(self) -> Method | None:
        """What it is quantized by; None if it is not."""
        if self is Precision.INT8:
            return "int8"
        return "fp8" if self in (Precision.FP8_CHANNEL, Precision.FP8_TENSOR) else None

    @property
    def quantized(self) -> bool:
        """Whether a quantization backend computes it (else the host's plain linear does)."""
        return self.method is not None

    @property
    def per_channel(self) -> bool:
        """Whether each output channel has a scale of its own."""
        return self in (Precision.FP8_CHANNEL, Precision.INT8)

    @property
    def weight_bytes(self) -> int:
        """Bytes of one resident weight element, scales apart."""
        return {Precision.FP32: 4, Precision.BF16: 2}.get(self, 1)

    def scale_count(self, out_features: int) -> int:
        """Number of FP32 weight scales of a layer with ``out_features`` rows."""
        if self.per_channel:
            return out_features
        return 1 if self is Precision.FP8_TENSOR else 0
