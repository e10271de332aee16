# SPDX-License-Identifier: Apache-2.0
"""Many callers at once, and kills at random moments: every good request delivered, every bad one refused, none stuck.

A short form of both runs with the other tests; `make soak` runs the whole, and its figures are kept.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import BUSY, HANGS_S, MOST_STEPS, Running, Servers, request
from tests.server.soak import BAD, ENDED, good, listed, rss, soak, stuck
from vllm_h3_plugin.serving.client import VideoRequest

Record = Callable[[str, object], None]
MOST_GROWTH = 1.05
LONG = request(steps=MOST_STEPS, seed=5, size=128)

Start = Callable[[], Running]


@pytest.fixture(scope="module")
def start(servers: Servers, fl2va: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts a server, FP8 in one process, on the storage and the cache that the one before left."""
    storage, cache = (tmp_path_factory.mktemp(name) for name in ("storage", "cache"))
    profile = servers.profile(fl2va, recipe="fp8")

    def one() -> Running:
        launched = servers.launch(profile, cache=cache, VLLM_OMNI_SERVER_STORAGE__PATH=str(storage))
        return servers.ready(launched)

    return one


@pytest.fixture(scope="module")
def running(start: Start) -> Running:
    """The first server, warm: it has made one of each clip."""
    first = start()
    with httpx.Client(base_url=first.url, timeout=120) as http:
        for seed in (1, 2):
            assert http.post("/v1/videos/sync", data=request(seed=seed).form()).status_code == 200
    return first


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_mixed_requests_are_delivered_refused_or_stopped_and_none_is_stuck(
    running: Running, tmp_path: Path, record_property: Record, count: int
) -> None:
    # What threads and buffers take once stays; what each request takes must come back.
    soak(running, 20, tmp_path, seed=2)
    assert stuck(running.url) == []
    before, began = rss(running.server.pid), time.monotonic()
    tally = soak(running, count, tmp_path)
    left = stuck(running.url)
    seconds, after = time.monotonic() - began, rss(running.server.pid)
    figures = {
        "requests": sum(tally.asked.values()),
        **{f"{kind}, asked": number for kind, number in sorted(tally.asked.items())},
        "good delivered and verified": tally.share("good", "good sync"),
        "bad answered with 4xx": tally.share("bad"),
        "cancelled or abandoned, stopped": tally.share("cancelled", "disconnected"),
        "stuck": len(left),
        "resident before, MiB": round(before / 2**20, 1),
        "resident after, MiB": round(after / 2**20, 1),
        "seconds": round(seconds, 1),
    }
    record_property(f"soak {count}", figures)
    assert tally.wrong == [] and left == [], figures
    assert sum(tally.asked.values()) == count
    assert _abandoned(running.url, tally.abandoned) <= {"cancelled"}
    assert after <= MOST_GROWTH * before, figures
    assert httpx.get(f"{running.url}/ready", timeout=60).json()["ready"] is True


