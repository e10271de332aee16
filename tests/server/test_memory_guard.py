# SPDX-License-Identifier: Apache-2.0
"""The memory guard in a real server, with low memory made up through the reference platform's hook.

One server per executor. Its floors are real settings; what it takes for MemAvailable is in a file.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import BUSY, HANGS_S, PATIENCE, READY_S, Servers, request
from vllm_h3_plugin.errors import BusyError, ServerError
from vllm_h3_plugin.memory.system import AVAILABLE_HOOK, GIB
from vllm_h3_plugin.serving.client import VideoClient, VideoRequest
from vllm_h3_plugin.serving.server import Server

KEY = "a-key"
ENVIRONMENT = {
    "H3_MEMORY_GUARD": "on",
    "H3_MEMORY_FLOOR_GIB": "6",
    "H3_MEMORY_HARD_FLOOR_GIB": "3",
    "H3_MEMORY_RETRY_S": "7",
    "VLLM_API_KEY": KEY,
}
PLENTY, LOW, CRITICAL = 100 * GIB, 6 * GIB, 2 * GIB


@dataclass
class Guarded:
    """A server whose guard is on."""

    server: Server
    http: httpx.Client
    client: VideoClient
    run_dir: Path

    def available(self, nbytes: int) -> None:
        """Let the server see this much memory."""
        new = self.run_dir / "new"
        new.write_text(str(nbytes), encoding="ascii")
        new.replace(self.run_dir / AVAILABLE_HOOK)

    @contextmanager
    def falling(self, nbytes: int) -> Iterator[None]:
        """Once the running request has made two steps, let the server see this much memory."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.01):
                progress = json.loads((self.run_dir / "progress.json").read_text())
                if progress["phase"] == "denoising" and progress["step"] >= 2:
                    return self.available(nbytes)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.available(PLENTY)

    def post(self, path: str, asked: VideoRequest, **options: Any) -> httpx.Response:
        """Send a request as the form that clients send."""
        return self.http.post(path, data=asked.form(), **options)

    def guard(self) -> dict[str, Any]:
        """What the server says about its guard."""
        return self.http.get("/v1/h3/info").json()["guard"]


@contextmanager
def guarded_server(servers: Servers, checkpoint: Path, **update: object) -> Iterator[Guarded]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        server = servers.launch(servers.profile(checkpoint, recipe="bf16", **update))
    url, run_dir = server.command.url, Path(server.command.environment["H3_RUN_DIR"])
    guarded = Guarded(
        server,
        httpx.Client(base_url=url, timeout=HANGS_S, headers={"Authorization": f"Bearer {KEY}"}),
        VideoClient(url, limits=PATIENCE, api_key=KEY),
        run_dir,
    )
    guarded.available(PLENTY)
    server.wait_ready(READY_S)
    with guarded.http, guarded.client:
        yield guarded


@pytest.fixture(scope="module")
def uni(servers: Servers, fl2va: Path) -> Iterator[Guarded]:
    """API, engine and worker in one process."""
    with guarded_server(servers, fl2va) as guarded:
        yield guarded


@pytest.fixture(scope="module")
def mp(servers: Servers, fl2va: Path) -> Iterator[Guarded]:
    """The worker in a process of its own."""
    with guarded_server(servers, fl2va, executor="mp") as guarded:
        yield guarded


