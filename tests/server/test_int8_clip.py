# SPDX-License-Identifier: Apache-2.0
"""INT8 in DiT and text encoder, through the real server to a verified clip."""

from __future__ import annotations

from pathlib import Path

from tests.server.conftest import Servers, request
from vllm_h3_plugin.pins import HostPin
from vllm_h3_plugin.video.verdict import Expectation
from vllm_h3_plugin.video.verify import verify


def test_int8_text_serves_a_verified_clip_and_says_what_it_runs(
    own_servers: Servers, fl2va: Path, tmp_path: Path, host_pin: HostPin
) -> None:
    """On the ascend host with the text encoder built beside the DiT's card too, as role map two-resident has it."""
    beside = {"H3_PARTS_ON": "text_encoder=1"} if host_pin.name == "ascend" else {}
    server = own_servers.launch(own_servers.profile(fl2va, recipe="int8-text"), **beside)
    running = own_servers.ready(server)
    assert ("H3 text_encoder: built on cpu" in running.log) == bool(beside)
    assert running.info["workers"][0]["beside"] == ({"text_encoder": "cpu"} if beside else {})
    worker = running.info["workers"][0]
    assert (worker["recipe"], worker["backend"]) == ("int8-text", "reference")
    assert "INT8" in worker["backend_reason"] and worker["step"]["fused"] is True
    layers = worker["layers"]
    # As in fp8: 2 blocks and 1 refiner block of 4 linears, condition_proj in BF16, six in FP32, AdaLN a table.
    assert layers["transformer"] == {"fp32": 6, "bf16": 1, "int8": 12}
    assert layers["text_encoder"]["int8"] == 4
    clip = running.make(request(), tmp_path / "int8.mp4")
    verify(clip, Expectation(width=64, height=64, frames=96)).raise_if_failed()
