# SPDX-License-Identifier: Apache-2.0
"""The synthetic VAEs load and work through the host's own adapters, and what they decode can be seen and heard."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vllm_h3_plugin.checkpoint.synthetic import write_checkpoint
from vllm_h3_plugin.checkpoint.synthetic.spec import SynthSpec, tiny_dit

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def partition(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("vaes") / "H3", SynthSpec(dit=tiny_dit(layers=1))).partitions[0]


def noise(*shape: int) -> torch.Tensor:
    """FP32 whatever the default dtype, which the host sets to BF16."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


def load(kind: str, folder: Path) -> Any:
    from vllm_omni.diffusion.models.minimax_h3 import vae

    cls = getattr(vae, kind)
    gate = {"trust_remote_code": True} if "trust_remote_code" in inspect.signature(cls).parameters else {}
    return cls(str(folder), device=CPU, load_device=CPU, **gate)


@pytest.fixture(scope="module")
def video_vae(partition: Path) -> Any:
    return load("MiniMaxH3VideoVAE", partition / "video_vae")


@pytest.fixture(scope="module")
def audio_vae(partition: Path) -> Any:
    return load("MiniMaxH3AudioVAE", partition / "audio_vae")


@pytest.fixture(scope="module")
def clip(video_vae) -> torch.Tensor:
    latents = noise(1, 24, 12, 4, 6)
    return video_vae.decode_latent(latents)[0]


def test_latent_steps_become_frames_as_in_the_real_vae(clip: torch.Tensor) -> None:
    """12 latent steps are 2 x 5 + 2: 17 x 2 + 5 frames of 16 x 16 pixels a cell."""
    assert clip.shape == (3, 39, 64, 96)


def test_the_picture_is_neither_black_nor_frozen_nor_flat(clip: torch.Tensor) -> None:
    assert 0.3 < clip.mean() < 0.7 and clip.std() > 0.05
    assert (clip[:, 1:] - clip[:, :-1]).abs().mean(dim=(0, 2, 3)).min() > 0.005


def test_a_bright_disc_goes_round(clip: torch.Tensor) -> None:
    def brightest(frame: int) -> tuple[float, float]:
        bright = (clip[:, frame].min(dim=0).values > 0.93).nonzero().float().mean(dim=0)
        return bright[0].item(), bright[1].item()

    right, below, left, above = (brightest(frame) for frame in (0, 12, 24, 36))
    assert right[1] > 60 and left[1] < 36 and below[0] > 44 and above[0] < 20


def test_an_encoded_picture_comes_back_recognisably(video_vae) -> None:
    """The first frame of a clip that was conditioned on a picture shows the picture."""
    rows, columns = np.mgrid[0:64, 0:96]
    picture = np.stack([rows * 3, columns * 2, 255 - rows * 2], axis=-1).astype(np.uint8)
    packed = video_vae.encode_image(Image.fromarray(picture))
    assert packed.shape == (2 * 3, 96)
    # Undo the 2x2 packing of the latent rows: [h/2 * w/2, 24 * 2 * 2], in the order of the host's patchify.
    from vllm_omni.diffusion.models.minimax_h3.vae import minimax_h3_patchify_video_latent

    probe = torch.arange(24 * 4 * 6, dtype=torch.float32).view(1, 24, 1, 4, 6)
    order = minimax_h3_patchify_video_latent(probe, patch_size=(1, 2, 2)).long().flatten()
    latent = torch.empty(order.numel(), dtype=torch.float32)
    latent[order] = packed.flatten()
    frame = video_vae.decode_latent(latent.view(1, 24, 1, 4, 6))[0, :, 0]
    original = torch.from_numpy(picture).permute(2, 0, 1).float() / 255
    away_from_the_disc = (frame.min(dim=0).values < 0.9).expand_as(frame)
    assert (frame - original)[away_from_the_disc].abs().mean() < 0.05


def test_videos_are_encoded_at_one_latent_step_for_1_4_4_4_4_frames(video_vae) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (22, 32, 32, 3), np.uint8)
    rows, shape = video_vae.encode_video(frames)
    assert shape == (7, 2, 2) and rows.shape == (7, 96)


def test_sound_is_heard_and_comes_back_as_it_was(audio_vae) -> None:
    latents = 0.3 * noise(2, 32, 40)
    wave = audio_vae.decode_latent(latents)
    assert wave.shape == (1, 2, 40 * 800) and wave.std() > 0.01 and wave.abs().max() <= 1
    rows, steps = audio_vae.encode_waveform(wave[0], 32000)
    assert steps == 40
    assert torch.allclose(rows.view(2, 40, 32).transpose(1, 2), latents, atol=0.15)


def test_sound_that_is_no_whole_step_is_padded(audio_vae) -> None:
    _, steps = audio_vae.encode_waveform(torch.zeros(2, 801, dtype=torch.float32), 32000)
    assert steps == 2
