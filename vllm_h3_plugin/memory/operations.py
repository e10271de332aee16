# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a denoise step, from the DiT's shape. Imports no torch.

Matrix multiplications and attention alone, two operations for each multiply-add: of the real model's step at 6016
tokens everything else is below a thousandth.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_h3_plugin.checkpoint.configs import DitConfig


@dataclass(frozen=True)
class StepFlops:
    """A step of S rows needs ``per_token * S + per_pair * S * S``.

    Attributes:
        per_token: of the linear layers.
        per_pair: of attention: scores and values, each ``2 * inner`` a pair of a query and a key.
    """

    per_token: int
    per_pair: int

    def __call__(self, tokens: int) -> int:
        return self.per_token * tokens + self.per_pair * tokens * tokens


def block_flops(config: DitConfig, rows: int, keys: int) -> int:
    """Of one block: four linears on ``rows`` tokens, attention of all rows over ``keys``."""
    hidden, inner, ffn = config.hidden_size, config.inner_size, config.ffn_hidden_size
    return 2 * rows * (4 * hidden * inner + 3 * hidden * ffn) + 4 * rows * keys * inner


def step_flops(config: DitConfig) -> StepFlops:
    """Of all blocks; projections in front of and behind them are left out."""
    linears = block_flops(config, 1, 0)
    return StepFlops(config.num_layers * linears, config.num_layers * (block_flops(config, 1, 1) - linears))
