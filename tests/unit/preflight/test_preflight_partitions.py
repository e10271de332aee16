# SPDX-License-Identifier: Apache-2.0
"""A root without a task: both partitions where they fit, FL2VA alone where they do not, said with the numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_h3_plugin.checkpoint.synthetic import SynthSpec, tiny_dit, write_checkpoint
from vllm_h3_plugin.cli import serve
from vllm_h3_plugin.errors import CheckpointError
from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.preflight.facts import Gpu
from vllm_h3_plugin.preflight.partitions import GIB, choose_partitions, room_of, with_partitions
from vllm_h3_plugin.serving.profile import Profile, load_profile

DISCRETE = (Gpu(0, "NVIDIA H200", "580", "9.0", 141 * GIB, 140 * GIB),)
UNIFIED = (Gpu(0, "NVIDIA GB10", "580", "12.1", None, None),)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("partitions") / "H3"
    write_checkpoint(folder, SynthSpec(partition="both", dit=tiny_dit(layers=1)))
    return folder


@pytest.fixture
def never() -> Callable[[], tuple[Gpu, ...]]:
    def ask() -> tuple[Gpu, ...]:
        raise AssertionError("the devices were asked for")

    return ask


def profile(root: Path | None, **update: object) -> Profile:
    return load_profile("spark").model_copy(update={"checkpoint": root, **update})


@pytest.mark.parametrize(("gib", "task", "said"), [(64, "combined", "both are served"), (5, "fl2va", "FL2VA alone is")])
def test_both_are_served_where_they_fit(root: Path, gib: int, task: str, said: str) -> None:
    decided, reason = with_partitions(profile(root), lambda: UNIFIED, gib * GIB, 6)
    assert decided.task == task
    assert reason is not None and said in reason and f"there are {gib}.0" in reason


def test_a_floor_counts(root: Path) -> None:
    assert choose_partitions(root, "fp8", 64 * GIB, 6).task == "combined"
    assert choose_partitions(root, "fp8", 64 * GIB, 62).task == "fl2va"


def test_nothing_is_decided_where_somebody_has(root: Path, never: Callable[[], tuple[Gpu, ...]]) -> None:
    for asked in (profile(root, task="ref2va"), profile(root / "FL2VA"), profile(None)):
        assert with_partitions(asked, never, GIB, 6) == (asked, None)


def test_room_is_the_device_s_own_or_the_machine_s(never: Callable[[], tuple[Gpu, ...]]) -> None:
    assert room_of(profile(None), lambda: DISCRETE, 512 * GIB) == 141 * GIB
    assert room_of(profile(None), lambda: UNIFIED, 119 * GIB) == 119 * GIB
    assert room_of(profile(None), lambda: Unknown("no nvidia-smi"), 64 * GIB) == 64 * GIB
    assert room_of(load_profile("ascend-1"), never, 512 * GIB) == 64 * GIB
    assert room_of(load_profile("reference"), never, 24 * GIB) == 24 * GIB


def test_a_broken_partition_is_named(root: Path, tmp_path: Path) -> None:
    broken = tmp_path / "H3"
    write_checkpoint(broken, SynthSpec(partition="both", dit=tiny_dit(layers=1)))
    (broken / "Ref2VA" / "transformer" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="Ref2VA"):
        with_partitions(profile(broken), lambda: UNIFIED, 64 * GIB, 6)


def test_serve_tells_what_it_decided(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decided = serve.decide_partitions(profile(root, reference=True))
    said = " ".join(capsys.readouterr().err.split())
    assert decided.task in ("combined", "fl2va")
    assert "holds both partitions and" in said
