# SPDX-License-Identifier: Apache-2.0
"""A table is filled layer by layer, one step's rows at a time, and gives back exactly the steps that it holds."""

from __future__ import annotations

import pytest
import torch

from tests.unit.conditioning.conftest import SHAPE, steps, table_of
from vllm_h3_plugin.checkpoint.configs import DitConfig
from vllm_h3_plugin.conditioning.schedule import Roles, Schedule, schedule
from vllm_h3_plugin.conditioning.table import FINAL, TableBuilder, TableShape
from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.memory.table import TableSize, table_size

TWO = Schedule(((0.0,), (0.25, 0.5)), "two steps")


def test_a_row_of_the_real_model_is_9_70_megabytes() -> None:
    shape = TableShape.of(DitConfig())
    assert shape.nbytes(1) == (50 * 96768 + 10752) * 2 == 9_698_304
    assert shape.nbytes(99) < 0.97e9


def test_layers_are_told_by_their_module() -> None:
    assert SHAPE.layer_of("blocks.1.adaln_proj.linear") == 1
    assert SHAPE.layer_of("final_layer.adaln_proj") == FINAL
    assert SHAPE.columns(1) == slice(6, 12) and SHAPE.columns(FINAL) == slice(12, 14)


def test_every_projection_sees_the_rows_of_one_step_alone() -> None:
    seen: list[tuple[int, int]] = []

    def project(width: int, layer: int):  # type: ignore[no-untyped-def]
        def call(embedding: torch.Tensor) -> torch.Tensor:
            seen.append((layer, embedding.shape[0]))
            return (embedding[:, :1] + layer).expand(-1, width).to(torch.bfloat16)

        return call

    builder = TableBuilder(SHAPE, TWO, lambda t: t[:, None] * 2, torch.device("cpu"))
    for layer, width in ((1, 6), (FINAL, 2), (0, 6)):
        builder.add(layer, project(width, layer))
    table = builder.finish()
    assert seen == [(1, 1), (1, 2), (FINAL, 1), (FINAL, 2), (0, 1), (0, 2)]
    rows = table.rows((0.25, 0.5))
    assert rows[:, SHAPE.columns(1)].tolist() == [[1.5] * 6, [2.0] * 6]
    assert rows[:, SHAPE.columns(FINAL)].tolist() == [[-0.5] * 2, [0.0] * 2]


def test_a_layer_that_comes_twice_or_never_is_a_programming_error() -> None:
    builder = TableBuilder(SHAPE, TWO, lambda t: t[:, None], torch.device("cpu"))
    zeros = lambda e: torch.zeros(e.shape[0], 6, dtype=torch.bfloat16)  # noqa: E731
    builder.add(0, zeros)
    with pytest.raises(AssertionError, match="layer 0"):
        builder.add(0, zeros)
    with pytest.raises(AssertionError, match="was not projected"):
        builder.finish()


def test_rows_are_a_view_of_the_table() -> None:
    table = table_of(TWO)
    assert table.rows((0.25, 0.5)).data_ptr() == table.values[1:].data_ptr()


@pytest.mark.parametrize("group", [(0.25,), (0.5, 0.25), (0.0, 0.25, 0.5), (0.250001, 0.5)])
def test_a_step_that_is_not_in_the_schedule_is_refused_with_the_way_out(group: tuple[float, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        table_of(TWO).rows(group)
    assert str(group) in caught.value.what and "two steps" in caught.value.what
    assert '"adaln": "resident"' in caught.value.fix


def test_values_must_fit_the_schedule() -> None:
    with pytest.raises(AssertionError, match="schedule of 1 rows"):
        from vllm_h3_plugin.conditioning.table import AdalnTable

        AdalnTable(SHAPE, steps(0.5), torch.zeros(2, SHAPE.width, dtype=torch.bfloat16))


@pytest.mark.parametrize("config", [DitConfig(), DitConfig(num_layers=4, hidden_size=64)])
def test_memory_predicts_the_size_of_the_table_that_is_built(config: DitConfig) -> None:
    """memory/ loads without torch and so counts by itself."""
    sigmas = [1 - i / 50 for i in range(51)]
    shifted = [3 * s / (1 + 2 * s) for s in sigmas]
    built = schedule(sigmas, shifted, Roles())
    assert table_size(config, 50) == TableSize(built.rows, TableShape.of(config).nbytes(built.rows))
    with_image = schedule(sigmas, shifted, Roles(image=True))
    assert table_size(config, 50, ("image",)).rows == with_image.rows
