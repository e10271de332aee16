# SPDX-License-Identifier: Apache-2.0
"""Weights, requests and two DiTs to run them on: the host's, loaded by the plugin, and Diffusers' independent one.

``tools/measure_precision.py`` measures with the same code that the tests assert with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.diffusion.models.minimax_h3 import minimax_h3_transformer as host_transformer
from vllm_omni.diffusion.models.minimax_h3.denoise_loop import MiniMaxH3DenoiseBranch, minimax_h3_denoise_loop
from vllm_omni.diffusion.models.minimax_h3.packed_sequence import (
    minimax_h3_packed_sequence,
    minimax_h3_packed_sequence_ref2va_blocks,
)
from vllm_omni.diffusion.models.minimax_h3.time_request import minimax_h3_time_shift_sigmas

from vllm_h3_plugin.checkpoint.dit_placement import rope_inv_freq
from vllm_h3_plugin.checkpoint.layout import DitConfig, dit_tensors, linear_layers, to_diffusers
from vllm_h3_plugin.checkpoint.synthetic import tiny_text
from vllm_h3_plugin.host import loading
from vllm_h3_plugin.host.quant_config import H3QuantizationConfig
from vllm_h3_plugin.host.standalone import build_dit, finish_loading
from vllm_h3_plugin.quantization.contract import choose_backend
from vllm_h3_plugin.quantization.cutlass_fp8 import system_facts
from vllm_h3_plugin.quantization.plan import Assignment, PrecisionPlan, plan
from vllm_h3_plugin.quantization.precision import Precision
from vllm_h3_plugin.quantization.recipe import Recipe, load_recipe

Weights = dict[str, torch.Tensor]
Latents = tuple[torch.Tensor, torch.Tensor]
"""Video rows ``[V, 96]`` and audio rows ``[A, 32]``, FP32."""

TASKS = ("t2va", "fl2va", "ref2va")
# Release defaults of the host (pipeline_minimax_h3.py, sigma_shift_scales).
VIDEO_SHIFT, AUDIO_SHIFT = 12.0, 3.0
# Text rows, and the latent grid of a clip of 22 frames; the rows add up to no multiple of 64, so that pad rows follow.
TEXT_ROWS, LATENT_T, LATENT_H, LATENT_W, AUDIO_T, FRAMES = 21, 7, 6, 8, 37, 22


def random_weights(config: DitConfig, seed: int = 0) -> Weights:
    """A DiT in the native layout and the checkpoint's dtypes, in which every part matters to the output.

    Linears are ``N(0, 1/K)`` and norms ``N(1, 0.1²)``, so that activations keep their scale. AdaLN biases are
    ``N(0, 0.5²)``: gates are then about 0.5, and blocks add as much to the residual stream as they find in it. Gates
    near zero would hide whatever goes wrong in a block, quantization errors included.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, spec in dit_tensors(config).items():
        values = torch.randn(spec.shape, generator=generator, dtype=torch.float32)
        if name == "rope.inv_freq":
            values = rope_inv_freq(config.rope_inv_freq_len)
        elif name.endswith(".bias"):
            values *= 0.5 if ".adaln_proj." in name else 0.1
        elif len(spec.shape) == 1:
            values = 1 + 0.1 * values
        else:
            values /= spec.shape[1] ** 0.5
        weights[name] = values.to(torch.float32 if spec.dtype == "F32" else torch.bfloat16)
    return weights


def with_outlier_rows(config: DitConfig, weights: Weights, factor: float) -> Weights:
    """The same function with one row in 64 of every attention and MLP output projection ``factor`` times as large.

    Such a row writes one channel of the residual stream, behind the gate that AdaLN computes for this channel. The
    gate's weights are divided by what the row was multiplied with::

        x + (gate / factor) * ((factor * w) · h)  =  x + gate * (w · h)

    No activation that a quantized layer reads changes, so that nothing but the weight's own scale is put to the test.
    With a power of two as ``factor`` both sides agree bit for bit in BF16 too, as nothing but exponents changes.
    """
    assert math.frexp(factor)[0] == 0.5, "a power of two"
    hidden = config.hidden_size
    result = {name: tensor.clone() for name, tensor in weights.items()}
    rows = torch.arange(5, hidden, 64)
    for i in range(config.num_layers):
        # adaln_proj rows: per modality six vectors of the width, the gates third and sixth (MiniMaxH3DiTBlock.forward).
        for linear, gate in ((f"blocks.{i}.attn.out_proj", 2), (f"blocks.{i}.mlp.fc2", 5)):
            result[f"{linear}.weight"][rows] *= factor
            for modality in range(3):
                at = (6 * modality + gate) * hidden + rows
                result[f"blocks.{i}.adaln_proj.linear.weight"][at] /= factor
                result[f"blocks.{i}.adaln_proj.linear.bias"][at] /= factor
    return result


