# SPDX-License-Identifier: Apache-2.0
"""Size of the AdaLN table of a schedule: rows and bytes. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from vllm_h3_plugin.checkpoint.configs import ADALN_MODALITIES, ADALN_OUTPUTS_PER_MODALITY, DitConfig
from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.quantization.recipe import Recipe

Role = Literal["image", "audio"]

DEFAULT_STEPS = 50
"""Denoiser evaluations of a request that names none (vLLM-Omni 0.30.0 pipeline_minimax_h3.py:1266)."""

_ROW_ELEMENT_BYTES = 2  # BF16, as the projection that the table replaces


@dataclass(frozen=True)
class TableSize:
    """An AdaLN table: one row for each distinct timestep of each forward, one column block for each projection."""

    rows: int
    nbytes: int


def table_rows(steps: int, roles: Collection[Role] = ()) -> int:
    """Rows that a schedule needs at most.

    A forward has one row for each distinct timestep in it: video ``1 - sigma_v`` and sound ``1 - sigma_a``, which are
    equal in step 0 alone; conditions add ``max(1 - sigma_v, 0.999)`` for pictures and ``max(1 - sigma_a, 1.0)`` for
    sound (vLLM-Omni 0.30.0 minimax_h3/adaln_cache.py ``timestep_plans``). Near the schedule's end a condition can
    coincide with a target, which saves a row that is counted here.

    Args:
        steps: denoiser evaluations. 0.30.0 runs as many as the request asks for, 0.28.0 one fewer.
        roles: kinds of conditions: ``image`` for first and last frames, pictures and films; ``audio`` for sound.

    Raises:
        UsageError: ``steps`` is below 1.
    """
    if steps < 1:
        raise UsageError(f"steps={steps}", why="a clip takes at least one denoise step", fix="Ask for 1 step or more.")
    conditions = len(set(roles))
    return (1 + conditions) + (steps - 1) * (2 + conditions)


def table_bytes(config: DitConfig, rows: int) -> int:
    """Bytes of a table: each row holds every block's 3 x 6 vectors and the final layer's 2, BF16."""
    block = ADALN_MODALITIES * ADALN_OUTPUTS_PER_MODALITY * config.hidden_size
    return rows * (config.num_layers * block + 2 * config.hidden_size) * _ROW_ELEMENT_BYTES


def table_size(config: DitConfig, steps: int, roles: Collection[Role] = ()) -> TableSize:
    """Rows and bytes of a schedule's table; raises as :func:`table_rows`."""
    rows = table_rows(steps, roles)
    return TableSize(rows, table_bytes(config, rows))


def default_table(recipe: Recipe, config: DitConfig, *, references: bool = False) -> TableSize | None:
    """The table that a DiT holds from the start: the default schedule's. None if the recipe keeps the weights.

    Args:
        references: it is Ref2VA's, whose every request has pictures or films.
    """
    roles: tuple[Role, ...] = ("image",) if references else ()
    return table_size(config, DEFAULT_STEPS, roles) if keeps_table(recipe) else None


def keeps_table(recipe: Recipe) -> bool:
    """Whether the recipe replaces the AdaLN weights by a table."""
    return recipe.adaln.value == "table"
