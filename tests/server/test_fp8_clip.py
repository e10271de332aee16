# SPDX-License-Identifier: Apache-2.0
"""The default path: FP8 recipe, one process, through the real server to a verified clip."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import HANGS_S, MOST_STEPS, Running, request
from vllm_h3_plugin import __version__
from vllm_h3_plugin.errors import ServerError
from vllm_h3_plugin.kit.answers import ask_server
from vllm_h3_plugin.kit.status import State, Status, judge
from vllm_h3_plugin.serving.client import VideoRequest, Watch
from vllm_h3_plugin.video.verdict import Expectation
from vllm_h3_plugin.video.verify import verify


def test_prompt_becomes_a_verified_clip_with_sound(fp8: Running, tmp_path: Path) -> None:
    clip = fp8.make(request(), tmp_path / "t2va.mp4")
    verdict = verify(clip, Expectation(width=64, height=64, frames=96))
    verdict.raise_if_failed()
    assert verdict.facts is not None
    assert (verdict.facts.frames, verdict.facts.sample_rate, verdict.facts.channels) == (107, 32000, 2)


def test_first_frame_becomes_a_verified_clip(fp8: Running, tmp_path: Path, pictures: tuple[Path, Path]) -> None:
    clip = fp8.make(request(pictures[0]), tmp_path / "fl2va.mp4")
    verify(clip, Expectation(width=256, height=256, frames=96)).raise_if_failed()


def test_same_seed_gives_the_same_bytes_and_another_seed_does_not(fp8: Running, tmp_path: Path) -> None:
    first = fp8.make(request(seed=5), tmp_path / "a.mp4").read_bytes()
    assert fp8.make(request(seed=5), tmp_path / "b.mp4").read_bytes() == first
    assert fp8.make(request(seed=6), tmp_path / "c.mp4").read_bytes() != first


def test_info_tells_plugin_recipe_backend_and_layers(fp8: Running) -> None:
    info = httpx.get(f"{fp8.url}/v1/h3/info").json()
    worker = info["workers"][0]
    assert info["plugin"] == __version__
    assert (worker["recipe"], worker["backend"]) == ("fp8", "reference")
    assert worker["attention"] == "PrefixSDPABackend"
    # 2 blocks and 1 refiner block of 4 linears; condition_proj in BF16; six in FP32; AdaLN is a table and no layer.
    assert worker["layers"]["transformer"]["fp32"] == 6
    assert worker["layers"]["transformer"]["fp8_channel"] >= 12
    assert worker["layers"]["transformer"]["bf16"] == 1 and worker["adaln"] == "table"
    assert worker["layers"]["text_encoder"]["fp8_channel"] == 4


def test_progress_passes_through_the_phases_and_counts_steps(fp8: Running, tmp_path: Path) -> None:
    looks: list[Watch] = []
    # Looks are a quarter of a second apart.
    fp8.client.make(request(steps=MOST_STEPS), tmp_path / "long.mp4", looks.append)
    steps = [look.step for look in looks if look.phase == "denoising"]
    assert steps and steps == sorted(steps) and max(steps) <= MOST_STEPS
    assert {look.steps for look in looks if look.phase == "denoising"} == {MOST_STEPS}


def test_status_follows_a_real_server_through_a_job(fp8: Running, tmp_path: Path) -> None:
    looks: list[Status] = []
    with httpx.Client(base_url=fp8.url, timeout=30) as http:

        def look() -> Status:
            return judge(ask_server(http), (), (), now=time.time())

        fp8.client.make(request(steps=MOST_STEPS), tmp_path / "s.mp4", lambda _: looks.append(look()))
        after = look()
    busy = [seen for seen in looks if seen.state is State.BUSY]
    steps = [seen.as_dict() for seen in busy if seen.answers.progress.get("seconds_per_step")]
    assert steps and "s a step" in next(seen.detail for seen in busy if seen.answers.progress.get("seconds_per_step"))
    assert all(seen["seconds_left"] >= 0 and seen["progress"]["busy_since"] for seen in steps)
    assert all(seen["jobs"][0]["id"] and seen["waiting"] == 0 for seen in steps)
    assert after.state is State.READY and after.answers.jobs == ()
    assert 0 < (looks[0].uptime_s or 0) < (after.uptime_s or 0)


def test_status_sees_a_caller_who_waits_for_the_clip_itself(fp8: Running) -> None:
    asked = request(seed=8, steps=MOST_STEPS)
    with httpx.Client(base_url=fp8.url, timeout=HANGS_S) as http, ThreadPoolExecutor() as pool:
        answer = pool.submit(httpx.post, f"{fp8.url}/v1/videos/sync", data=asked.form(), timeout=HANGS_S)
        seen = []
        while not answer.done():
            seen.append(ask_server(http))
        assert answer.result().status_code == 200
        # What is waited for is a job, and is not counted twice, but for a look at the moment in which it becomes one.
        assert 1 in {len(one.jobs) for one in seen}
        assert sum(len(one.jobs) + one.in_flight > 1 for one in seen) <= 1
        assert all(one.busy for one in seen if one.jobs)
        assert ask_server(http).in_flight == 0


def test_a_refused_request_tells_the_servers_reason_and_saves_nothing(fp8: Running, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="refused to create a video"):
        fp8.client.make(VideoRequest("", 64, 64, 96, 2, 1), tmp_path / "no.mp4")
    assert not (tmp_path / "no.mp4").exists()
