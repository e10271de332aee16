# SPDX-License-Identifier: Apache-2.0
"""The precisions that a linear layer can have. Imports no torch."""

from __future__ import annotations

from enum import Enum


class Precision(Enum):
    """Precision of one linear layer. The value is the word that recipes use."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8_CHANNEL = "fp8_channel"
    """E4M3 weights with one FP32 scale per output channel; activations E4M3 with one scale per token."""
    FP8_TENSOR = "fp8_tensor"
    """E4M3 weights with one FP32 scale per tensor; activations E4M3 with one scale per token."""

    @property
    def quantized(self) -> bool:
        """Whether a quantization backend computes it (else the host's plain linear does)."""
        return self in (Precision.FP8_CHANNEL, Precision.FP8_TENSOR)

    @property
    def weight_bytes(self) -> int:
        """Bytes of one resident weight element, scales apart."""
        return {Precision.FP32: 4, Precision.BF16: 2}.get(self, 1)

    def scale_count(self, out_features: int) -> int:
        """Number of FP32 weight scales of a layer with ``out_features`` rows."""
        if self is Precision.FP8_CHANNEL:
            return out_features
        return 1 if self is Precision.FP8_TENSOR else 0
