# SPDX-License-Identifier: Apache-2.0
"""The real server on a real GPU: true width, few layers, FP8 through CUTLASS, to a clip with sound."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_h3_plugin.checkpoint.layout import DitConfig
from vllm_h3_plugin.checkpoint.synthetic.spec import SynthSpec, true_width_text
from vllm_h3_plugin.checkpoint.synthetic.writer import write_checkpoint
from vllm_h3_plugin.serving.client import VideoClient, VideoRequest
from vllm_h3_plugin.serving.command import server_command
from vllm_h3_plugin.serving.profile import load_profile
from vllm_h3_plugin.serving.server import Server, free_port
from vllm_h3_plugin.video.probe import probe


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = SynthSpec(dit=DitConfig(num_layers=4), text=true_width_text(layers=2))
    return write_checkpoint(tmp_path_factory.mktemp("true-width"), spec).partitions[0]


@pytest.fixture(scope="module", params=["fp8", "bf16"])
def running(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server, dict]]:
    recipe = request.param
    folder = tmp_path_factory.mktemp(recipe)
    profile = load_profile("h200").with_flags({"checkpoint": checkpoint, "port": free_port(), "recipe": recipe})
    command = server_command(profile, checkpoint, run_dir=folder, environ=os.environ)
    with Server(command, log=folder / "server.log") as server:
        yield recipe, server, server.wait_ready(300)


def test_clip_at_true_width(running: tuple[str, Server, dict], tmp_path: Path) -> None:
    recipe, server, info = running
    worker = info["workers"][0]
    assert worker["backend"] == ("cutlass_fp8" if recipe == "fp8" else None)
    asked = VideoRequest("a red kite over a harbour", 768, 448, 124, 4, 1)
    seconds = []
    with VideoClient(server.command.url, timeout_s=300) as client:
        for number in range(3):
            started = time.monotonic()
            job = client.make(asked, tmp_path / f"{number}.mp4")
            seconds.append(round(time.monotonic() - started, 2))
    facts = probe(tmp_path / "2.mp4")
    assert (facts.frames, facts.width, facts.height, facts.sample_rate) == (124, 768, 448, 32000)
    print(
        json.dumps(
            {
                "recipe": recipe,
                "ready_s": round(server.ready_s or 0, 1),
                "request_s": seconds,
                "peak_memory_mb": job.get("metrics") or job.get("peak_memory_mb"),
                "worker": worker,
            }
        )
    )
