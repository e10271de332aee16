# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own package, at the version that the host's lock pins, against a real server. Nothing is adapted for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.clients.conftest import KEY, Keyed
from tests.server.conftest import BUSY, HANGS_S, MOST_STEPS, caller_who_leaves
from vllm_h3_plugin.serving.client import authorization
from vllm_h3_plugin.video.verdict import Expectation
from vllm_h3_plugin.video.verify import verify

# The package marks its video calls as deprecated, since OpenAI's own service behind them has ended.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SMALL = {"num_inference_steps": "3", "seed": "1"}
# Long enough, at this size, for whatever a test does while it is made.
LONG, LONG_SIZE = {"num_inference_steps": str(MOST_STEPS), "seed": "5"}, "256x256"


def until(reached: Callable[[], bool]) -> None:
    """Wait for it."""
    deadline = time.monotonic() + HANGS_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def client(keyed: Keyed) -> Iterator[Any]:
    """As its users make it."""
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_create_poll_list_download_and_delete(client: Any, tmp_path: Path) -> None:
    video = client.videos.create_and_poll(
        prompt="a red kite", size="64x64", seconds="4", extra_body=SMALL, poll_interval_ms=200
    )
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    assert (video.size, video.seconds) == ("64x64", "4.45833")
    assert [job.id for job in client.videos.list(limit=1)] == [video.id]
    assert client.videos.retrieve(video.id).completed_at == video.completed_at
    clip = tmp_path / "clip.mp4"
    client.videos.download_content(video.id).write_to_file(clip)
    verify(clip, Expectation(width=64, height=64, frames=96)).raise_if_failed()
    with client.videos.with_streaming_response.download_content(video.id) as answer:
        assert b"".join(answer.iter_bytes()) == clip.read_bytes()
    deleted = client.videos.delete(video.id)
    assert (deleted.id, deleted.deleted) == (video.id, True)
    with pytest.raises(openai.NotFoundError, match=video.id):
        client.videos.retrieve(video.id)
    assert list(client.videos.list()) == []


def test_a_list_of_several_pages_is_walked(client: Any) -> None:
    made = [client.videos.create(prompt=str(n), size=LONG_SIZE, seconds="4", extra_body=LONG).id for n in range(3)]
    assert [job.id for job in client.videos.list(limit=2)] == made[::-1]
    assert [job.id for job in client.videos.list(limit=2, order="asc")] == made


def test_a_size_of_openai_is_snapped_and_says_so(client: Any) -> None:
    # It waits behind another, because a step of this size would take this machine half a minute.
    client.videos.create(prompt="first", size=LONG_SIZE, seconds="4", extra_body=LONG)
    video = client.videos.create(prompt="a red kite", size="1280x720", seconds="4")
    assert (video.size, video.seconds, video.status) == ("1280x704", "4.45833", "queued")
    assert {snap["field"]: (snap["asked"], snap["made"]) for snap in video.snapped} == {
        "size": ("1280x720", "1280x704"),
        "seconds": (4, 4.4583),
    }
    assert client.videos.retrieve(video.id).snapped == video.snapped


def test_the_ratio_follows_from_the_size(client: Any) -> None:
    """OpenAI has no ``aspect_ratio``, and the host refuses a prompt without one."""
    for size in ("64x64", "96x64", "64x128"):
        video = client.videos.create_and_poll(
            prompt="a kite", size=size, seconds="4", extra_body=SMALL, poll_interval_ms=200
        )
        assert (video.status, video.size, video.error) == ("completed", size, None)


def test_a_first_frame_is_sent_as_input_reference(client: Any, pictures: tuple[Path, Path]) -> None:
    video = client.videos.create_and_poll(
        prompt="the kite dives",
        size="256x256",
        seconds="4",
        input_reference=pictures[0],
        extra_body=SMALL,
        poll_interval_ms=200,
    )
    assert (video.status, video.task, video.error) == ("completed", "fl2va", None)


@pytest.mark.parametrize(
    ("wrong", "field", "way_out"),
    [
        ({"size": "16x16"}, "size", "32x32"),
        ({"size": "wide"}, "size", "1344x768"),
        ({"seconds": "20"}, "seconds", "15"),
        ({"seconds": "long"}, "seconds", "number"),
        ({"prompt": " "}, "prompt", ""),
        ({"extra_body": {"num_inference_stepps": 5}}, "num_inference_stepps", "num_inference_steps"),
        ({"extra_body": {"aspect_ratio": "5:1"}}, "aspect_ratio", "21:9"),
        ({"input_reference": b"no picture"}, "input_reference", "text"),
    ],
)
def test_what_cannot_be_made_is_refused_at_create(client: Any, wrong: dict, field: str, way_out: str) -> None:
    asked = {"prompt": "a red kite", "size": "64x64", "seconds": "4", **wrong}
    with pytest.raises(openai.BadRequestError) as refused:
        client.videos.create(**asked)
    assert refused.value.param == field
    assert way_out in str(refused.value)
    assert list(client.videos.list()) == []


def test_a_failed_job_is_an_answer_and_no_exception(client: Any, keyed: Keyed) -> None:
    # Who asks for the clip as the answer, and leaves, has cancelled it.
    with caller_who_leaves(keyed.url, BUSY, **authorization(KEY)):
        until(lambda: [job.status for job in client.videos.list()] == ["in_progress"])
    (job,) = client.videos.list()
    video = client.videos.poll(job.id, poll_interval_ms=200)
    assert (video.status, video.error.code) == ("failed", "cancelled")
    answer = client.videos.with_raw_response.retrieve(job.id)
    assert (answer.status_code, json.loads(answer.text)["status"]) == (200, "failed")
    with pytest.raises(openai.UnprocessableEntityError, match="cancelled"):
        client.videos.download_content(job.id)


def test_a_running_job_is_stopped_by_delete(client: Any, keyed: Keyed) -> None:
    video = client.videos.create(prompt="a kite", size=LONG_SIZE, seconds="4", extra_body=LONG)
    until(lambda: client.videos.retrieve(video.id).progress >= 6)
    assert client.videos.retrieve(video.id).status == "in_progress"
    assert client.videos.delete(video.id).deleted
    until(lambda: keyed.http.get("/v1/h3/info").json()["queue"]["running"] is None)


@pytest.mark.parametrize("key", ["wrong", KEY[:-1], f"{KEY}x"])
def test_another_key_is_an_authentication_error(keyed: Keyed, key: str) -> None:
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=key, max_retries=0) as stranger:
        for call in (
            lambda: stranger.videos.create(prompt="a kite"),
            lambda: stranger.videos.list(),
            lambda: stranger.videos.retrieve("video_gen_0"),
            lambda: stranger.videos.download_content("video_gen_0"),
            lambda: stranger.videos.delete("video_gen_0"),
        ):
            with pytest.raises(openai.AuthenticationError):
                call()
