# SPDX-License-Identifier: Apache-2.0
"""Names of aspect ratios."""

from __future__ import annotations

import math

RATIOS = {"21:9": 21 / 9, "16:9": 16 / 9, "4:3": 4 / 3, "1:1": 1.0, "3:4": 3 / 4, "9:16": 9 / 16}
"""The host's names (vLLM-Omni 0.30.0 model_executor/models/minimax_h3/preprocessing.py:39)."""


def ratio_name(width: float, height: float) -> str:
    """The ratio's name that is nearest to a size, by quotient."""
    return min(RATIOS, key=lambda name: abs(math.log(RATIOS[name] * height / width)))
