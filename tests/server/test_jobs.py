# SPDX-License-Identifier: Apache-2.0
"""Jobs in a real server: progress, cancel, a line with an end, and what a kill leaves. One storage folder for all."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import BUSY, HANGS_S, MOST_STEPS, PATIENCE, READY_S, Servers, caller_who_leaves, request
from vllm_h3_plugin.pins import HostPin
from vllm_h3_plugin.serving.client import VideoClient, VideoRequest
from vllm_h3_plugin.serving.profile import Profile
from vllm_h3_plugin.serving.server import Server

LONG = request(steps=MOST_STEPS, seed=5)
"""For what is to be made in the end."""
MAX_QUEUE = 1
SOON = 25


class Jobs:
    """A server with a storage folder that outlives it."""

    def __init__(self, servers: Servers, profile: Profile, storage: Path) -> None:
        self._servers = servers
        self._profile = profile
        self._storage = storage
        self.start()

    def start(self) -> None:
        """Start a server on what the one before left."""
        self.server: Server = self._servers.launch(
            self._profile, VLLM_OMNI_SERVER_STORAGE__PATH=str(self._storage), H3_MAX_QUEUE=str(MAX_QUEUE)
        )
        self.server.wait_ready(READY_S)
        self.http = httpx.Client(base_url=self.server.command.url, timeout=120)
        self.client = VideoClient(self.server.command.url, limits=PATIENCE)

    def stop(self) -> None:
        """Close the connections."""
        self.http.close()
        self.client.close()

    def post(self, asked: VideoRequest, path: str = "/v1/videos", **options: Any) -> httpx.Response:
        """Send a request as the form that clients send."""
        return self.http.post(path, data=asked.form(), **options)

    def job(self, job_id: str) -> dict[str, Any]:
        """A job as it is now."""
        answer = self.http.get(f"/v1/videos/{job_id}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def until(self, job_id: str, wanted: Any, seconds: float = HANGS_S) -> dict[str, Any]:
        """The job once ``wanted(job)`` holds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            job = self.job(job_id)
            if wanted(job):
                return job
            time.sleep(0.02)
        raise AssertionError(f"waited in vain, the job is {job}")

    def running(self, asked: VideoRequest = BUSY) -> dict[str, Any]:
        """A new job that has made two steps."""
        created = self.post(asked)
        assert created.status_code == 200, created.text
        return self.until(created.json()["id"], _denoises)

    def newest(self, **wanted: Any) -> dict[str, Any] | None:
        """The job that was asked for last, if there is any."""
        listed = self.http.get("/v1/videos", params={"limit": 1, **wanted}).json()["data"]
        return listed[0] if listed else None

    def new_one(self, before: dict[str, Any] | None, **wanted: Any) -> dict[str, Any]:
        """The job that has come since ``before`` was the newest, once it has made two steps."""
        deadline = time.monotonic() + HANGS_S
        while (job := self.newest(**wanted)) is None or (before and job["id"] == before["id"]):
            assert time.monotonic() < deadline, "no job has come"
            time.sleep(0.02)
        return self.until(job["id"], _denoises)

    def steps_at_the_end(self, job_id: str) -> int:
        """Denoise steps that the worker had made of a job when it was done with it."""
        deadline = time.monotonic() + HANGS_S
        path = Path(self.server.command.environment["H3_RUN_DIR"]) / "ledger.json"
        while time.monotonic() < deadline:
            ledger = json.loads(path.read_text()) if path.exists() else {"request": ""}
            if ledger["request"].startswith(job_id):
                return len(ledger["steps_s"])
            time.sleep(0.02)
        raise AssertionError(f"the worker is not done with {job_id}")


def _denoises(job: dict[str, Any]) -> bool:
    assert job["status"] in ("queued", "in_progress"), f"it ended before it was looked at: {job}"
    return bool(job["phase"] == "denoising" and job["step"] >= 2)


