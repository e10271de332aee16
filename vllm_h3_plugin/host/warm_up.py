# SPDX-License-Identifier: Apache-2.0
"""A short prompt and one small step before the first request: what loads, compiles and plans then does not later."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm_omni.diffusion.models.minimax_h3.packed_sequence import minimax_h3_packed_sequence

from vllm_h3_plugin.host.adaln_modules import uses_tables
from vllm_h3_plugin.host.denoise_branch import MiniMaxH3DenoiseBranch

# 256x256, 107 frames: 32 latent frames of 8x8 rows. CUTLASS takes the tiles of long inputs from some hundred rows on.
TEXT, LATENT_T, LATENT_H, LATENT_W, AUDIO = 100, 32, 16, 16, 356


def warm_up_text(pipeline: Any) -> float:
    """Encode a short prompt.

    Returns:
        Seconds it took; 0 where there is no text encoder, or several ranks share it.
    """
    if getattr(pipeline, "text_encoder", None) is None or _several_ranks():
        return 0.0
    started = time.perf_counter()
    device = next(pipeline.text_encoder.parameters()).device
    with torch.inference_mode():
        pipeline._encode_text_hidden(torch.ones(TEXT, dtype=torch.long, device=device), {})
    _wait(device)
    return time.perf_counter() - started


def warm_up(dit: Any) -> float:
    """Run one step at the first timesteps of the table in use.

    Args:
        dit: the plugin's DiT with its weights.

    Returns:
        Seconds it took; 0 if it was left out: without a table there is nothing to read, and with several ranks a step
        is collective.
    """
    if _several_ranks():
        return 0.0
    group = (0.0,)
    if uses_tables(dit):
        if dit.time_embedder.table is None:
            return 0.0
        group = dit.time_embedder.table.schedule.groups[0]
    started = time.perf_counter()
    device = next(dit.parameters()).device
    packed = minimax_h3_packed_sequence(
        text_len=TEXT,
        latent_t=LATENT_T,
        latent_h=LATENT_H,
        latent_w=LATENT_W,
        audio_t=AUDIO,
        include_keyframe_cond=False,
    )
    branch = MiniMaxH3DenoiseBranch(
        packed=packed,
        text_embeddings=torch.zeros((TEXT, dit.arch.text_dim), dtype=torch.bfloat16, device=device),
        token_tags=packed["token_tags"],
        device=device,
    )
    video = torch.zeros((len(branch.img_pos), branch.x_base.shape[-1]), dtype=torch.float32, device=device)
    audio = torch.zeros((len(branch.audio_pos), branch.audio_x_base.shape[-1]), dtype=torch.float32, device=device)
    inputs = branch.forward_kwargs(
        video_rows=video,
        audio_rows=audio,
        t_video=group[0],
        t_audio=group[-1],
        imgvid_cond_timestep=group[-1],
        audio_ref_cond_timestep=group[-1],
    )
    with torch.inference_mode():
        dit(**inputs)
    dit.forget_request()
    _wait(device)
    return time.perf_counter() - started


def _several_ranks() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