@pytest.mark.parametrize(
    ("asked", "times", "most_s"), [(BUSY, 2, 15.0), pytest.param(LONG, 20, 1.0, marks=pytest.mark.soak)]
)
def test_a_cancelled_job_leaves_the_worker_idle_within_a_step_and_a_second(
    running: Running, record_property: Record, asked: VideoRequest, times: int, most_s: float
) -> None:
    """At moments drawn by a seed: encoding text, building a table, denoising. Measured until the worker says idle.

    More seconds where other tests run beside it, which take the cores that looking needs too; the clip is one that a
    fast machine, too, needs longer for.
    """
    rng, waits, steps = random.Random(7), [], []
    with httpx.Client(base_url=running.url, timeout=60) as http:
        for place in range(times):
            job = http.post("/v1/videos", data={**asked.form(), "flow_shift": f"{5 + place}"}).json()["id"]
            _until(http, lambda seen: seen["progress"]["phase"] != "idle")
            time.sleep(rng.uniform(0, 3))
            seen = http.get(f"/v1/videos/{job}").json()
            began = time.monotonic()
            assert http.delete(f"/v1/videos/{job}").status_code == 200
            _until(http, lambda seen: seen["progress"]["phase"] == "idle" and seen["queue"]["running"] is None)
            waits.append(time.monotonic() - began)
            steps.append(seen["seconds_per_step"] or 0.0)
    worst = max(wait - step for wait, step in zip(waits, steps, strict=True))
    record_property(
        f"cancel {times}",
        {"times": times, "longest, s": round(max(waits), 3), "median, s": round(statistics.median(waits), 3),
         "longest step, s": round(max(steps), 3)},
    )  # fmt: skip
    assert worst <= most_s, (waits, steps)


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.soak)])
def test_kills_at_random_moments_lose_no_finished_clip_and_leave_no_job_stuck(
    running: Running, start: Start, record_property: Record, times: int
) -> None:
    """Last in this module: each server is killed while it makes clips, and the next one starts on what it left."""
    rng, lost, open_jobs = random.Random(times), [], []
    submitted: set[str] = set()
    finished: dict[str, str] = {}
    now = running if _answers(running.url) else start()
    for place in range(times):
        with httpx.Client(base_url=now.url, timeout=60) as http:
            mine = {http.post("/v1/videos", data=good(rng).form()).json()["id"] for _ in range(8)}
            submitted |= mine
            bad = http.post("/v1/videos", data={**good(rng).form(), **rng.choice(list(BAD.values()))})
            assert bad.status_code == 400
            until = time.monotonic() + rng.uniform(0, 4)
            while True:
                # Finished is what a caller was told is finished.
                finished |= {job["id"]: job["sha256"] for job in listed(http) if job["status"] == "completed"}
                # A machine that is fast makes all of them sooner, and one that is slow none before the last kill.
                over = time.monotonic() >= until and (finished or place < times - 1)
                if over or len(mine - finished.keys()) <= 2:
                    break
                assert time.monotonic() < until + HANGS_S, "no clip was finished"
                time.sleep(0.05)
        os.killpg(now.server.pid, signal.SIGKILL)
        now.server.stop()
        now = start()
        with httpx.Client(base_url=now.url, timeout=60) as http:
            found = {job["id"]: job for job in listed(http)}
            open_jobs += [f"{place}: {name}" for name, job in found.items() if job["status"] not in ENDED]
            lost += [f"{place}: {name}" for name in submitted - found.keys()]
            lost += [f"{place}: {name}" for name, digest in finished.items() if _digest(http, name) != digest]
            assert {job["error"]["code"] for job in found.values() if job["error"]} <= {"interrupted", "cancelled"}
    record_property(
        f"kills {times}",
        {"kills": times, "jobs": len(submitted), "finished before": len(finished), "lost": len(lost),
         "stuck": len(open_jobs)},
    )  # fmt: skip
    assert (lost, open_jobs) == ([], [])
    assert finished.keys() & submitted, "no kill came after a clip was finished"
    assert len(submitted) > len(finished.keys() & submitted), "no kill came while a clip was being made"


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def _digest(http: httpx.Client, job_id: str) -> str | None:
    answer = http.get(f"/v1/videos/{job_id}/content")
    return sha256(answer.content).hexdigest() if answer.status_code == 200 else None


def _abandoned(url: str, marks: list[str]) -> set[str]:
    """What became of requests whose callers left: codes of their errors, or their status."""
    with httpx.Client(base_url=url, timeout=60) as http:
        left = [job for job in listed(http) if job["prompt"] in marks]
    return {job["error"]["code"] if job["error"] else job["status"] for job in left}


def _until(http: httpx.Client, wanted: Callable[[dict[str, Any]], bool]) -> None:
    deadline = time.monotonic() + HANGS_S
    while not wanted(seen := http.get("/v1/h3/info").json()):
        assert time.monotonic() < deadline, seen["progress"]
        time.sleep(0.01)
