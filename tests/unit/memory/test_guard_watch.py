# SPDX-License-Identifier: Apache-2.0
"""The watch in the worker: what it does to a request as memory falls."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_h3_plugin.errors import BusyError
from vllm_h3_plugin.memory.guard import Thresholds
from vllm_h3_plugin.memory.system import GIB, MemorySystem

pytestmark = pytest.mark.host

FLOORS = Thresholds(6 * GIB, 3 * GIB, 30)


class Machine:
    """A machine whose memory the test sets."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.system = MemorySystem(True, "MemAvailable", 119 * GIB, lambda: self.nbytes, tuple)


def watch_of(machine: Machine, **options: Any) -> Any:
    from vllm_h3_plugin.host.memory_watch import MemoryWatch

    return MemoryWatch(machine.system, FLOORS, **{"sample_s": 0.01, **options})


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[list[Path]]:
    from vllm_h3_plugin.checkpoint import page_cache

    calls: list[list[Path]] = []
    monkeypatch.setattr(page_cache, "drop", lambda files: calls.append(list(files)))
    return calls


def test_request_goes_on_while_memory_lasts(dropped: list[list[Path]]) -> None:
    watch = watch_of(Machine(50 * GIB))
    with watch.request():
        watch.check()
    assert dropped == []


def test_page_cache_of_our_files_is_dropped_once_under_the_floor(dropped: list[list[Path]], tmp_path: Path) -> None:
    machine = Machine(5 * GIB)
    watch = watch_of(machine, files=[tmp_path / "shard"])
    with watch.request():
        for _ in range(3):
            watch.check()
    assert dropped == [[tmp_path / "shard"]]
    with watch.request():
        watch.check()
    assert len(dropped) == 2


def test_request_goes_on_if_the_page_cache_was_what_was_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_h3_plugin.checkpoint import page_cache

    machine = Machine(2 * GIB)
    monkeypatch.setattr(page_cache, "drop", lambda files: setattr(machine, "nbytes", 20 * GIB))
    watch = watch_of(machine)
    with watch.request():
        watch.check()


def test_a_file_that_is_gone_does_not_stop_the_watch(tmp_path: Path) -> None:
    watch = watch_of(Machine(2 * GIB), files=[tmp_path / "gone"])
    with pytest.raises(BusyError), watch.request():
        watch.check()


def test_a_dip_between_two_steps_is_remembered(dropped: list[list[Path]]) -> None:
    machine = Machine(50 * GIB)
    watch = watch_of(machine)
    with pytest.raises(BusyError, match=r"cancelled: 2\.0 GiB"), watch.request():
        machine.nbytes = 2 * GIB
        eventually(lambda: watch._critical is not None)
        machine.nbytes = 50 * GIB
        watch.check()
    with watch.request():  # the next request starts afresh
        watch.check()


def test_check_is_made_before_each_forward_of_the_dit(dropped: list[list[Path]]) -> None:
    machine = Machine(50 * GIB)
    watch = watch_of(machine, sample_s=60)
    dit = torch.nn.Linear(1, 1)
    watch.install(dit)
    dit(torch.zeros(1))
    machine.nbytes = GIB
    with pytest.raises(BusyError):
        dit(torch.zeros(1))


def test_tensors_of_a_cancelled_forward_are_gone_while_its_error_lives(dropped: list[list[Path]]) -> None:
    machine = Machine(GIB)
    watch = watch_of(machine)
    held: list[weakref.ref[torch.Tensor]] = []

    def forward() -> None:
        activations = torch.zeros(8)
        held.append(weakref.ref(activations))
        watch.check()

    with pytest.raises(BusyError) as caught, watch.request():
        forward()
    gc.collect()
    assert held[0]() is None
    assert caught.value is not None


def test_queued_request_is_refused_when_its_turn_comes_and_it_no_longer_fits() -> None:
    watch = watch_of(Machine(12 * GIB))
    watch.require({"denoise": 6 * GIB})
    with pytest.raises(BusyError, match=r"its peak \(denoise\) is predicted at 6\.5 GiB"):
        watch.require({"denoise": 6 * GIB + GIB // 2})


def test_prepared_request_is_held_against_the_memory_from_its_first_step_on() -> None:
    from types import SimpleNamespace

    from vllm_h3_plugin.host.asked import Model
    from vllm_h3_plugin.memory.weights import ModelShapes

    inputs = {"latent_w": 84, "latent_h": 48, "num_frames": 362, "text_embeddings": SimpleNamespace(shape=(100, 5120))}
    model = Model(ModelShapes(), quantized=True, streaming_decode=True, unified=True)
    watch_of(Machine(100 * GIB), forecaster=model).expect(inputs)
    with pytest.raises(BusyError, match="not enough memory for this request"):
        watch_of(Machine(10 * GIB), forecaster=model).expect(inputs)


def test_one_rank_that_must_stop_stops_all_of_them(dropped: list[list[Path]]) -> None:
    asked: list[bool] = []

    def another_rank_says_yes(mine: bool) -> bool:
        asked.append(mine)
        return True

    watch = watch_of(Machine(50 * GIB), agree=another_rank_says_yes)
    with pytest.raises(BusyError):
        watch.check()
    assert asked == [False]


def test_watch_that_is_off_does_nothing() -> None:
    machine = Machine(0)
    watch = watch_of(machine, mode="off")
    dit = torch.nn.Linear(1, 1)
    watch.install(dit)
    watch.check_start(100 * GIB)
    with watch.request():
        watch.check()
        watch.require({"denoise": 100 * GIB})
        dit(torch.zeros(1))
    assert watch._thread is None


def test_state_is_left_for_the_api_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropped: list[list[Path]]
) -> None:
    monkeypatch.setenv("H3_RUN_DIR", str(tmp_path))
    machine = Machine(50 * GIB)
    watch = watch_of(machine, model={"checkpoint": "/x"})
    state = lambda: json.loads((tmp_path / "guard-0.json").read_text())  # noqa: E731
    assert state()["checkpoint"] == "/x" and state()["cancelled"] == 0
    with pytest.raises(BusyError), watch.request():
        machine.nbytes = 20 * GIB
        eventually(lambda: state()["available_bytes"] == 20 * GIB)
        machine.nbytes = GIB
        watch.check()
    assert state()["cancelled"] == 1 and "1.0 GiB" in state()["last_reason"]


def test_allocators_cache_counts_as_room_for_the_next_request() -> None:
    class Caching:
        def allocated(self) -> int:
            return 55 * GIB

        def reserved(self) -> int:
            return 65 * GIB

        def release(self) -> None:
            pass

    watch = watch_of(Machine(7 * GIB), allocator=Caching())
    with watch.request():
        assert watch.reusable() == 10 * GIB
        watch.require({"denoise": 11 * GIB})
