# SPDX-License-Identifier: Apache-2.0
"""Phase, percent and seconds left; when a worker counts as stuck; how a job's states follow each other."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_h3_plugin.serving.jobs.job import Job, Status
from vllm_h3_plugin.serving.jobs.liveness import stuck
from vllm_h3_plugin.serving.jobs.progress import Progress, look

JOB = Job("video_gen_1", "h3", "a kite", 100.0, "me", 60.0).moved(Status.IN_PROGRESS, 101.0)


def worker(phase: str = "denoising", **changes: Any) -> dict[str, Any]:
    state = {"request": "video_gen_1-abc", "phase": phase, "step": 0, "steps": None, "time": 110.0, "busy_since": 101.0}
    return {**state, **changes}


def test_seconds_left_come_from_the_steps_that_were_measured() -> None:
    seen = look(JOB, worker(step=10, steps=50, seconds_per_step=2.0), 111.0, tail_s=5.0)
    assert (seen.phase, seen.step, seen.steps) == ("denoising", 10, 50)
    # 40 steps of 2 s, one second of which is over, and what follows them.
    assert seen.seconds_left == 84.0
    assert look(JOB, worker(steps=50), 111.0).seconds_left is None


@pytest.mark.parametrize(
    "state", [worker(request="video_gen_2-abc", step=40, steps=50), None, worker("idle", request=None)]
)
def test_another_request_of_the_worker_says_nothing_about_this_job(state: dict[str, Any] | None) -> None:
    assert look(JOB, state, 111.0) == Progress("starting")


def test_percent_never_falls_and_ends_at_100() -> None:
    states = [
        worker("encoding text"),
        worker("denoising", steps=4),
        worker("building table", step=9, steps=10),
        worker("denoising", step=1, steps=4),
        worker("denoising", step=4, steps=4),
        worker("decoding"),
        worker("idle"),
    ]
    seen: Progress | None = None
    percents, phases = [], []
    for state in states:
        seen = look(JOB, state, 111.0, before=seen)
        percents.append(seen.percent)
        phases.append(seen.phase)
    percents.append(look(JOB.moved(Status.COMPLETED, 120.0), None, 121.0, before=seen).percent)
    assert percents == sorted(percents) and percents[-1] == 100
    assert phases[-1] == "encoding video"


def test_a_step_that_takes_many_times_its_length_is_stuck_and_an_idle_worker_is_not() -> None:
    state = worker(step=3, steps=50, seconds_per_step=30.0)
    options = {"factor": 20.0, "phase_s": 3600.0}
    assert stuck(state, 599, **options) is None
    assert stuck(state, 661, **options) == ("step 4 of 50 has not moved for 661 s, 22 times what a step takes here")
    assert stuck(worker("idle", busy_since=None), 1e9, **options) is None
    assert stuck(None, 1e9, **options) is None


def test_a_fast_step_has_two_minutes_and_an_unmeasured_phase_as_long_as_a_job() -> None:
    fast = worker(step=3, steps=50, seconds_per_step=0.1)
    assert stuck(fast, 119, factor=20.0, phase_s=3600.0) is None
    assert stuck(fast, 121, factor=20.0, phase_s=3600.0)
    first = worker(step=0, steps=50)
    assert stuck(first, 3599, factor=20.0, phase_s=3600.0) is None
    assert stuck(first, 3601, factor=20.0, phase_s=3600.0) == "denoising has not moved for 3601 s"


def test_an_ended_job_does_not_begin_again() -> None:
    done = JOB.moved(Status.COMPLETED, 120.0)
    with pytest.raises(ValueError, match="is completed and cannot become in_progress"):
        done.moved(Status.IN_PROGRESS, 121.0)
    assert Job.from_record(done.as_record()) == done
