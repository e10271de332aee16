# SPDX-License-Identifier: Apache-2.0
"""Two real servers of one checkpoint behind a real nginx: jobs are shared out, and an id leads to its server."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.nginx import balancer
from tests.server.conftest import BUSY, HANGS_S, Servers, request
from vllm_h3_plugin.serving.client import VideoRequest

pytestmark = pytest.mark.programs("nginx")


@pytest.fixture
def both(own_servers: Servers, fl2va: Path) -> Iterator[httpx.Client]:
    """A client of the balancer before servers ``a`` and ``b``."""
    profiles = [own_servers.profile(fl2va, recipe="bf16") for _ in range(2)]
    launched = [
        own_servers.launch(profile, H3_REPLICA=name, H3_MAX_QUEUE="1")
        for profile, name in zip(profiles, "ab", strict=True)
    ]
    for server in launched:
        own_servers.ready(server)
    with tempfile.TemporaryDirectory(prefix="h3-nginx-") as folder:
        first, second = (profile.port for profile in profiles)
        with balancer(Path(folder), first, second) as url, httpx.Client(base_url=url, timeout=180) as client:
            yield client


def test_two_servers_behind_one_address(both: httpx.Client) -> None:
    def post(asked: VideoRequest, path: str = "/v1/videos", **headers: str) -> httpx.Response:
        return both.post(path, data=asked.form(), headers=headers)

    # While one is busy the other gets the next, and then each has one more in its line.
    jobs = [post(BUSY).json()["id"] for _ in range(4)]
    assert [job.split("_")[2] for job in jobs] == ["a", "b", "a", "b"]
    full = post(BUSY)
    assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full") and full.headers["retry-after"]

    for job in jobs:
        assert both.get(f"/v1/videos/{job}").json()["id"] == job
    for name in "ab":
        listed = {entry["id"] for entry in both.get("/v1/videos", params={"replica": name}).json()["data"]}
        assert listed == {job for job in jobs if f"_{name}_" in job}
    with both.stream("GET", f"/v1/videos/{jobs[1]}/events") as events:
        first = next(line for line in events.iter_lines() if line.startswith("data: "))
        assert json.loads(first.removeprefix("data: "))["id"] == jobs[1]

    for job in reversed(jobs):
        assert both.delete(f"/v1/videos/{job}").json()["deleted"] is True
    until = time.monotonic() + HANGS_S
    while any(both.get("/v1/h3/info", params={"replica": name}).json()["queue"]["running"] for name in "ab"):
        assert time.monotonic() < until
        time.sleep(0.05)

    made = post(request(), "/v1/videos/sync")
    assert made.status_code == 200 and made.headers["content-type"] == "video/mp4"
    name = made.headers["x-request-id"]
    assert name.startswith("video_gen_a_")
    assert both.get(f"/v1/videos/{name}/content").content == made.content

    key = {"Idempotency-Key": "one-of-two"}
    ids = {post(request(), "/v1/videos/sync", **key).headers["x-request-id"] for _ in range(2)}
    found = both.get("/v1/videos", params={"idempotency_key": "one-of-two"}).json()["data"]
    assert {entry["id"] for entry in found} == ids

    wrong = post(request(), **{"X-H3-Max-Queue": "-1"})
    assert wrong.status_code == 400 and "X-H3-Max-Queue" in wrong.text
