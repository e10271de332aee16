# SPDX-License-Identifier: Apache-2.0
"""A recipe with the vision tower in FP32, through the real server: what is resident, and a clip from a picture."""

from __future__ import annotations

from pathlib import Path

from tests.server.conftest import Servers, request
from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.checkpoint.layout import linear_layers
from vllm_h3_plugin.memory.weights import predict_resident, shapes_of
from vllm_h3_plugin.quantization.plan import plan
from vllm_h3_plugin.quantization.recipe import load_recipe
from vllm_h3_plugin.video.verdict import Expectation
from vllm_h3_plugin.video.verify import verify


def test_a_picture_is_seen_in_fp32_and_becomes_a_clip(
    own_servers: Servers, fl2va: Path, pictures: tuple[Path, Path], tmp_path: Path
) -> None:
    running = own_servers.start(fl2va, recipe="fp8-vision-fp32")
    worker = running.info["workers"][0]
    assert worker["layers"]["text_encoder"] == {"fp32": 12, "fp8_channel": 4}
    shapes = shapes_of(take_inventory(fl2va, None))
    precision = plan(load_recipe("fp8-vision-fp32"), linear_layers(shapes.dit, shapes.text))
    assert worker["memory"]["parts"]["vision"] == predict_resident(shapes, precision).parts["vision"]
    clip = running.make(request(pictures[0]), tmp_path / "clip.mp4")
    verify(clip, Expectation(width=256, height=256, frames=96)).raise_if_failed()
