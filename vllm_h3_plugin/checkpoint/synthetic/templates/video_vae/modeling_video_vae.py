# SPDX-License-Identifier: Apache-2.0
"""Video VAE of a synthetic MiniMax-H3 checkpoint: a linear codec with the real VAE's geometry and interface.

A latent cell covers 16x16 pixels. Its 24 channels are eight low DCT frequencies of each of red, green and blue, so an
encoded picture comes back as a blurred copy of itself. Latent frames cover 1, 4, 4, 4, 4, 1, 4, ... video frames, as
in the real VAE. A disc that goes round once in two seconds is drawn over the picture: it shows on any contact sheet
that time runs, and in which direction.
"""

import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

# Imported so that the host finds the module beside this one (vLLM-Omni: `_native_parallel_state`).
from .parallel import get_parallel_state  # noqa: F401

PATCH = 16
FRAMES_PER_LATENT = (1, 4, 4, 4, 4)
FREQUENCIES = 8
DISC_PERIOD = 48  # frames: two seconds at 24 fps


class _Processor:
    """Maps decoded values in [-1, 1] to the unit interval."""

    def revert_tensor(self, x):
        return (x.float() * 0.5 + 0.5).clamp(0, 1)


class _Codec(nn.Module):
    """The eight DCT basis pictures as a buffer ``[8, 16, 16]`` that is stored in the checkpoint."""

    def __init__(self):
        super().__init__()
        self.basis = nn.Parameter(torch.zeros(FREQUENCIES, PATCH, PATCH), requires_grad=False)


def _frames(steps):
    """Frames of the first latent steps."""
    return sum(FRAMES_PER_LATENT[step % len(FRAMES_PER_LATENT)] for step in range(steps))


