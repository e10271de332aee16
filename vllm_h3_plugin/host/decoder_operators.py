# SPDX-License-Identifier: Apache-2.0
"""The video VAE's decoder on CUDA devices for which the host has no operators of its own.

vLLM-Omni 0.30.0 keeps the weights of the decoder's blocks in FP16, as its decoding casts them anyway, and runs fused
operators in them; but on compute capability 9.0, 10.0 and 10.3 alone, and in the released code's blocks alone
(``diffusion/models/minimax_h3/ops/vae``). Elsewhere, as on a GB10, every tile casts 9 GB of weights again, and queries
and keys pass the memory a dozen times. Here the host's own operators are tried on the device, each against plain torch,
to the bit; those that agree are offered to the host's installer, and are given to the blocks of Diffusers' layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from vllm.logger import init_logger

from vllm_h3_plugin.quantization.fused_probe import Probe, probe

logger = init_logger(__name__)

Pair = tuple[torch.Tensor, torch.Tensor]
_HEADS, _HEAD_DIM, _ROTARY, _HIDDEN, _FFN = 32, 64, 48, 2048, 8192
"""Of the released decoder."""
_ROWS, _EPS = 4096, 1e-5


@dataclass(frozen=True)
class Operators:
    """What a block computes its steps with. Each returns None for what it is not made for.

    Attributes:
        qk_norm_rope: queries and keys ``[B, S, heads, 64]`` FP16, (cos, sin) ``[B, S, 1, 48]`` FP16, eps -> both,
            normalized in FP32 and rotated.
        scaled_residual: ``[..., 2048]`` FP32, FP16 branch, FP32 scale -> their FP32 ``residual + branch * scale``.
        silu_mul: ``[..., 2 F]`` FP16 -> ``silu(first) * second``.
        probes: what was tried on the device.
    """

    qk_norm_rope: Callable[[torch.Tensor, torch.Tensor, Pair, float], Pair | None]
    scaled_residual: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]
    silu_mul: Callable[[torch.Tensor], torch.Tensor | None]
    probes: tuple[Probe, ...] = ()


def qk_norm_rope(q: torch.Tensor, k: torch.Tensor, rotary: Pair, eps: float) -> Pair:
    """Plain torch, as the checkpoint's and Diffusers' blocks compute it."""
    return _norm_rope(q, rotary, eps), _norm_rope(k, rotary, eps)


def _norm_rope(x: torch.Tensor, rotary: Pair, eps: float) -> torch.Tensor:
    x = F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype)
    cos, sin = rotary
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, kept], dim=-1)


def scaled_residual(residual: torch.Tensor, branch: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Plain torch."""
    return residual + branch * scale


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Plain torch."""
    first, second = x.chunk(2, dim=-1)
    return F.silu(first) * second


PLAIN = Operators(qk_norm_rope, scaled_residual, silu_mul)


def operators_on(device: torch.device) -> Operators:
    """The host's operators where they give plain torch's bits on this CUDA device, and plain torch elsewhere."""
    from vllm_omni.diffusion.layers.activation import SiluAndMul
    from vllm_omni.diffusion.models.minimax_h3.ops.vae.qk_norm_rope import try_qk_norm_rope_exact
    from vllm_omni.diffusion.models.minimax_h3.ops.vae.scaled_residual import try_scaled_residual_exact

    theirs = Operators(try_qk_norm_rope_exact, try_scaled_residual_exact, SiluAndMul())
    cases = _cases(device)
    probes = tuple(probe(name, partial(_fault, name, theirs, given)) for name, given in cases.items())
    right = {tried.name for tried in probes if tried.ok}
    chosen = {name: getattr(theirs if name in right else PLAIN, name) for name in cases}
    for tried in probes:
        log = logger.info if tried.ok else logger.warning
        log("H3 decoder operator %s: %s", tried.name, tried.reason)
    return Operators(**chosen, probes=probes)


def _cases(device: torch.device) -> dict[str, tuple[Any, ...]]:
    numbers = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.randn(shape, generator=numbers, device=device, dtype=torch.float32).to(dtype)

    # Cut from one tensor, as the released blocks hand them over.
    q, k, _ = normal(1, _ROWS, _HEADS, 3 * _HEAD_DIM).chunk(3, dim=-1)
    angles = normal(1, _ROWS, 1, _ROTARY // 2, dtype=torch.float32).tile(2)
    rotary = angles.cos().half(), angles.sin().half()
    wide = torch.float32
    return {
        "qk_norm_rope": (q, k, rotary, _EPS),
        "scaled_residual": (normal(_ROWS, _HIDDEN, dtype=wide), normal(_ROWS, _HIDDEN), normal(_HIDDEN, dtype=wide)),
        "silu_mul": (normal(_ROWS // 4, 2 * _FFN),),
    }


@torch.inference_mode()
def _fault(name: str, operators: Operators, given: tuple[Any, ...]) -> str | None:
    got, want = (getattr(each, name)(*given) for each in (operators, PLAIN))
    if got is None:
        return "it is not made for this device"
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else ((got, want),)
    differ = sum(int((one != other).sum()) for one, other in pairs)
    return f"{differ} values differ" if differ else None


def offer(device: torch.device) -> Operators | None:
    """Have the host give its operators to decoders on a CUDA device that its table leaves out. Before a VAE is built.

    Returns:
        What was found on the device; None where nothing was looked for: no CUDA, or operators that the host has there.
    """
    if device.type != "cuda":
        return None
    from vllm_omni.diffusion.models.minimax_h3.ops.vae import dispatch

    if dispatch.resolve_h3_vae_operators(device) is not None:
        return None
    operators = operators_on(device)
    own = dispatch.H3VAEOperatorSet(
        supports=lambda asked: asked.type == "cuda",
        qk_norm_rope=operators.qk_norm_rope,
        scaled_residual=operators.scaled_residual,
    )
    dispatch.H3_VAE_OPERATOR_TABLE = (*dispatch.H3_VAE_OPERATOR_TABLE, own)
    return operators


def install(vae: Any, operators: Operators | None) -> str:
    """Give the blocks of a decoder in Diffusers' layout FP16 weights and these operators, unless the host has.

    Args:
        vae: the host's adapter; None: there is none on this rank.
        operators: what :func:`offer` found; None: they are looked for here, if a CUDA device needs them.

    Returns:
        What the decoder's blocks run with, in words.
    """
    if vae is None:
        return "nothing: there is no video VAE on this rank"
    decoder = getattr(vae.model, "decoder", None)
    if decoder is None:
        return "the checkpoint's own steps: its code has no decoder by that name"
    if getattr(decoder, "_omni_h3_vae_optimizations_installed", False):
        return "the host's operators"
    if getattr(vae, "_decoder_stager", None) is not None:
        return "the checkpoint's own steps: its weights are kept on the host, as they are"
    if operators is None and not any(value.is_cuda for value in decoder.parameters()):
        return "the checkpoint's own steps: operators are for CUDA devices"
    blocks = list(getattr(decoder, "transformer_blocks", ()))
    reason = _shortcoming(blocks)
    if reason:
        return f"the checkpoint's own steps: {reason}"
    device = blocks[0].scale1.device
    operators = operators or operators_on(device)
    for block in blocks:
        _give(block, operators)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # half of the weights' memory
    return "the host's operators, given by the plugin"


def _shortcoming(blocks: list[nn.Module]) -> str:
    from diffusers.models.autoencoders.autoencoder_kl_minimax_h3 import MiniMaxH3VideoTransformerBlock as Block

    if not blocks or any(type(block) is not Block for block in blocks):
        return "its blocks are neither the released code's nor Diffusers'"
    if any(linear.weight.dtype is not torch.float32 for block in blocks for linear in _linears(block)):
        return "its weights are not FP32"
    return ""


def _linears(block: Any) -> tuple[nn.Linear, ...]:
    attn, ff = block.attn, block.ff
    return attn.to_q, attn.to_k, attn.to_v, attn.to_out[0], ff.net[0].proj, ff.net[2]


@torch.no_grad()
def _give(block: Any, operators: Operators) -> None:
    # Decoding is under FP16 autocast, which rounds these same weights for every tile.
    for linear in _linears(block):
        linear.to(torch.float16)
    # Diffusers has the gated half last, and `silu_mul` first.
    up = block.ff.net[0].proj
    for values in (up.weight, up.bias):
        if values is not None:
            values.copy_(torch.cat(values.chunk(2)[::-1]))
    block.forward = MethodType(partial(_forward, operators), block)


def _forward(operators: Operators, block: Any, hidden_states: torch.Tensor, rotary_emb: Pair) -> torch.Tensor:
    """``MiniMaxH3VideoTransformerBlock.forward`` of Diffusers under FP16 autocast: ``[B, S, 2048]`` FP32 in and out."""
    # Rounded once: autocast would do it for each linear layer.
    normed = block.norm1(hidden_states.float()).half()
    hidden_states = _added(operators, hidden_states, _attended(operators, block.attn, normed, rotary_emb), block.scale1)
    wide = block.ff.net[0].proj(block.norm2(hidden_states.float()).half())
    narrow = _or_plain(operators.silu_mul, silu_mul, wide)
    return _added(operators, hidden_states, block.ff.net[2](narrow), block.scale2)


def _attended(operators: Operators, attn: Any, x: torch.Tensor, rotary: Pair) -> torch.Tensor:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    q, k, v = (linear(x).unflatten(2, (attn.heads, -1)) for linear in (attn.to_q, attn.to_k, attn.to_v))
    cos, sin = (values.to(q.dtype).contiguous() for values in rotary)
    q, k = _or_plain(operators.qk_norm_rope, qk_norm_rope, q, k, (cos, sin), float(attn.norm_q.eps))
    processor = attn.processor
    out = dispatch_attention_fn(
        q, k, v, attn_mask=None, backend=processor._attention_backend, parallel_config=processor._parallel_config
    )
    attended: torch.Tensor = attn.to_out[0](out.flatten(2, 3))
    return attended


def _added(operators: Operators, residual: torch.Tensor, branch: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    added: torch.Tensor = _or_plain(operators.scaled_residual, scaled_residual, residual, branch, scale)
    return added


def _or_plain(operator: Callable[..., Any], plain: Callable[..., Any], *given: Any) -> Any:
    made = operator(*given)
    return plain(*given) if made is None else made
