# SPDX-License-Identifier: Apache-2.0
"""Audio VAE of a synthetic MiniMax-H3 checkpoint: 32 overtones of 40 Hz, one for each latent channel.

A latent step is 800 samples at 32 kHz, one period of 40 Hz; the overtones are orthogonal over it, so a sound made of
them comes back as it was. Random latents give a restless chord, never silence.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

CHANNELS = 32
HOP = 800  # 32000 Hz / 40 latents a second


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_proj = False
        self.encoder = nn.Conv1d(1, CHANNELS, HOP, stride=HOP, bias=False)
        self.pre_block = nn.Identity()
        self.mean_proj = nn.Conv1d(CHANNELS, CHANNELS, 1, bias=False)
        self.decoder = nn.ConvTranspose1d(CHANNELS, 1, HOP, stride=HOP, bias=False)

    def preprocess(self, wav, sample_rate):
        """``[B, 1, N]`` -> padded with silence to whole latent steps."""
        return functional.pad(wav, (0, -wav.shape[-1] % HOP))


class SyntheticH3AudioVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = _Model()

    def decode(self, z):
        """Latents ``[B, 32, T]`` -> waveform ``[B, 1, 800 T]`` in [-1, 1]."""
        return torch.tanh(self.model.decoder(z))

    @classmethod
    def from_pretrained(cls, path):
        result = cls()
        result.load_state_dict(load_file(str(Path(path) / "diffusion_pytorch_model.safetensors")))
        return result
