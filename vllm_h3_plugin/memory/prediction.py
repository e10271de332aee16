# SPDX-License-Identifier: Apache-2.0
"""What was computed about one model and one request, for whoever shows it."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_h3_plugin.memory.activations import Peak
from vllm_h3_plugin.memory.fit import Fit
from vllm_h3_plugin.memory.weights import ModelShapes, Resident
from vllm_h3_plugin.quantization.recipe import Recipe


@dataclass(frozen=True)
class Prediction:
    """A prediction in full.

    Attributes:
        fits: GiB of memory -> the longest clip at each size of :data:`vllm_h3_plugin.memory.fit.FIT_SIZES`.
        floor_gib: GiB that stay free in ``fits``.
    """

    shapes: ModelShapes
    recipe: Recipe
    resident: Resident
    peak: Peak
    fits: dict[float, list[Fit]]
    floor_gib: float
