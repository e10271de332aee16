# SPDX-License-Identifier: Apache-2.0
"""Video VAE of a synthetic MiniMax-H3 checkpoint: the network of diffusers behind the interface of the released code.

The network (a CNN encoder, a ViT decoder, tiles, temporal clips and how they are blended) is diffusers' own
`AutoencoderKLMiniMaxH3`. What the host and its plugins call on the released VAE is put on top: `_run_tile_tasks`,
`tiled_decode`, `_adaptive_decode`, `decode_base`, ranks that share the tiles. Weights are random: pictures are noise.
"""

import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3 import AutoencoderKLMiniMaxH3
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from safetensors.torch import load_file
from torch import nn

from .parallel import get_parallel_state

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class _Normalize:
    """`(x - mean) / std` of each colour, as torchvision's class of that name keeps it."""

    def __init__(self, mean, std):
        self.mean, self.std = list(mean), list(std)

    def __call__(self, x):
        mean, std = (torch.tensor(v, dtype=x.dtype, device=x.device).view(3, 1, 1, 1) for v in (self.mean, self.std))
        return (x - mean) / std


class _Processor:
    """Between pictures in [0, 1] and what the network takes and gives."""

    transform = _Normalize(MEAN, STD)
    transform_rev = _Normalize([-m / s for m, s in zip(MEAN, STD, strict=True)], [1 / s for s in STD])

    def revert_tensor(self, x):
        return self.transform_rev(x).clamp(0, 1)


