# SPDX-License-Identifier: Apache-2.0
"""Predicted resident bytes: published totals of the real model, and a small checkpoint counted by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.checkpoint.layout import dit_tensors, linear_layers, text_encoder_tensors
from vllm_h3_plugin.checkpoint.synthetic import SynthSpec, tiny_dit, write_checkpoint
from vllm_h3_plugin.errors import CheckpointError, UsageError
from vllm_h3_plugin.memory.table import DEFAULT_STEPS, Role, TableSize, table_bytes, table_rows, table_size
from vllm_h3_plugin.memory.weights import PARTS, ModelShapes, Resident, predict_resident, shapes_of
from vllm_h3_plugin.quantization.plan import PrecisionPlan, plan
from vllm_h3_plugin.quantization.recipe import Adaln, load_recipe

TRUE = ModelShapes()
GIB = 2**30


def plan_of(recipe: str, shapes: ModelShapes = TRUE, adaln: Adaln | None = None) -> PrecisionPlan:
    loaded = load_recipe(recipe)
    return plan(replace(loaded, adaln=adaln or loaded.adaln), linear_layers(shapes.dit, shapes.text))


def resident(recipe: str, adaln: Adaln | None = None) -> Resident:
    return predict_resident(TRUE, plan_of(recipe, adaln=adaln))


@pytest.mark.parametrize(
    ("recipe", "adaln", "gib"),
    [
        ("fp8", Adaln.TABLE, 55.1),
        ("fp8-text-bf16", Adaln.TABLE, 77.8),
        ("bf16", Adaln.RESIDENT, 119.9),
    ],
)
def test_totals_of_the_real_model_are_the_published_ones(recipe: str, adaln: Adaln, gib: float) -> None:
    assert resident(recipe, adaln).gib == pytest.approx(gib, rel=0.003)


def test_the_default_recipe_stays_under_the_asked_55_and_a_half() -> None:
    assert resident("fp8").gib <= 55.5


def test_the_stock_hosts_fp8_total_follows_from_ours_with_adaln_halved() -> None:
    """The stock flag quantizes AdaLN too, which no recipe here can say."""
    ours = resident("fp8-tensor", Adaln.RESIDENT)
    assert (ours.nbytes - ours.parts["adaln"] / 2) / GIB == pytest.approx(66.4, rel=0.002)


def test_the_parts_of_an_unquantized_model_are_its_tensors() -> None:
    whole = resident("bf16", Adaln.RESIDENT)
    tensors = [*dit_tensors(TRUE.dit).values(), *text_encoder_tensors(TRUE.text).values()]
    assert whole.nbytes == sum(tensor.nbytes for tensor in tensors) + sum(TRUE.vaes.values())
    assert set(whole.parts) <= set(PARTS)


def test_a_table_row_of_the_real_model_has_9_7_mb_and_50_steps_have_99_rows() -> None:
    assert table_bytes(TRUE.dit, 1) == 9_698_304
    assert table_size(TRUE.dit, 50) == TableSize(99, 99 * 9_698_304)
    assert resident("fp8").parts["adaln"] == 99 * 9_698_304


@pytest.mark.parametrize(
    ("steps", "roles", "rows"),
    [(1, (), 1), (2, (), 3), (50, ("image",), 2 + 49 * 3), (50, ("image", "audio"), 3 + 49 * 4)],
)
def test_conditions_add_a_row_to_every_forward(steps: int, roles: tuple[Role, ...], rows: int) -> None:
    assert table_rows(steps, roles) == rows


def test_no_steps_are_refused() -> None:
    with pytest.raises(UsageError, match=r"steps=0.*1 step or more"):
        table_rows(0)


def test_a_given_table_counts_instead_of_the_default_one() -> None:
    given = table_size(TRUE.dit, 8, {"image"})
    assert predict_resident(TRUE, plan_of("bf16"), table=given).parts["adaln"] == given.nbytes


def test_the_load_peak_is_one_bf16_layer_above_resident() -> None:
    quantized = resident("fp8")
    gate_up = 2 * 25600 * 5120 * 2
    assert quantized.load_peak_bytes - quantized.nbytes == max(gate_up, (2688 + 1) * 18 * 5376 * 2)
    assert resident("bf16", Adaln.RESIDENT).load_peak_bytes == resident("bf16", Adaln.RESIDENT).nbytes


def test_tensor_parallel_ranks_halve_the_linears_and_keep_table_vision_and_vaes() -> None:
    one, two = resident("fp8"), predict_resident(TRUE, plan_of("fp8"), tp=2)
    for part in ("adaln", "vision", "vaes"):
        assert two.parts[part] == one.parts[part]
    for part in ("dit", "text_encoder"):
        assert two.parts[part] / one.parts[part] == pytest.approx(0.5, abs=0.001)


@pytest.mark.parametrize("tp", [0, 3, 16])
def test_a_tensor_parallel_size_that_does_not_divide_is_refused(tp: int) -> None:
    with pytest.raises(UsageError, match=rf"tensor-parallel size {tp}: it does not divide .*Use 1, 2, 4 or 8"):
        predict_resident(TRUE, plan_of("fp8"), tp=tp)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "H3"
    write_checkpoint(path, SynthSpec(partition="both", dit=tiny_dit(layers=1)))
    return path


def test_a_checkpoint_is_counted_from_its_headers(root: Path) -> None:
    inventory = take_inventory(root / "FL2VA")
    shapes = shapes_of(inventory)
    found = predict_resident(inventory, plan_of("bf16", shapes))
    partition = inventory.partitions[0]
    assert found.parts["video_vae"] == 4 * partition.part("video_vae").parameters
    used = list(partition.part("transformer").tensors)
    assert sum(found.parts[part] for part in ("dit", "refiner", "adaln")) == sum(t.nbytes for t in used)


def test_both_partitions_hold_a_second_dit_and_one_of_the_rest(root: Path) -> None:
    both, one = shapes_of(take_inventory(root, "combined")), shapes_of(take_inventory(root / "FL2VA"))
    more, less = (predict_resident(shapes, plan_of("fp8", shapes)) for shapes in (both, one))
    assert more.nbytes - less.nbytes == more.parts["transformer_ref"]
    # Every request of Ref2VA has pictures, which are a role of their own in the table of its default schedule.
    table = table_size(both.dit, DEFAULT_STEPS, ("image",)).nbytes
    assert more.parts["transformer_ref"] == less.parts["dit"] + less.parts["refiner"] + table
    alone = shapes_of(take_inventory(root / "Ref2VA"))
    assert predict_resident(alone, plan_of("fp8", alone)).parts["adaln"] == table


def test_a_faulty_checkpoint_is_refused_by_name(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing-here"):
        shapes_of(take_inventory(tmp_path / "nothing-here"))
