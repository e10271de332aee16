# SPDX-License-Identifier: Apache-2.0
"""What the memory guard decides, on made-up machines."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from vllm_h3_plugin.errors import BusyError, SettingsError
from vllm_h3_plugin.memory.guard import Admit, Mark, Refuse, Thresholds, cancelled, check_start, decide, mark
from vllm_h3_plugin.memory.system import GIB, Holder, MemorySystem
from vllm_h3_plugin.settings import load

FLOORS = Thresholds(6 * GIB, 3 * GIB, 30)
SERVER = Holder(4711, "vllm", 57 * GIB)


def machine(available: Callable[[], int], *, total: int = 119 * GIB) -> MemorySystem:
    return MemorySystem(True, "MemAvailable", total, available, lambda: (SERVER,))


def test_request_is_admitted_as_long_as_exactly_the_floor_remains() -> None:
    assert decide(16 * GIB, {"denoising": 10 * GIB}, FLOORS) == Admit(10 * GIB, 16 * GIB)
    assert isinstance(decide(16 * GIB - 1, {"denoising": 10 * GIB}, FLOORS), Refuse)


def test_the_largest_phase_counts_and_is_named() -> None:
    verdict = decide(12 * GIB, {"denoising": 4 * GIB, "decoding": 8 * GIB}, FLOORS)
    assert isinstance(verdict, Refuse)
    assert (verdict.phase, verdict.predicted_bytes) == ("decoding", 8 * GIB)


def test_refusal_names_the_numbers_the_setting_and_the_way_out() -> None:
    asked: list[int] = []

    def fits(room: int) -> str:
        asked.append(room)
        return "up to 124 frames at this size fit"

    verdict = decide(9 * GIB, {"denoising": 10 * GIB}, FLOORS, fits=fits)
    assert isinstance(verdict, Refuse)
    error = verdict.error()
    assert asked == [3 * GIB]
    for words in ("10.0 GiB", "9.0 GiB", "6.0 GiB", "H3_MEMORY_FLOOR_GIB", "in 30 s", "up to 124 frames"):
        assert words in str(error)
    assert error.http_status == 503
    assert error.details == {
        "predicted_bytes": 10 * GIB,
        "phase": "denoising",
        "available_bytes": 9 * GIB,
        "floor_bytes": 6 * GIB,
        "retry_after_s": 30,
    }


def test_a_request_that_can_never_fit_is_not_asked_to_come_again() -> None:
    verdict = decide(50 * GIB, {"decode": 500 * GIB}, FLOORS, total=119 * GIB)
    assert isinstance(verdict, Refuse)
    assert verdict.error().details["retry_after_s"] is None
    assert "Ask for a shorter or smaller clip" in str(verdict.error()) and "again" not in str(verdict.error())


def test_room_offered_to_a_smaller_request_is_never_negative() -> None:
    verdict = decide(GIB, {"denoising": GIB}, FLOORS, fits=lambda room: f"room {room}")
    assert isinstance(verdict, Refuse) and verdict.fits == "room 0"


@pytest.mark.parametrize(
    ("available", "expected"),
    [(6 * GIB, Mark.FINE), (6 * GIB - 1, Mark.LOW), (3 * GIB, Mark.LOW), (3 * GIB - 1, Mark.CRITICAL)],
)
def test_marks_stand_at_the_floors(available: int, expected: Mark) -> None:
    assert mark(available, FLOORS) is expected


def test_cancellation_names_what_was_left_and_survives_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(cancelled(2 * GIB, FLOORS)))
    assert isinstance(error, BusyError)
    for words in ("2.0 GiB", "3.0 GiB", "H3_MEMORY_HARD_FLOOR_GIB", "Ask again in 30 s"):
        assert words in str(error)


def test_thresholds_come_from_settings() -> None:
    settings = load({"H3_MEMORY_FLOOR_GIB": "8", "H3_MEMORY_HARD_FLOOR_GIB": "0.5", "H3_MEMORY_RETRY_S": "7"})
    assert Thresholds.from_settings(settings) == Thresholds(8 * GIB, GIB // 2, 7)


def test_a_hard_floor_above_the_floor_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="H3_MEMORY_HARD_FLOOR_GIB=9 is above H3_MEMORY_FLOOR_GIB=6"):
        Thresholds.from_settings(load({"H3_MEMORY_HARD_FLOOR_GIB": "9"}))


def test_start_passes_at_once_when_there_is_room() -> None:
    check_start(55 * GIB, machine(lambda: 61 * GIB), FLOORS, sleep=lambda seconds: pytest.fail("waited"))


def test_start_waits_for_memory_that_comes_back() -> None:
    readings = iter([40 * GIB, 50 * GIB, 100 * GIB])
    said: list[str] = []
    check_start(55 * GIB, machine(lambda: next(readings)), FLOORS, log=said.append, sleep=lambda seconds: None)
    assert len(said) == 1 and "61.0 GiB needed" in said[0] and "MemAvailable is 40.0 GiB" in said[0]


def test_start_is_refused_while_another_process_holds_the_memory() -> None:
    slept: list[float] = []
    with pytest.raises(BusyError) as caught:
        check_start(55 * GIB, machine(lambda: 30 * GIB), FLOORS, wait_s=12, sleep=slept.append)
    assert sum(slept) == 12
    for words in ("61.0 GiB", "55.0 GiB", "30.0 GiB", "vllm (pid 4711, 57.0 GiB)", "H3_MEMORY_GUARD=off", "End what"):
        assert words in str(caught.value)
    assert caught.value.details["holders"] == [{"pid": 4711, "command": "vllm", "held_bytes": 57 * GIB}]


def test_a_model_larger_than_the_machine_is_refused_without_waiting() -> None:
    small = machine(lambda: 60 * GIB, total=60 * GIB)
    with pytest.raises(BusyError, match=r"more than the 60\.0 GiB.*recipe"):
        check_start(55 * GIB, small, FLOORS, sleep=lambda seconds: pytest.fail("waited"))