def precision_plan(recipe: Recipe | str, config: DitConfig) -> PrecisionPlan:
    """A recipe applied to a DiT of this shape."""
    return plan(load_recipe(recipe) if isinstance(recipe, str) else recipe, linear_layers(config, tiny_text()))


def per_tensor(recipe: Recipe) -> Recipe:
    """The recipe with one scale per tensor wherever it has one per channel, and no other difference."""
    swap = {Precision.FP8_CHANNEL: Precision.FP8_TENSOR}
    rules = tuple(replace(rule, precision=swap.get(rule.precision, rule.precision)) for rule in recipe.rules)
    return replace(recipe, name=f"{recipe.name}, one scale per tensor", rules=rules)


def adaln_in_fp8(base: PrecisionPlan) -> PrecisionPlan:
    """The plan with AdaLN in FP8 per tensor, which the stock host does and no recipe may."""
    return PrecisionPlan(
        base.recipe,
        {
            path: Assignment(Precision.FP8_TENSOR, given.rule) if path.endswith(".adaln_proj.linear") else given
            for path, given in base.assignments.items()
        },
    )


def host_dit(
    config: DitConfig,
    weights: Weights,
    device: torch.device,
    precisions: PrecisionPlan | str = "bf16",
    *,
    diffusers: bool = False,
) -> torch.nn.Module:
    """The host's DiT, filled by the plugin's loader. Needs ``single_rank``.

    Args:
        precisions: a plan, or a packaged recipe's name.
        diffusers: whether the weights are in the Diffusers layout.
    """
    if isinstance(precisions, str):
        precisions = precision_plan(precisions, config)
    quantization = None
    if precisions.quantized:
        backend, _ = choose_backend(None, system_facts(device), precisions.recipe.method or "fp8")
        quantization = H3QuantizationConfig(precisions, backend)
    dit = build_dit(config, quantization, device)
    loading.load_dit(dit, weights, config=config, diffusers=diffusers)
    finish_loading(dit)
    loading.check_precisions(dit, "transformer", precisions)
    return dit


