# SPDX-License-Identifier: Apache-2.0
"""The two VAEs of a synthetic checkpoint: small linear codecs with the real interface, as remote code.

They are not random: what they decode has to look and sound like something. Their code lies in ``templates/`` as plain
Python files and is copied; their weights are the codecs' basis functions. Instead of the video codec there can be the
released VAE's network with random weights (:mod:`.vit_vae`), which takes the time and memory that the real one takes.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_h3_plugin.checkpoint.configs import AUDIO_CHANNELS, VIDEO_CHANNELS
from vllm_h3_plugin.checkpoint.layout import TensorSpec
from vllm_h3_plugin.checkpoint.synthetic.plan import TensorPlan
from vllm_h3_plugin.checkpoint.synthetic.shards import Progress, header
from vllm_h3_plugin.checkpoint.synthetic.vit_vae import VitVae

_TEMPLATES = Path(__file__).parent / "templates"
_WEIGHTS = "diffusion_pytorch_model.safetensors"

_PATCH = 16
# (vertical, horizontal) frequency of each latent channel of a colour; the first is the mean.
_FREQUENCIES = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (1, 2), (2, 1))
# Standard deviations of a latent that make unit noise decode to a picture of good contrast and little grain.
_VIDEO_STD = (5.0, 0.6, 0.6, 0.3, 0.3, 0.3, 0.15, 0.15)

_HOP = 800
# Peak of one overtone for a latent of 1; 32 random ones add up to a level of about 0.2.
_OVERTONE_LEVEL = 0.05


def _video_basis() -> NDArray[np.float32]:
    """Orthonormal 16x16 DCT-II pictures, ``[8, 16, 16]``."""
    place = (np.arange(_PATCH) + 0.5) * math.pi / _PATCH
    waves = [np.cos(k * place) * math.sqrt((1 if k == 0 else 2) / _PATCH) for k in range(3)]
    return np.stack([np.outer(waves[v], waves[h]) for v, h in _FREQUENCIES]).astype(np.float32)


def _overtones() -> NDArray[np.float32]:
    """Sines of 1 to 32 times 40 Hz over one latent step at 32 kHz, ``[32, 800]``; each starts and ends at zero."""
    phase = 2 * math.pi * np.arange(_HOP) / _HOP
    return np.stack([np.sin((k + 1) * phase) for k in range(AUDIO_CHANNELS)]).astype(np.float32)


def video_vae_tensors() -> dict[str, NDArray[np.float32]]:
    """Weights of ``SyntheticH3VideoVAE``."""
    return {"model.encoder.basis": _video_basis(), "model.decoder.basis": _video_basis()}


def audio_vae_tensors() -> dict[str, NDArray[np.float32]]:
    """Weights of ``SyntheticH3AudioVAE``: analysis is synthesis divided by the overtones' energy."""
    waves = _overtones() * np.float32(_OVERTONE_LEVEL)
    analysis = waves / np.float32(_OVERTONE_LEVEL**2 * _HOP / 2)
    return {
        "model.encoder.weight": analysis[:, None, :],
        "model.mean_proj.weight": np.eye(AUDIO_CHANNELS, dtype=np.float32)[:, :, None],
        "model.decoder.weight": waves[:, None, :],
    }


def _write_code(folder: Path, config: dict[str, object], template: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in sorted((_TEMPLATES / template).glob("*.py")):
        shutil.copyfile(file, folder / file.name)


def _write(folder: Path, config: dict[str, object], tensors: dict[str, NDArray[np.float32]]) -> None:
    _write_code(folder, config, folder.name)
    specs = [TensorSpec(name, tuple(value.shape), "F32") for name, value in tensors.items()]
    with (folder / _WEIGHTS).open("wb") as file:
        file.write(header(specs))
        for value in tensors.values():
            file.write(np.ascontiguousarray(value, "<f4").tobytes())


def write_vit_vae(
    folder: Path,
    vae: VitVae,
    plans: Sequence[TensorPlan] | None = None,
    *,
    seed: int = 0,
    progress: Progress = lambda written: None,
) -> None:
    """Write a video VAE with the released one's network and random weights, a few MB in memory at a time.

    Args:
        plans: where its values come from; None: every value is drawn.
        progress: called with the number of bytes just written.
    """
    _write_code(folder, vae.config(), "vit_video_vae")
    plans = vae.plans("video_vae") if plans is None else plans
    with (folder / _WEIGHTS).open("wb") as file:
        file.write(header([plan.spec for plan in plans]))
        for plan in plans:
            for block in plan.data(seed):
                file.write(block)
                progress(len(block))


def write_vaes(
    root: Path, vit: VitVae | None = None, *, seed: int = 0, progress: Progress = lambda written: None
) -> None:
    """Write ``video_vae/`` and ``audio_vae/`` below ``root``.

    Args:
        vit: what the video VAE is; None: the codec.
        progress: called with bytes of ``vit`` just written.
    """
    video = {
        "model_type": "synthetic_h3_video_vae",
        "auto_map": {"AutoModel": "modeling_video_vae.SyntheticH3VideoVAE"},
        "latent_channels": VIDEO_CHANNELS,
        "latents_mean": [0.0] * VIDEO_CHANNELS,
        "latents_std": list(_VIDEO_STD) * 3,
    }
    audio = {
        "model_type": "synthetic_h3_audio_vae",
        "auto_map": {"AutoModel": "modeling_audio_vae.SyntheticH3AudioVAE"},
        "latent_channels": AUDIO_CHANNELS,
        "latents_mean": [0.0] * AUDIO_CHANNELS,
        "latents_std": [1.0] * AUDIO_CHANNELS,
        "sample_rate": 32000,
    }
    if vit is None:
        _write(root / "video_vae", video, video_vae_tensors())
    else:
        write_vit_vae(root / "video_vae", vit, seed=seed, progress=progress)
    _write(root / "audio_vae", audio, audio_vae_tensors())