@pytest.fixture(scope="module")
def jobs(servers: Servers, fl2va: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """FP8 in one process."""
    running = Jobs(servers, servers.profile(fl2va, recipe="fp8"), tmp_path_factory.mktemp("storage"))
    yield running
    running.stop()


def test_a_job_tells_its_phase_and_moves_on_until_its_clip(jobs: Jobs, host_pin: HostPin) -> None:
    created = jobs.post(LONG)
    assert created.status_code == 200
    seen: list[dict[str, Any]] = []
    with jobs.http.stream("GET", f"/v1/videos/{created.json()['id']}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        seen.extend(json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
    percents = [event["progress"] for event in seen]
    assert percents == sorted(percents)
    assert (seen[-1]["status"], percents[-1]) == ("completed", 100)
    assert any(0 < percent < 100 for percent in percents)
    assert any(event["phase"] == "denoising" and event["seconds_left"] for event in seen)
    ledger = seen[-1]["ledger"]
    assert len(ledger["steps_s"]) in (MOST_STEPS - 1, MOST_STEPS)
    # 0.28 decodes all frames before it encodes the first.
    decoding = "decoding" if host_pin.vllm_omni == "0.28.0" else "decoding and encoding"
    assert {"encoding text", "denoising", decoding, "encoding video"} <= set(ledger["phases"])
    assert ledger["tokens"] > 0
    assert 0 <= ledger["encode_s"] <= ledger["run_s"]


def test_delete_stops_a_running_job_within_a_step_and_the_next_clip_is_right(jobs: Jobs, tmp_path: Path) -> None:
    jobs.client.make(request(), tmp_path / "before.mp4")
    job = jobs.running()
    deleted = jobs.http.delete(f"/v1/videos/{job['id']}")
    assert deleted.json() == {"id": job["id"], "object": "video.deleted", "deleted": True}
    # A few go by until the worker is told, on a machine that has other work.
    assert jobs.steps_at_the_end(job["id"]) <= job["step"] + SOON
    assert jobs.http.get(f"/v1/videos/{job['id']}").status_code == 404
    jobs.client.make(request(), tmp_path / "after.mp4")
    assert (tmp_path / "after.mp4").read_bytes() == (tmp_path / "before.mp4").read_bytes()


def test_the_line_has_an_end_and_says_when_to_ask_again(jobs: Jobs) -> None:
    running = jobs.running()
    waiting = jobs.post(BUSY).json()
    assert (waiting["status"], waiting["queue_position"]) == ("queued", 1)
    refused = jobs.post(BUSY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    ready = jobs.http.get("/ready")
    assert (ready.status_code, ready.json()["queue"]["length"]) == (503, 1)
    metrics = jobs.http.get("/metrics").text
    assert "h3_queue_length 1.0" in metrics
    for job in (waiting, running):
        assert jobs.http.delete(f"/v1/videos/{job['id']}").status_code == 200
    jobs.steps_at_the_end(running["id"])
    assert jobs.http.get("/ready").status_code == 200
    assert "h3_job_cancels_total" in jobs.http.get("/metrics").text


def test_a_client_that_leaves_stops_its_job_unless_it_has_a_key(jobs: Jobs) -> None:
    url, before = jobs.server.command.url, jobs.newest()
    with caller_who_leaves(url, BUSY):
        left = jobs.new_one(before)
    assert jobs.until(left["id"], lambda job: job["status"] != "in_progress")["error"]["code"] == "cancelled"
    key = {"Idempotency-Key": "the-same"}
    with caller_who_leaves(url, LONG, **key):
        kept = jobs.new_one(None, idempotency_key="the-same")
    answer = jobs.post(LONG, "/v1/videos/sync", headers=key, timeout=HANGS_S)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "video/mp4"), answer.text
    assert answer.headers["x-request-id"] == kept["id"]


def test_a_server_that_is_told_to_end_answers_whoever_waits_and_then_ends(jobs: Jobs) -> None:
    def sync(asked: VideoRequest) -> httpx.Response:
        return httpx.post(f"{url}/v1/videos/sync", data=asked.form(), timeout=HANGS_S)

    url = jobs.server.command.url
    running = jobs.running()
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.stream("GET", f"{url}/v1/videos/{running['id']}/events", timeout=HANGS_S) as events,
    ):
        lines = events.iter_lines()
        assert next(lines)
        waiting = pool.submit(sync, BUSY)
        deadline = time.monotonic() + HANGS_S
        while jobs.http.get("/ready").json()["queue"]["length"] == 0:
            assert time.monotonic() < deadline and not waiting.done()
            time.sleep(0.02)
        jobs.stop()
        os.kill(jobs.server.pid, signal.SIGTERM)
        answer = waiting.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "interrupted")
        assert "event: end" in list(lines)
    assert jobs.server._process is not None
    assert jobs.server._process.wait(HANGS_S) == 0
    jobs.start()
    assert jobs.job(running["id"])["error"]["code"] == "interrupted"


def test_a_kill_loses_no_finished_clip_and_a_job_that_ran_says_so(jobs: Jobs, tmp_path: Path) -> None:
    done = jobs.client.make(request(), tmp_path / "made.mp4")
    running = jobs.running()
    waiting = jobs.post(BUSY).json()
    os.killpg(jobs.server.pid, signal.SIGKILL)
    jobs.server.stop()
    jobs.stop()
    jobs.start()
    listed = {job["id"]: job for job in jobs.http.get("/v1/videos").json()["data"]}
    assert listed[done["id"]]["status"] == "completed"
    for job in (running, waiting):
        assert (listed[job["id"]]["status"], listed[job["id"]]["error"]["code"]) == ("failed", "interrupted")
    clip = (tmp_path / "made.mp4").read_bytes()
    whole = jobs.http.get(f"/v1/videos/{done['id']}/content")
    assert whole.content == clip
    rest = jobs.http.get(
        f"/v1/videos/{done['id']}/content", headers={"Range": "bytes=1000-", "If-Range": whole.headers["etag"]}
    )
    assert (rest.status_code, rest.content) == (206, clip[1000:])