@pytest.fixture(scope="module", params=["uni", "mp"])
def guarded(request: pytest.FixtureRequest) -> Guarded:
    """Both executors, one after the other."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("path", ["/v1/videos", "/v1/videos/sync"])
def test_request_is_refused_with_numbers_while_memory_is_low(guarded: Guarded, path: str) -> None:
    before = guarded.guard()["refused"]
    guarded.available(LOW)
    try:
        answer = guarded.post(path, request())
        state = guarded.guard()
    finally:
        guarded.available(PLENTY)
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "7"
    error = answer.json()["error"]
    assert (error["code"], error["type"], error["retry_after_s"]) == (503, "insufficient_memory", 7)
    assert error["available_bytes"] == LOW and error["floor_bytes"] == 6 * GIB and error["predicted_bytes"] > 0
    assert "6.0 GiB" in error["message"] and "Ask again in 7 s" in error["message"]
    assert state["refused"] == before + 1 and state["last_reason"] == error["message"]
    assert state["mode"] == "on" and state["available_bytes"] == LOW
    jobs = guarded.http.get("/v1/videos").json()["data"]
    assert all(job["status"] in ("completed", "failed") for job in jobs)


def test_refused_request_is_admitted_once_memory_is_back(uni: Guarded, pictures: Any, tmp_path: Path) -> None:
    asked = request(*pictures)
    uni.available(LOW)
    with pytest.raises(BusyError, match=r"503.*not enough memory"):
        uni.client.make(asked, tmp_path / "no.mp4")
    uni.available(PLENTY)
    uni.client.make(asked, tmp_path / "yes.mp4")
    assert (tmp_path / "yes.mp4").stat().st_size > 1000


def test_request_without_a_key_is_told_that_and_not_that_memory_is_low(uni: Guarded) -> None:
    uni.available(LOW)
    try:
        answer = uni.post("/v1/videos", request(), headers={"Authorization": "Bearer wrong"})
    finally:
        uni.available(PLENTY)
    assert answer.status_code == 401


@pytest.mark.parametrize(
    "body",
    [
        {"data": {"prompt": "x", "size": "abc", "aspect_ratio": "1:1"}},
        {"content": b"no form", "headers": {"Content-Type": "multipart/form-data; boundary=b"}},
        {"content": b"", "headers": {"Content-Type": "multipart/form-data"}},
    ],
    ids=["size", "multipart", "no boundary"],
)
def test_request_that_cannot_be_read_gets_the_hosts_own_answer(uni: Guarded, body: dict[str, Any]) -> None:
    expected = uni.http.post("/v1/videos", **body)
    uni.available(LOW)
    try:
        answer = uni.http.post("/v1/videos", **body)
    finally:
        uni.available(PLENTY)
    assert 400 <= answer.status_code < 500
    assert (answer.status_code, answer.json()) == (expected.status_code, expected.json())


def test_job_is_cancelled_between_steps_and_says_why(guarded: Guarded, tmp_path: Path) -> None:
    guarded.client.make(request(), tmp_path / "before.mp4")
    cancelled = guarded.guard()["cancelled"]
    with guarded.falling(CRITICAL):
        created = guarded.post("/v1/videos", BUSY)
        assert created.status_code == 200
        job = finished(guarded, created.json()["id"])
    assert job["status"] == "failed"
    assert "cancelled: 2.0 GiB of memory were left" in job["error"]["message"]
    assert "H3_MEMORY_HARD_FLOOR_GIB" in job["error"]["message"]
    state = guarded.guard()
    assert state["cancelled"] == cancelled + 1
    assert "cancelled" in state["last_reason"]
    assert guarded.http.get("/health").status_code == 200
    guarded.client.make(request(), tmp_path / "after.mp4")
    assert (tmp_path / "after.mp4").read_bytes() == (tmp_path / "before.mp4").read_bytes()


def test_sync_request_is_cancelled_between_steps_and_says_why(guarded: Guarded) -> None:
    with guarded.falling(CRITICAL):
        answer = guarded.post("/v1/videos/sync", BUSY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "insufficient_memory")
    assert "cancelled: 2.0 GiB of memory were left" in answer.text
    assert guarded.http.get("/health").status_code == 200


def test_a_model_that_cannot_fit_is_refused_before_it_is_built(servers: Servers, fl2va: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("H3_MEMORY_GUARD", "on")
        patch.setenv("H3_MEMORY_FLOOR_GIB", "4000")
        server = servers.launch(servers.profile(fl2va, recipe="bf16"))
    with pytest.raises(ServerError, match=r"does not fit.*4000\.0 GiB.*H3_MEMORY_FLOOR_GIB"):
        server.wait_ready(READY_S)


def finished(guarded: Guarded, job_id: str) -> dict[str, Any]:
    """The job once it has ended; the host answers 500 for one that failed."""
    deadline = time.monotonic() + HANGS_S
    while time.monotonic() < deadline:
        job = guarded.http.get(f"/v1/videos/{job_id}").json()
        if job["status"] in ("completed", "failed"):
            return job
        time.sleep(0.1)
    raise AssertionError(f"job {job_id} did not end")
