# SPDX-License-Identifier: Apache-2.0
"""A job that is stopped while other processes work on it: one worker beside the server, and two."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.server.conftest import Servers, request
from tests.server.test_jobs import SOON, Jobs


@pytest.mark.parametrize("devices", [1, 2])
def test_every_rank_stops_and_the_next_clip_is_right(
    own_servers: Servers, fl2va: Path, tmp_path: Path, devices: int
) -> None:
    profile = own_servers.profile(fl2va, recipe="fp8", executor="mp", devices=devices)
    jobs = Jobs(own_servers, profile, tmp_path / "storage")
    assert len(jobs.http.get("/v1/h3/info").json()["workers"]) == devices
    jobs.client.make(request(), tmp_path / "before.mp4")
    job = jobs.running()
    assert jobs.http.delete(f"/v1/videos/{job['id']}").status_code == 200
    assert jobs.steps_at_the_end(job["id"]) <= job["step"] + SOON
    jobs.client.make(request(), tmp_path / "after.mp4")
    assert (tmp_path / "after.mp4").read_bytes() == (tmp_path / "before.mp4").read_bytes()
    jobs.stop()


def test_a_server_whose_worker_died_says_so_and_ends(own_servers: Servers, fl2va: Path, tmp_path: Path) -> None:
    jobs = Jobs(own_servers, own_servers.profile(fl2va, recipe="fp8", executor="mp"), tmp_path / "storage")
    job = jobs.running()
    os.kill(jobs.http.get("/v1/h3/info").json()["workers"][0]["pid"], signal.SIGKILL)
    assert jobs.server.wait() != 0
    log = "\n".join(jobs.server._tail)
    assert "event=unhealthy" in log and "the worker is gone" in log
    jobs.stop()
    jobs.start()
    assert jobs.job(job["id"])["error"]["code"] in ("engine_dead", "interrupted")
    jobs.stop()