class _Model(AutoencoderKLMiniMaxH3):
    use_3d_conv = True
    isolated_first_frame = False
    isolated_last_frame = False

    def __init__(self, network, tile_size, tile_overlap_min):
        super().__init__(**network)
        self.processor = _Processor()
        self.vae_ratio = self.spatial_compression_ratio
        self.vae_ratio_t = self.temporal_compression_ratio
        self.clip_length, self.token_drop = network["clip_length"], network["token_drop"]
        self.decoder_tiling = True
        self.stack_tiling = False
        self.parallel_tiling = False
        self.tile_size, self.tile_overlap_min = tile_size, tile_overlap_min
        self.enable_tiling(tile_size, tile_size, tile_overlap_min, tile_overlap_min)

    def split_tiles(self, input_len, is_decoder=False):
        """Pixels of a side -> (where tiles begin, how long they are, how far neighbours overlap)."""
        return self._split_tiles(input_len, self.tile_size, self.tile_overlap_min)

    def blend(self, a, b, blend_extent, dim):
        return self._blend(a, b, blend_extent, dim)

    def encode(self, x):
        """One tile of frames -> moments."""
        return self.quant_conv(self.encoder(x))

    def decode(self, z):
        """One tile of latents `[B, 24, T, h, w]` -> frames `[B, 3, 4 T, 16 h, 16 w]`."""
        return self.decoder(self.post_quant_conv(z))

    def _run_tile_tasks(self, tiles, tile_indices, forward_fn, stack_tiling, cls_agg=None):
        return [forward_fn(tiles[index]) for index in tile_indices]

    def tiled_decode(self, z):
        """One temporal clip, tile by tile; with several ranks each decodes some of them."""
        ratio = self.vae_ratio
        tops, heights, down = self.split_tiles(z.shape[-2] * ratio, True)
        lefts, widths, across = self.split_tiles(z.shape[-1] * ratio, True)
        tiles = [
            z[..., top // ratio : (top + height) // ratio, left // ratio : (left + width) // ratio]
            for top, height in zip(tops, heights, strict=True)
            for left, width in zip(lefts, widths, strict=True)
        ]
        state = get_parallel_state() if self.parallel_tiling else {}
        rank, ranks = state.get("sp_rank", 0), state.get("sp_size", 1)
        done = self._run_tile_tasks(tiles, list(range(rank, len(tiles), ranks)), self.decode, self.stack_tiling)
        if ranks > 1:
            done = self._all_gather_tiled_results(done, len(tiles))
        rows = [done[start : start + len(lefts)] for start in range(0, len(done), len(lefts))]
        return self._stitch_tiles(rows, down, across)

    def _all_gather_tiled_results(self, tasks, num_tiles):
        """Every rank's tiles in order; rank r has every r-th."""
        state = get_parallel_state()
        if not tasks:
            raise ValueError(f"no tiles on rank {state['sp_rank']}")
        ranks = state["sp_size"]
        most = -(-num_tiles // ranks)
        mine = torch.stack([*tasks, *[torch.zeros_like(tasks[0])] * (most - len(tasks))])
        theirs = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(theirs, mine, group=state["sp_process_group"])
        return [theirs[index % ranks][index // ranks] for index in range(num_tiles)]

    def _adaptive_decode(self, z):
        return self.tiled_decode(z) if self.decoder_tiling else self.decode(z)

    def _decode_clip(self, z):
        return self._adaptive_decode(z)

    def decode_base(self, z):
        """Latents `[B, 24, T, h, w]` -> frames, normalized."""
        pad = -(z.shape[2] + self.token_drop) % self.tokens_chunk_size
        if pad:
            z = torch.cat([z, z[:, :, -1:].repeat(1, 1, pad, 1, 1)], dim=2)
        chunks = (z.shape[2] + self.token_drop) // self.tokens_chunk_size - 1
        return self._decode_temporal_streaming(z, None, None, chunks, pad, None)

    def _decode_temporal_output_frame_plan(self, z, z_head, z_tail, num_chunks, pad_tokens):
        """(frames that come out, frames of them that are padding, frames to keep)."""
        total = num_chunks * self.clip_length + self.frame_overlap
        before, short = z.shape[2] - pad_tokens, self.clip_length % self.vae_ratio_t
        padding = sum(
            short if short and (before + k) % self.tokens_chunk_size == 0 else self.vae_ratio_t
            for k in range(pad_tokens)
        )
        return total, padding, total - padding

    def _decode_temporal_streaming(self, z, z_head, z_tail, num_chunks, pad_tokens, temporal_cat_dtype):
        keep = self._decode_temporal_output_frame_plan(z, z_head, z_tail, num_chunks, pad_tokens)[2]
        size, cut, parts, overlap = self.tokens_chunk_size, self.tokens_chunk_size * self.vae_ratio_t, [], None
        for start in range(0, num_chunks * size, size):
            clip = self._adaptive_decode(z[:, :, start : start + size + self.token_overlap])
            head, tail = (part[:, :, self.frame_pre_padding :] for part in (clip[:, :, :cut], clip[:, :, cut:]))
            parts.append(head if overlap is None else self.blend(overlap, head, self.frame_overlap, dim=-3))
            overlap = tail
        return torch.cat([*parts, overlap], dim=2)[:, :, :keep]

    def _latents(self, x, use_fp16_latent):
        z = DiagonalGaussianDistribution(self._encode(x.to(self.quant_conv.weight))).sample()[0]
        return [z.half() if use_fp16_latent else z]

    def _pixels(self, frames):
        values = torch.from_numpy(np.array(frames)).to(self.quant_conv.weight)
        return self.processor.transform(values.permute(3, 0, 1, 2) / 255)[None]

    def encode_images(self, image, use_fp16_latent=True):
        """A PIL image -> `[latents [24, 1, h, w]]`, drawn from what the encoder says."""
        return self._latents(self._pixels(np.asarray(image.convert("RGB"))[None]), use_fp16_latent)

    def encode_videos(self, frames, use_fp16_latent=True):
        """Frames `[T, H, W, 3]` of bytes, or `[frames [3, T, H, W]]` normalized -> `[latents [24, T', h, w]]`."""
        made = isinstance(frames, list) and isinstance(frames[0], torch.Tensor)
        return self._latents(frames[0][None] if made else self._pixels(frames), use_fp16_latent)


class SyntheticH3ViTVideoVAE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.model = _Model(config["network"], config["vae_tile_size"], config["vae_tile_overlap_min"])

    @classmethod
    def from_pretrained(cls, path):
        config, before = json.loads((Path(path) / "config.json").read_text()), torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with init_empty_weights(include_buffers=False):
                result = cls(config)
        finally:
            torch.set_default_dtype(before)
        result.load_state_dict(load_file(str(Path(path) / "diffusion_pytorch_model.safetensors")), assign=True)
        return result