class _Model(nn.Module):
    vae_ratio = PATCH
    # How the real VAE decodes a clip in pieces (vllm_omni/diffusion/models/minimax_h3/temporal_chunks.py).
    use_3d_conv = True
    tokens_chunk_size = 5
    token_overlap = 2
    token_drop = 3
    vae_ratio_t = 4
    frame_pre_padding = 3
    frame_overlap = 5
    isolated_first_frame = False
    isolated_last_frame = False

    def __init__(self):
        super().__init__()
        self.parallel_tiling = False
        self.processor = _Processor()
        self.encoder = _Codec()
        self.quant_conv = nn.Identity()
        self.post_quant_conv = nn.Identity()
        self.decoder = _Codec()

    def split_tiles(self, size, is_decoder):
        """One tile, whatever the size."""
        return [(0, int(size))], 0, int(size)

    def decode_base(self, z):
        """Latents ``[B, 24, T, h, w]`` -> frames ``[B, 3, F, 16h, 16w]`` in [-1, 1]."""
        return self._decode(z, first=0)

    def _decode_temporal_output_frame_plan(self, z, z_head, z_tail, num_chunks, pad_tokens):
        """Called before the first piece: (frames that come out, frames of them that are padding, frames to keep)."""
        self._piece = 0
        total, padding = _frames(z.shape[2]), _frames(z.shape[2]) - _frames(z.shape[2] - pad_tokens)
        return total, padding, total - padding

    def _adaptive_decode(self, z):
        """One piece: five latent steps and the two after them, each 4 frames long, in which the first ones of a step
        that stands for a single frame mean nothing."""
        frames = self._decode(z, first=self._piece * _frames(self.tokens_chunk_size))
        self._piece += 1
        pieces = []
        for step in range(0, z.shape[2], self.tokens_chunk_size):
            start, end = _frames(step), _frames(min(step + self.tokens_chunk_size, z.shape[2]))
            pieces += [
                frames[:, :, start : start + 1].repeat(1, 1, self.frame_pre_padding, 1, 1),
                frames[:, :, start:end],
            ]
        return torch.cat(pieces, dim=2)

    def blend(self, earlier, later, count, dim):
        """What two pieces have in common comes out the same of both."""
        return later

    def _decode(self, z, first):
        batch, _, steps, rows, columns = z.shape
        basis = self.decoder.basis.to(z.dtype)
        z = z.reshape(batch, 3, FREQUENCIES, steps, rows, columns).permute(0, 3, 1, 2, 4, 5)
        detail = torch.einsum("btckhw,kyx->btchywx", z[:, :, :, 1:], basis[1:])
        detail = detail.reshape(batch * steps, 3, rows * PATCH, columns * PATCH)
        # The mean of each cell is interpolated between cells, so that noise looks like clouds and not like tiles.
        mean = z[:, :, :, 0].reshape(batch * steps, 3, rows, columns) * basis[0, 0, 0]
        mean = functional.interpolate(mean, scale_factor=PATCH, mode="bilinear", align_corners=False)
        pictures = (mean + detail).view(batch, steps, 3, rows * PATCH, columns * PATCH)
        frames = pictures.new_empty(batch, 3, _frames(steps), rows * PATCH, columns * PATCH)
        number = 0
        for step in range(steps):
            count = FRAMES_PER_LATENT[step % len(FRAMES_PER_LATENT)]
            before, now = pictures[:, max(step - 1, 0)], pictures[:, step]
            for k in range(1, count + 1):
                frames[:, :, number] = torch.lerp(before, now, k / count)
                self._draw_disc(frames[:, :, number], first + number)
                number += 1
        return frames.clamp_(-1, 1)

    def _draw_disc(self, picture, frame):
        height, width = picture.shape[-2:]
        size = min(height, width)
        angle, radius = 2 * math.pi * frame / DISC_PERIOD, 0.1 * size
        x = width / 2 + 0.32 * size * math.cos(angle)
        y = height / 2 + 0.32 * size * math.sin(angle)
        top, left, side = int(y - radius) - 2, int(x - radius) - 2, int(2 * radius) + 5
        box = picture[..., max(top, 0) : top + side, max(left, 0) : left + side]
        ys = torch.arange(box.shape[-2], device=box.device, dtype=torch.float32)[:, None] + (max(top, 0) + 0.5 - y)
        xs = torch.arange(box.shape[-1], device=box.device, dtype=torch.float32)[None, :] + (max(left, 0) + 0.5 - x)
        inside = torch.sigmoid((radius - torch.sqrt(ys * ys + xs * xs)) * 2)
        box.lerp_(torch.full_like(box, 0.9), inside.to(box.dtype).expand_as(box))

    def _encode(self, x):
        """Frames ``[3, T, H, W]`` in [-1, 1] -> latents ``[24, T, H/16, W/16]``."""
        _, steps, height, width = x.shape
        cells = x.reshape(3, steps, height // PATCH, PATCH, width // PATCH, PATCH)
        z = torch.einsum("cthywx,kyx->ckthw", cells, self.encoder.basis.to(x.dtype))
        return z.reshape(3 * FREQUENCIES, steps, height // PATCH, width // PATCH)

    def _pixels(self, frames):
        values = torch.from_numpy(np.array(frames)).to(self.encoder.basis)
        return (values / 127.5 - 1).permute(3, 0, 1, 2)

    def encode_images(self, image, use_fp16_latent=True):
        """A PIL image -> ``[latents [24, 1, h, w]]``."""
        z = self._encode(self._pixels(np.asarray(image.convert("RGB"))[None]))
        return [z.half() if use_fp16_latent else z]

    def encode_videos(self, frames, use_fp16_latent=True):
        """Frames ``[T, H, W, 3]`` of bytes -> ``[latents [24, T', h, w]]``: the first frame of each latent step."""
        starts, frame, step = [], 0, 0
        while frame < len(frames):
            starts.append(frame)
            frame += FRAMES_PER_LATENT[step % len(FRAMES_PER_LATENT)]
            step += 1
        z = self._encode(self._pixels(np.stack([np.asarray(frames[i]) for i in starts])))
        return [z.half() if use_fp16_latent else z]


class SyntheticH3VideoVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = _Model()

    @classmethod
    def from_pretrained(cls, path):
        result = cls()
        result.load_state_dict(load_file(str(Path(path) / "diffusion_pytorch_model.safetensors")))
        return result