@contextmanager
def host_in_fp32(dit: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Widen a BF16 host DiT to FP32 and let the host compute in it: its code names BF16 in one module constant."""
    for module in dit.modules():
        if isinstance(module, Attention):
            # 0.28 sends FP32 to a second SDPA that cannot run on an out-of-tree platform; the first can, in any dtype.
            module.sdpa_fallback = module.attention
    served = host_transformer._BF16_DTYPE
    host_transformer._BF16_DTYPE = torch.float32
    try:
        yield dit.float()
    finally:
        host_transformer._BF16_DTYPE = served


def diffusers_weights(config: DitConfig, native: Weights) -> Weights:
    """The same weights in the Diffusers layout, cut by hand and not by the loader's placements."""
    result = {}
    for name, tensor in native.items():
        for target in to_diffusers(name):
            if target.piece == "whole":
                result[target.name] = tensor
            elif target.piece == "swapped":
                result[target.name] = torch.cat(tensor.chunk(2)[::-1])
            else:
                grouped = tensor.unflatten(0, (config.num_attention_heads, 3, config.attention_head_dim))
                result[target.name] = grouped[:, "qkv".index(target.piece)].flatten(0, 1).contiguous()
    return result


def diffusers_dit(config: DitConfig, native: Weights, *, fp32: bool) -> torch.nn.Module:
    """Diffusers' H3 transformer with the same weights, in FP32 or in the checkpoint's mixed precision."""
    from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel

    model = MiniMaxH3Transformer3DModel.from_config(config.to_diffusers())
    weights = diffusers_weights(config, native)
    model.load_state_dict({k: v.float() if fp32 else v for k, v in weights.items()}, strict=True, assign=True)
    return model.eval()


@dataclass(frozen=True)
class Request:
    """One packed request.

    Attributes:
        branch: the host's static state of it.
        noise: video rows and audio rows at the start, condition rows included.
        video_anchor, audio_anchor: condition rows that stay as they are; None if the task has none.
    """

    branch: MiniMaxH3DenoiseBranch
    noise: Latents
    video_anchor: torch.Tensor | None
    audio_anchor: torch.Tensor | None


def make_request(task: str, device: torch.device, seed: int = 0) -> Request:
    """A small request of one task: text; first and last frame (their text rows tagged as video); image and sound."""
    sizes: dict[str, Any] = {"text_len": TEXT_ROWS, "audio_t": AUDIO_T}
    sizes |= {"latent_t": LATENT_T, "latent_h": LATENT_H, "latent_w": LATENT_W}
    if task == "ref2va":
        blocks = [{"kind": "image", "latent_h": 4, "latent_w": 6}, {"kind": "audio", "ref_audio_t": 5}]
        packed = minimax_h3_packed_sequence_ref2va_blocks(**sizes, ref_blocks=blocks)
    else:
        frames = {"keyframe_frame_indices": [0, -1], "frame_count": FRAMES} if task == "fl2va" else {}
        packed = minimax_h3_packed_sequence(**sizes, include_keyframe_cond=task == "fl2va", **frames)
    tags = packed["token_tags"].clone()
    if task == "fl2va":
        tags[4:9] = 0
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(device)

    branch = MiniMaxH3DenoiseBranch(
        packed=packed,
        text_embeddings=normal(TEXT_ROWS, 5120).bfloat16(),
        token_tags=tags,
        device=device,
    )
    assert branch.used_len < branch.seq_len, "the request must have pad rows"
    noise = normal(len(branch.img_pos), 96), normal(len(branch.audio_pos), 32)
    anchors = noise[0][~branch.update_mask_dev], noise[1][~branch.audio_update_mask_dev]
    return Request(branch, noise, *(anchor if len(anchor) else None for anchor in anchors))


def forward_inputs(request: Request, t_video: float, t_audio: float) -> dict[str, Any]:
    """Keywords of one forward of the host's DiT. Timesteps run from 0 (noise) to 1 (clean)."""
    return request.branch.forward_kwargs(
        video_rows=request.noise[0],
        audio_rows=request.noise[1],
        t_video=t_video,
        t_audio=t_audio,
        imgvid_cond_timestep=max(t_video, 0.999),
        audio_ref_cond_timestep=1.0,
    )


def host_velocity(dit: torch.nn.Module, request: Request, inputs: dict[str, Any]) -> Latents:
    """Velocities of the rows that are denoised."""
    with torch.inference_mode():
        video, audio = dit(**inputs)
    return video[request.branch.update_mask], audio[request.branch.audio_update_mask]


def diffusers_velocity(model: torch.nn.Module, request: Request, inputs: dict[str, Any]) -> Latents:
    """The same from Diffusers' model, which takes the rows of each kind, and no pad rows."""
    branch, used = request.branch, request.branch.used_len
    with torch.inference_mode():
        video, audio = model(
            hidden_states=inputs["x"][:, branch.img_pos_dev],
            audio_hidden_states=inputs["audio_x"][:, branch.audio_pos_dev],
            encoder_hidden_states=inputs["prompt_embeds"][None],
            timestep=inputs["unique_timesteps"],
            timestep_indices=inputs["inverse_indices"][:used],
            token_tags=inputs["token_tags"][:used],
            position_ids=inputs["img_position_ids"][0, :used],
            video_indices=branch.img_pos_dev,
            audio_indices=branch.audio_pos_dev,
            text_indices=branch.text_pos_dev,
            return_dict=False,
        )
    return video[0][branch.update_mask], audio[0][branch.audio_update_mask]


def denoise(dit: torch.nn.Module, request: Request, steps: int) -> Latents:
    """The host's own denoise loop over ``steps`` evaluations, with the release's schedules."""
    # 0.28 counts points of the schedule and 0.30 counts evaluations (time_request.py).
    count = next(n for n in (steps, steps + 1) if len(minimax_h3_time_shift_sigmas(num_steps=n)) == steps + 1)
    video, audio = minimax_h3_denoise_loop(
        model=dit,
        positive=request.branch,
        initial_video_rows=request.noise[0],
        initial_audio_rows=request.noise[1],
        keyframe_cond_rows=request.video_anchor,
        audio_ref_rows=request.audio_anchor,
        sigmas_video=minimax_h3_time_shift_sigmas(num_steps=count, shift_scale=VIDEO_SHIFT),
        sigmas_audio=minimax_h3_time_shift_sigmas(num_steps=count, shift_scale=AUDIO_SHIFT),
        device=request.branch.device,
    )
    return video[request.branch.update_mask], audio[request.branch.audio_update_mask]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """``|got - want| / |want|``, Euclidean."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def cosine(got: torch.Tensor, want: torch.Tensor) -> float:
    """Cosine of the angle between two tensors taken as vectors."""
    return torch.nn.functional.cosine_similarity(got.double().flatten(), want.double().flatten(), dim=0).item()


def root_mean_square(values: Iterable[float]) -> float:
    """Mean of relative errors over runs."""
    squares = [value * value for value in values]
    return math.sqrt(sum(squares) / len(squares))
