# SPDX-License-Identifier: Apache-2.0
"""Tiles in batches on a CUDA device: near the host's one by one, within the prediction, and past a real lack of memory.

Layers of the released width, few of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_h3_plugin.checkpoint.synthetic import VitVae
from vllm_h3_plugin.memory.activations import predict_peak
from vllm_h3_plugin.memory.requests import RequestSize
from vllm_h3_plugin.memory.weights import ModelShapes
from vllm_h3_plugin.pins import installed_host

SIZE = RequestSize(1344, 768, 39)
TILES = 28
VAE = VitVae(layers=3, channels=(32,) * 6, blocks=1)
MOST_LEVELS, LEAST_DB = 2, 50.0
"""Of bytes of a frame. Another batch size may mean another kernel, which adds in another order in FP16."""


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    from vllm_h3_plugin.host.register import register
    from vllm_h3_plugin.host.standalone import single_rank

    register()
    with single_rank() as device:
        yield device


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vllm_h3_plugin.host.bench.checkpoint import write_video_vae

    folder = tmp_path_factory.mktemp("vae") / "video_vae"
    write_video_vae(folder, VAE)
    return folder


@pytest.fixture(scope="module")
def found(device: torch.device, folder: Path) -> Any:
    from vllm_h3_plugin.host.bench.decode import Options, measure

    return measure(Options(folder, SIZE, (None, 5), rounds=1), device)


def test_the_hosts_operators_have_plain_torchs_bits_on_this_device(device: torch.device) -> None:
    """Otherwise the decoder's blocks compute more slowly than they could: look at what the probe says."""
    from vllm_h3_plugin.host.decoder_operators import operators_on

    assert all(tried.ok for tried in operators_on(device).probes), operators_on(device).probes


def test_batches_are_near_the_hosts_way_on_seams_as_elsewhere(found: Any) -> None:
    assert found.steps == "the host's operators, given by the plugin"
    _, auto, five = found.columns
    assert not auto.note and not five.note
    assert (auto.decoded["batch"], five.decoded["batch"]) == (TILES, 5)
    for column in (auto, five):
        apart = column.apart
        assert apart.worst <= MOST_LEVELS and (apart.psnr is None or apart.psnr >= LEAST_DB)
        assert apart.seams <= 1.5 * apart.elsewhere + 0.01


def test_a_batch_takes_no_more_than_is_predicted(found: Any) -> None:
    streaming = installed_host().vllm_omni != "0.28.0"
    for column in found.columns[1:]:
        peak = predict_peak(ModelShapes(), SIZE, streaming_decode=streaming, decode_batch=column.decoded["batch"])
        predicted = next(phase for phase in peak.phases if phase.name == "decode").device_bytes
        assert column.peak_bytes <= predicted, column.name


@contextmanager
def only(nbytes: int, device: torch.device) -> Iterator[None]:
    """Leave so many bytes of the device to this process, which is named by its index: torch takes no other here."""
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    share = (torch.cuda.memory_reserved(device) + nbytes) / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, index)


@torch.inference_mode()
def test_a_real_lack_of_memory_makes_smaller_batches_and_the_same_clip(device: torch.device, folder: Path) -> None:
    from vllm_h3_plugin.host.bench.apart import compare
    from vllm_h3_plugin.host.bench.decode import build
    from vllm_h3_plugin.host.tiles import TileBatches

    vae = build(folder, device)
    numbers = torch.Generator().manual_seed(0)
    z = torch.randn(1, 24, 7, 48, 84, generator=numbers, dtype=torch.float32).to(device)

    def decoded() -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            frames = vae.decode_latent(z)
        return (frames if frames.dtype is torch.uint8 else (frames * 255).round().to(torch.uint8))[0].cpu()

    want = decoded()
    tiles = TileBatches(vae, most=None, room=lambda: 1 << 40, streaming=True)
    try:
        tiles.begin(z)
        # A third of what 28 tiles take, beside the clip itself.
        with only((28 * 140 << 20) // 3 + (2 << 30), device):
            got = decoded()
        told = tiles.told()
    finally:
        tiles.remove()
    assert told is not None and told["reduced"] >= 1 and 1 <= told["batch"] < TILES
    assert compare(want, got, torch.zeros(768, 1344, dtype=torch.bool)).worst <= MOST_LEVELS
