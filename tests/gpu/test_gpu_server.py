# SPDX-License-Identifier: Apache-2.0
"""The real server on a real GPU, beside the stock host: true width, few layers, to a clip with sound."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import stock_command, wait_stock
from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.checkpoint.layout import DitConfig
from vllm_h3_plugin.checkpoint.synthetic.spec import SynthSpec, true_width_text
from vllm_h3_plugin.checkpoint.synthetic.writer import write_checkpoint
from vllm_h3_plugin.memory.activations import predict_peak
from vllm_h3_plugin.memory.requests import RequestSize
from vllm_h3_plugin.memory.weights import shapes_of
from vllm_h3_plugin.serving.client import VideoClient, VideoRequest
from vllm_h3_plugin.serving.command import server_command
from vllm_h3_plugin.serving.profile import load_profile
from vllm_h3_plugin.serving.server import Server, free_port
from vllm_h3_plugin.video.probe import probe

STEPS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real widths with 4 of 50 blocks and 2 of 50 text layers."""
    spec = SynthSpec(dit=DitConfig(num_layers=4), text=true_width_text(layers=2))
    return write_checkpoint(tmp_path_factory.mktemp("true-width"), spec).partitions[0]


@pytest.fixture(
    scope="module",
    params=["plugin-fp8", "stock-fp8", "plugin-bf16", "stock-bf16"],
)
def running(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server, dict]]:
    kind, _, recipe = request.param.partition("-")
    stock = kind == "stock"
    folder = tmp_path_factory.mktemp(request.param)
    profile = load_profile("h200").with_flags({"checkpoint": checkpoint, "port": free_port(), "recipe": recipe})
    command = server_command(profile, checkpoint, run_dir=folder, environ=os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("H3_CACHE_DIR", str(folder / "cache"))
        # The requests have 4 steps; the table of the default schedule alone would be there at the start.
        patch.setenv("H3_PREPARE_STEPS", str(STEPS))
        with Server(stock_command(command) if stock else command, log=folder / "server.log") as server:
            info = wait_stock(server) if stock else server.wait_ready(300)
            yield request.param, server, info


def _used_mib() -> int:
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())


def test_clip_at_true_width(
    running: tuple[str, Server, dict], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    name, server, info = running
    if info:
        worker = info["workers"][0]
        assert worker["backend"] == ("cutlass_fp8" if "fp8" in name else None)
    loaded = _used_mib()
    asked = VideoRequest("a red kite over a harbour", 768, 448, 124, STEPS, 1)
    seconds = []
    with VideoClient(server.command.url, timeout_s=300) as client:
        for number in range(4):
            started = time.monotonic()
            client.make(asked, tmp_path / f"{number}.mp4")
            seconds.append(round(time.monotonic() - started, 2))
    facts = probe(tmp_path / "3.mp4")
    assert (facts.frames, facts.width, facts.height, facts.sample_rate) == (124, 768, 448, 32000)
    figures = {
        "ready_s": round(server.ready_s or 0, 1),
        "first_request_s": seconds[0],
        "second_request_s": seconds[1],
        "later_request_s": min(seconds[1:]),
        "loaded_mib": loaded,
        "after_request_mib": _used_mib(),
        "attention": info["workers"][0]["attention"] if info else "host's choice",
    }
    print(name, figures)
    record_property(name, figures)


SIZES = ((768, 448, 124), (768, 448, 345), (1344, 768, 124))
"""Width, height, frames."""


def test_the_peak_of_a_request_is_predicted(
    running: tuple[str, Server, dict], checkpoint: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Predicted and measured peak of the device's allocator, over what is resident, for three sizes.

    The synthetic VAE decodes in one piece, so what is compared is the widest phase before it: denoising.
    """
    name, server, info = running
    if name != "plugin-fp8":
        pytest.skip("only the plugin's FP8 server reports what its allocator saw")
    loaded = info["workers"][0]["memory"]
    shapes = shapes_of(take_inventory(checkpoint).require_clean())
    rows = {}
    with VideoClient(server.command.url, timeout_s=300) as client:
        for width, height, frames in SIZES:
            client.make(VideoRequest("a red kite", width, height, frames, 2, 1), tmp_path / f"{width}-{frames}.mp4")
            seen = httpx.get(f"{server.command.url}/v1/h3/info").json()["workers"][0]["memory"]
            peak = predict_peak(shapes, RequestSize(width, height, frames, steps=2), streaming_decode=False)
            rows[f"{width}x{height}, {frames} frames"] = {
                "predicted_mib": {phase.name: round(phase.device_bytes / 2**20) for phase in peak.phases},
                "measured_mib": round((seen["peak_bytes"] - seen["resident_bytes"]) / 2**20),
                "load_peak_over_resident_mib": round((loaded["load_peak_bytes"] - loaded["resident_bytes"]) / 2**20),
            }
            print(rows)
    record_property("request_peaks", rows)
