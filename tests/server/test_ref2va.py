# SPDX-License-Identifier: Apache-2.0
"""Both partitions in one server: which DiT makes a clip follows from its request, and references have an effect."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.server.conftest import Running, Servers, request
from vllm_h3_plugin.cli.main import main
from vllm_h3_plugin.video.verdict import Expectation
from vllm_h3_plugin.video.verify import verify

SIZE, FRAMES = 256, 96
SECONDS = 3


@pytest.fixture(scope="module")
def root(checkpoint_of: Callable[..., Path]) -> Path:
    """The folder that holds both partitions."""
    return checkpoint_of(partition="both").parent


@pytest.fixture(scope="module", params=["combined", "auto"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, root: Path) -> Any:
    """FP8, with both DiTs: asked for by name, and as what the host makes of a root."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        servers = Servers(tmp_path_factory.mktemp("both"), stack)
        yield servers.start(root, recipe="fp8", task=request.param)


@pytest.fixture(scope="module")
def tone() -> bytes:
    """A chord of 3 s, mono, 16 bits."""
    times = np.arange(16000 * SECONDS) / 16000
    data = (8000 * (np.sin(2 * np.pi * 330 * times) + np.sin(2 * np.pi * 495 * times))).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16000)
        sound.writeframes(data.tobytes())
    return file.getvalue()


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


def test_one_server_makes_all_kinds_and_the_request_chooses_the_dit(
    server: Running, pictures: tuple[Path, Path], tone: bytes, tmp_path: Path
) -> None:
    sound = ("audio_reference", ("tone.wav", tone))
    asked: dict[str, tuple[Any, dict[str, str]]] = {
        "prompt": ((), {"task": "t2va"}),
        "first": ((picture(pictures[0], "input_reference"),), {"task": "fl2va"}),
        "image": ((picture(pictures[0]),), {"task": "ref2va"}),
        "other image": ((picture(pictures[1]),), {"task": "ref2va"}),
        "sound": ((sound,), {"task": "ref2va"}),
        "mixed": ((picture(pictures[0]), picture(pictures[1]), sound), {"task": "ref2va"}),
    }
    clips = {}
    for name, (files, fields) in asked.items():
        made(server, tmp_path / "clip.mp4", *files, **fields)
        clips[name] = (tmp_path / "clip.mp4").read_bytes()
    assert len(set(clips.values())) == len(asked), "a reference had no effect"
    made(server, tmp_path / "again.mp4", *asked["mixed"][0], task="ref2va")
    assert (tmp_path / "again.mp4").read_bytes() == clips["mixed"], "what was made between left something behind"


def test_the_task_follows_from_the_references(server: Running, pictures: tuple[Path, Path], tone: bytes) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        told = {}
        for name, files in {
            "prompt": (),
            "first": (picture(pictures[0], "input_reference"),),
            "sound": (("audio_reference", ("tone.wav", tone)),),
        }.items():
            form = request(steps=2, size=SIZE, frames=FRAMES).form()
            job = http.post("/v1/videos", data=form, files=list(files) or None).json()
            told[name] = job["h3"]["task"] if "h3" in job else job["task"]
            http.delete(f"/v1/videos/{job['id']}")
    assert told == {"prompt": "t2va", "first": "fl2va", "sound": "ref2va"}


def test_both_dits_are_loaded_quantized_and_as_large_as_predicted(
    server: Running, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = server.info["workers"][0]
    assert set(worker["supported_tasks"]) == {"t2va", "fl2va", "ref2va"}
    assert worker["layers"]["transformer"] == worker["layers"]["transformers_ref"]
    import json

    with pytest.raises(SystemExit) as caught:
        main(["memory", str(root), "--recipe", "fp8", "--task", "combined", "--json"])
    assert caught.value.code == 0
    predicted = json.loads(capsys.readouterr().out.splitlines()[-1])["resident"]["parts"]
    measured = worker["memory"]["parts"]
    for part in ("dit", "refiner", "transformer_ref"):
        assert predicted[part] == pytest.approx(measured[part], rel=0.02), part
