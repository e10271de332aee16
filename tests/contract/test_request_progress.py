# SPDX-License-Identifier: Apache-2.0
"""What rank 0 writes about a load and a request: phase, step, what a step takes, since when."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_h3_plugin.host import run_state
from vllm_h3_plugin.host.job_worker import JobWorker
from vllm_h3_plugin.host.progress import Progress


class Clock:
    """Seconds that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Progress:
    monkeypatch.setenv("H3_RUN_DIR", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    return Progress(clock)


def written() -> dict[str, Any]:
    found = run_state.read(run_state.PROGRESS)
    assert found is not None
    return found


def test_each_forward_is_a_step_and_the_first_one_does_not_spoil_the_mean(progress: Progress, clock: Clock) -> None:
    dit = torch.nn.Identity()
    progress.watch(dit)
    progress.phase("denoising", steps=3)
    assert written()["seconds_per_step"] is None
    clock.now = 1020.0
    dit(torch.zeros(1))
    assert (written()["step"], written()["seconds_per_step"]) == (1, 20.0)
    for clock.now in (1028.0, 1036.0):
        dit(torch.zeros(1))
    last = written()
    assert (last["step"], last["steps"], last["seconds_per_step"]) == (3, 3, 8.0)
    assert (last["time"], last["started_at"]) == (1036.0, 1000.0)


def test_a_request_is_busy_since_its_first_phase_until_idle(progress: Progress, clock: Clock) -> None:
    progress.phase("encoding text")
    clock.now = 1005.0
    progress.phase("denoising", steps=3)
    assert (written()["busy_since"], written()["started_at"]) == (1000.0, 1005.0)
    progress.phase("idle")
    assert written()["busy_since"] is None


def test_a_clock_that_is_set_back_changes_no_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H3_RUN_DIR", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    wall, timer = Clock(), Clock()
    progress = Progress(wall, timer)
    progress.begin("video_gen_1-abc")
    progress.phase("denoising", steps=3)
    for wall.now, timer.now in ((1010.0, 1010.0), (500.0, 1018.0), (508.0, 1026.0)):
        progress.step_done()
    assert (written()["seconds_per_step"], written()["time"]) == (8.0, 508.0)
    progress.end()
    ledger = run_state.read("ledger.json")
    assert ledger is not None
    assert (ledger["steps_s"], ledger["phases"]) == ([10.0, 8.0, 8.0], {"denoising": 26.0})


def test_a_folder_that_cannot_be_written_costs_no_request_and_leaves_nothing_that_no_longer_holds(
    progress: Progress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress.begin("video_gen_1-abc")
    progress.phase("denoising", steps=3)

    def full(*arguments: Any, **options: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        progress.step_done()
        assert run_state.read(run_state.PROGRESS) is None
        assert not JobWorker().stop("video_gen_1")
        progress.end()
    progress.phase("encoding text")
    assert written()["phase"] == "encoding text"
    assert JobWorker().stop("video_gen_1")


def test_loading_tells_bytes_and_the_next_phase_forgets_them(progress: Progress) -> None:
    advance = progress.loading("loading transformer")
    advance(30, 100)
    found = written()
    assert (found["step"], found["steps"], found["done_bytes"], found["total_bytes"]) == (3, 10, 30, 100)
    progress.phase("decoding")
    assert written()["total_bytes"] is None and written()["step"] == 0


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H3_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    Progress().phase("denoising", steps=3)
    assert list(tmp_path.iterdir()) == []
