# SPDX-License-Identifier: Apache-2.0
"""Both partitions in one server: which DiT makes a clip follows from its request, and references have an effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import Running, Servers, request
from vllm_h3_plugin.cli.main import main
from vllm_h3_plugin.preflight.partitions import GIB, with_partitions
from vllm_h3_plugin.serving.profile import Profile, load_profile
from vllm_h3_plugin.video.verdict import Expectation
from vllm_h3_plugin.video.verify import verify

SIZE, FRAMES = 256, 96


@pytest.fixture(scope="module")
def root(checkpoint_of: Callable[..., Path]) -> Path:
    """The folder that holds both partitions."""
    return checkpoint_of(partition="both").parent


@pytest.fixture(scope="module")
def profile(root: Path) -> Profile:
    """The profile `ref2va` as it becomes for a root that nobody named a task for, on a machine of 64 GiB."""
    asked = load_profile("ref2va").model_copy(update={"checkpoint": root, "reference": True})
    return with_partitions(asked, lambda: (), 64 * GIB, 6)[0]


@pytest.fixture(scope="module")
def server(profile: Profile, servers: Servers, root: Path) -> Running:
    """Both DiTs in one process."""
    return servers.start(root, task=profile.task, recipe=profile.recipe)


def made(server: Running, path: Path, *files: tuple[str, tuple[str, bytes]], **fields: str) -> dict[str, Any]:
    """A verified clip at ``path``; returns its job."""
    form = request(steps=2, size=SIZE, frames=FRAMES).form() | fields
    with httpx.Client(base_url=server.url, timeout=300) as http:
        answer = http.post("/v1/videos/sync", data=form, files=list(files) or None)
        assert answer.status_code == 200, answer.text
        job: dict[str, Any] = http.get(f"/v1/videos/{answer.headers['x-request-id']}").json()
    path.write_bytes(answer.content)
    verdict = verify(path, Expectation(SIZE, SIZE, FRAMES))
    assert verdict.ok, verdict
    return job


def picture(path: Path, field: str = "image_reference") -> tuple[str, tuple[str, bytes]]:
    return field, (path.name, path.read_bytes())


def test_a_root_without_a_task_is_served_whole_where_both_fit(profile: Profile, server: Running) -> None:
    assert profile.task == "combined"
    assert set(server.info["workers"][0]["supported_tasks"]) == {"t2va", "fl2va", "ref2va"}


def test_one_server_makes_all_kinds_and_the_request_chooses_the_dit(
    server: Running, pictures: tuple[Path, Path], film: Path, tone: bytes, tmp_path: Path
) -> None:
    sound = ("audio_reference", ("tone.wav", tone))
    moving = ("video_reference", (film.name, film.read_bytes()))
    asked: dict[str, tuple[Any, ...]] = {
        "t2va": (),
        "fl2va": (picture(pictures[0], "input_reference"),),
        "ref2va": (picture(pictures[0]),),
        "ref2va, another picture": (picture(pictures[1]),),
        "ref2va, a sound": (picture(pictures[0]), sound),
        "ref2va, a film": (moving,),
        "ref2va, mixed": (picture(pictures[0]), picture(pictures[1]), moving, sound),
    }
    clips = {}
    for name, files in asked.items():
        task = name.partition(",")[0]
        job = made(server, tmp_path / "clip.mp4", *files, task=task)
        assert job["task"] == task
        clips[name] = (tmp_path / "clip.mp4").read_bytes()
    assert len(set(clips.values())) == len(asked), "a reference had no effect"
    made(server, tmp_path / "again.mp4", *asked["ref2va, mixed"], task="ref2va")
    assert (tmp_path / "again.mp4").read_bytes() == clips["ref2va, mixed"], "what was made between left something"


def test_each_dit_is_the_one_of_its_partition(
    server: Running, servers: Servers, root: Path, profile: Profile, pictures: tuple[Path, Path], tmp_path: Path
) -> None:
    """A clip from references is the one that a server of Ref2VA alone makes, one from text that of FL2VA alone."""
    for folder, files, task in (("Ref2VA", (picture(pictures[0]),), "ref2va"), ("FL2VA", (), "t2va")):
        alone = servers.start(root / folder, recipe=profile.recipe)
        made(alone, tmp_path / "alone.mp4", *files, task=task)
        made(server, tmp_path / "both.mp4", *files, task=task)
        assert (tmp_path / "alone.mp4").read_bytes() == (tmp_path / "both.mp4").read_bytes(), folder
        alone.server.stop(3)


def test_the_task_follows_from_the_references(server: Running, pictures: tuple[Path, Path], tone: bytes) -> None:
    sound = ("audio_reference", ("tone.wav", tone))
    with httpx.Client(base_url=server.url, timeout=60) as http:
        told = {}
        for name, files in {
            "prompt": (),
            "first": (picture(pictures[0], "input_reference"),),
            "sound": (picture(pictures[0]), sound),
        }.items():
            form = request(steps=2, size=SIZE, frames=FRAMES).form()
            job = http.post("/v1/videos", data=form, files=list(files) or None).json()
            told[name] = job["task"]
            http.delete(f"/v1/videos/{job['id']}")
        alone = http.post("/v1/videos", data=request(steps=2).form() | {"task": "ref2va"}, files=[sound])
    assert told == {"prompt": "t2va", "first": "fl2va", "sound": "ref2va"}
    assert alone.status_code == 400 and "at least one picture or film" in alone.json()["error"]["message"]


def test_both_dits_are_loaded_quantized_and_as_large_as_predicted(
    server: Running, profile: Profile, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = server.info["workers"][0]
    assert worker["layers"]["transformer"] == worker["layers"]["transformers_ref"]
    with pytest.raises(SystemExit) as caught:
        main(["memory", str(root), "--recipe", profile.recipe, "--json"])
    assert caught.value.code == 0
    predicted = json.loads(capsys.readouterr().out.splitlines()[-1])["resident"]["parts"]
    measured = worker["memory"]["parts"]
    for part in ("dit", "refiner", "transformer_ref"):
        assert predicted[part] == pytest.approx(measured[part], rel=0.02), part
