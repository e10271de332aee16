# SPDX-License-Identifier: Apache-2.0
"""A folder that is not the checkpoint itself is answered with the one that is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vllm_h3_plugin.checkpoint.inventory import ANY_TASK, take_inventory
from vllm_h3_plugin.errors import UsageError


def the_fault(path: Path, task: str | None, code: str):
    faults = take_inventory(path, task).faults
    assert [fault.code for fault in faults] == [code], faults
    assert str(faults[0].path) in faults[0].what and faults[0].why and faults[0].fix
    return faults[0]


def test_missing_folder_names_its_neighbours(checkpoint) -> None:
    fault = the_fault(checkpoint.root / "FL2V", None, "folder_missing")
    assert "FL2VA, Ref2VA" in fault.fix


def test_missing_folder_of_a_missing_folder(tmp_path: Path) -> None:
    assert "does not exist either" in the_fault(tmp_path / "a" / "b", None, "folder_missing").fix


def test_file_instead_of_a_folder(checkpoint) -> None:
    path = checkpoint.fl2va / "model_index.json"
    assert str(checkpoint.fl2va) in the_fault(path, None, "folder_missing").fix


@pytest.mark.parametrize("below", ["transformer", "tokenizer"])
def test_one_level_too_deep(checkpoint, below: str) -> None:
    fault = the_fault(checkpoint.fl2va / below, None, "folder_too_deep")
    assert fault.fix == f"Use {checkpoint.fl2va}"


def test_one_level_too_high(checkpoint) -> None:
    (checkpoint.root / "model_index.json").unlink()
    shutil.rmtree(checkpoint.root / "Ref2VA")
    assert the_fault(checkpoint.root, None, "folder_too_high").fix == f"Use {checkpoint.fl2va}"


def test_nested_one_folder_too_deep(checkpoint) -> None:
    outer = checkpoint.root.parent
    fault = the_fault(outer, "t2va", "folder_too_high")
    assert fault.fix == f"Use {checkpoint.root}"


def test_too_high_picks_the_partition_of_the_task(checkpoint) -> None:
    (checkpoint.root / "model_index.json").unlink()
    fault = the_fault(checkpoint.root, "ref2va", "folder_too_high")
    assert fault.fix == f"Use {checkpoint.root / 'Ref2VA'}"


def test_root_with_one_partition_only(checkpoint) -> None:
    shutil.rmtree(checkpoint.root / "Ref2VA")
    assert the_fault(checkpoint.root, None, "folder_too_high").fix == f"Use {checkpoint.fl2va}"
    assert take_inventory(checkpoint.root, "t2va").faults == ()


def test_no_checkpoint_anywhere(tmp_path: Path) -> None:
    assert "vllm-h3 synth" in the_fault(tmp_path, None, "no_checkpoint").fix


@pytest.mark.parametrize("marker", ["fastvideo_inference.json", "modular_model_index.json"])
def test_fasth3_v2_is_refused_by_name_with_what_works(tmp_path: Path, marker: str) -> None:
    (tmp_path / marker).write_text("{}", encoding="utf-8")
    (tmp_path / "model_index.json").write_text('{"_class_name": "MiniMaxH3ModularPipeline"}', encoding="utf-8")
    fault = the_fault(tmp_path, None, "fasth3_v2")
    assert "FastH3 V2" in fault.why and "exact" in fault.why
    assert "spark-fasth3" in fault.fix and "spark-turbo" in fault.fix


def test_index_of_another_model(checkpoint) -> None:
    path = checkpoint.fl2va / "model_index.json"
    checkpoint.edit_json(path, lambda value: value.update(_class_name="FluxPipeline"))
    assert "'FluxPipeline'" in the_fault(checkpoint.fl2va, None, "other_model").why


def test_index_that_names_no_partition(checkpoint) -> None:
    checkpoint.edit_json(checkpoint.fl2va / "model_index.json", lambda value: value.pop("_minimax_h3"))
    the_fault(checkpoint.fl2va, None, "model_index_malformed")


def test_index_of_the_other_partition(checkpoint) -> None:
    path = checkpoint.fl2va / "model_index.json"
    checkpoint.edit_json(path, lambda value: value["_minimax_h3"].update(partition="ref2va"))
    assert "called FL2VA" in the_fault(checkpoint.root, "t2va", "model_index_malformed").why


def test_partition_under_a_name_that_the_host_does_not_know(checkpoint) -> None:
    path = checkpoint.root / "weights"
    checkpoint.fl2va.rename(path)
    assert f"mv {path} {checkpoint.fl2va}" in the_fault(path, None, "folder_name").fix


def test_ref2va_asked_of_the_fl2va_folder(checkpoint) -> None:
    fault = the_fault(checkpoint.fl2va, "ref2va", "wrong_partition")
    assert fault.fix == f"Give the other folder: {checkpoint.root / 'Ref2VA'}"


@pytest.mark.parametrize("where", ["root", "folder"])
def test_ref2va_asked_of_an_fl2va_only_checkpoint(checkpoint, where: str) -> None:
    shutil.rmtree(checkpoint.root / "Ref2VA")
    path = checkpoint.root if where == "root" else checkpoint.fl2va
    fault = the_fault(path, "ref2va", "wrong_partition")
    assert "Download the Ref2VA partition" in fault.fix and "t2va, fl2va" in fault.fix


def test_combined_asked_of_one_folder(checkpoint) -> None:
    assert str(checkpoint.root) in the_fault(checkpoint.fl2va, "combined", "wrong_partition").fix


def test_root_with_both_partitions_needs_a_task(checkpoint) -> None:
    fault = the_fault(checkpoint.root, None, "task_needed")
    assert "t2va, fl2va, ref2va, combined" in fault.fix


@pytest.mark.parametrize(
    ("task", "partitions"),
    [
        ("t2va", ["FL2VA"]),
        ("fl2va", ["FL2VA"]),
        ("ref2va", ["Ref2VA"]),
        ("combined", ["FL2VA", "Ref2VA"]),
        (ANY_TASK, ["FL2VA", "Ref2VA"]),
    ],
)
def test_task_chooses_the_partitions_of_a_root(checkpoint, task: str, partitions: list[str]) -> None:
    inventory = take_inventory(checkpoint.root, task)
    assert inventory.faults == ()
    assert [partition.name for partition in inventory.partitions] == partitions


def test_unknown_task_is_refused(checkpoint) -> None:
    with pytest.raises(UsageError, match=r"i2va.*t2va, fl2va, ref2va, combined"):
        take_inventory(checkpoint.root, "i2va")
