# SPDX-License-Identifier: Apache-2.0
"""The AdaLN table of one schedule: every block's and the final layer's modulation, a row for each timestep of a group.

Row layout, BF16: ``[block 0 | block 1 | … | final layer]``, a block's part as its projection leaves it
(``modalities * 6 * hidden`` wide), the final layer's ``2 * hidden``. For the real model a row is
``50 * 96768 + 10752`` values, 9.70 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_h3_plugin.checkpoint.configs import DitConfig
from vllm_h3_plugin.conditioning.schedule import Group, Schedule
from vllm_h3_plugin.errors import UsageError

FINAL = -1
"""Layer number of the final layer's projection."""

_BLOCK_VECTORS = 18
_FINAL_VECTORS = 2


@dataclass(frozen=True)
class TableShape:
    """Widths of a row.

    Attributes:
        layers: number of blocks.
        block: width of a block's projection, 18 * hidden (three modalities of six vectors).
        final: width of the final layer's, 2 * hidden.
    """

    layers: int
    block: int
    final: int

    @classmethod
    def of(cls, config: DitConfig) -> TableShape:
        """From a DiT's config."""
        hidden = config.hidden_size
        return cls(config.num_layers, _BLOCK_VECTORS * hidden, _FINAL_VECTORS * hidden)

    @property
    def width(self) -> int:
        """Values in a row."""
        return self.layers * self.block + self.final

    def nbytes(self, rows: int) -> int:
        """Bytes of a table of so many rows."""
        return rows * self.width * 2

    def columns(self, layer: int) -> slice:
        """Where a layer's values stand in a row; :data:`FINAL` for the final layer."""
        if layer == FINAL:
            return slice(self.layers * self.block, self.width)
        return slice(layer * self.block, (layer + 1) * self.block)

    def layer_of(self, module: str) -> int:
        """Layer number from a module path such as ``blocks.3.adaln_proj`` or ``final_layer.adaln_proj.linear``."""
        head, _, tail = module.partition(".")
        return int(tail.partition(".")[0]) if head == "blocks" else FINAL


class AdalnTable:
    """Projected rows of one schedule.

    Args:
        shape: row layout.
        schedule: its groups, in the order of the rows.
        values: ``[schedule.rows, shape.width]`` BF16.
    """

    def __init__(self, shape: TableShape, schedule: Schedule, values: torch.Tensor) -> None:
        if values.shape != (schedule.rows, shape.width) or values.dtype is not torch.bfloat16:
            raise AssertionError(f"table {tuple(values.shape)} of {values.dtype}, schedule of {schedule.rows} rows")
        self.shape = shape
        self.schedule = schedule
        self.values = values
        self._spans: dict[Group, slice] = spans(schedule)

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.values.nbytes

    def rows(self, group: Sequence[float]) -> torch.Tensor:
        """``[len(group), width]``: a view of the rows of one step.

        Raises:
            UsageError: the schedule has no such step. Nothing is interpolated.
        """
        span = self._spans.get(tuple(group))
        if span is None:
            raise UsageError(
                f"the AdaLN table of {self.schedule.label} has no step at timesteps {tuple(group)}",
                why="it holds the steps of one schedule, and these rows do not follow it",
                fix='Use a recipe with "adaln": "resident" for requests that give rows timesteps of their own.',
            )
        return self.values[span]


def spans(schedule: Schedule) -> dict[Group, slice]:
    """Rows of each group."""
    result, start = {}, 0
    for group in schedule.groups:
        result[group] = slice(start, start + len(group))
        start += len(group)
    return result


Project = Callable[[torch.Tensor], torch.Tensor]


class TableBuilder:
    """Fills a table layer by layer, in whatever order the layers' weights come off the disk.

    Args:
        shape: row layout.
        schedule: what to build.
        embed: timestep embedding, ``[M] FP32 -> [M, time_embed_dim] FP32``; called once a group.
        device: where the table will live.
    """

    def __init__(self, shape: TableShape, schedule: Schedule, embed: Project, device: torch.device) -> None:
        self._shape = shape
        self._schedule = schedule
        self._values = torch.empty((schedule.rows, shape.width), dtype=torch.bfloat16, device=device)
        self._open = {*range(shape.layers), FINAL}
        self._embeddings: Mapping[Group, torch.Tensor] = {
            group: embed(torch.tensor(group, dtype=torch.float32, device=device)) for group in schedule.groups
        }
        self._spans = spans(schedule)

    def add(self, layer: int, project: Project) -> None:
        """Project one layer.

        Args:
            layer: number of the block, or :data:`FINAL`.
            project: ``[M, time_embed_dim] FP32 -> [M, width] BF16``; called once a group, with that group's rows alone.

        Raises:
            AssertionError: the layer came twice.
        """
        if layer not in self._open:
            raise AssertionError(f"AdaLN of layer {layer} was projected twice, or is not in the model")
        self._open.discard(layer)
        columns = self._shape.columns(layer)
        for group, embedding in self._embeddings.items():
            self._values[self._spans[group], columns] = project(embedding)

    def finish(self) -> AdalnTable:
        """The table.

        Raises:
            AssertionError: a layer never came.
        """
        if self._open:
            raise AssertionError(f"AdaLN of layers {sorted(self._open)} was not projected")
        return AdalnTable(self._shape, self._schedule, self._values)
