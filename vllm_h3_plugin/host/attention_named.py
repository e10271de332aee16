# SPDX-License-Identifier: Apache-2.0
"""Attention backends that a user named: whether the host took them, and whether they run here."""

from __future__ import annotations

from typing import Any

import torch

from vllm_h3_plugin.attention.choice import Chooser
from vllm_h3_plugin.errors import BackendError, one_line

FLAG = "--diffusion-attention-backend"

# Resolved names that differ from the flag's (each backend's get_name).
_RESOLVED = {"TORCH_SDPA": "SDPA"}
# Sparse backends choose tiles by the geometry of a real request, which a small input does not have.
_NOT_PROBED = frozenset({"FASTVIDEO_VSA", "RAINFUSION_ATTN"})
_BACKEND_OF = {"cudnn": "CUDNN_ATTN", "fa2": "FLASH_ATTN", "fa3": "FLASH_ATTN", "fa4": "FLASH_ATTN"}

PROBE_ROWS, PROBE_VALID = 128, 100
"""Rows of the small input, and how many of them hold tokens: a padded row, as every request is."""


def named_backend(layer: Any) -> str | None:
    """The backend that the user named for a host attention layer, in capitals; None if the platform chose."""
    explicit = getattr(layer, "backend_explicit", None)
    if explicit is None:
        # 0.28 has no such field and keeps a name only where one was given (attention/layer.py).
        explicit = layer.backend_pref is not None
    return str(layer.backend_pref).upper() if explicit else None


def refuse_substitute(layer: Any, named: str) -> None:
    """Stop where the host put another backend in the place of the named one, as 0.28 does with a warning.

    Raises:
        BackendError: names both.
    """
    resolved = layer.attn_backend.get_name()
    if resolved != _RESOLVED.get(named, named):
        raise BackendError(
            f"attention backend {named} was named and the host would run {resolved}",
            why="the host found no package or no kernels for it on this device and puts another in its place",
            fix=f"Name {resolved if resolved != 'SDPA' else 'TORCH_SDPA'} with {FLAG} if that is meant, or leave the "
            "flag out: the fastest exact kernel is then measured.",
            named=named,
            resolved=resolved,
        )


def probe_named(attention: Any, named: str, chooser: Chooser) -> None:
    """Run a named backend once on a small padded input, through the layer itself.

    Args:
        attention: the host's ``MiniMaxH3Attention``.
        named: its backend, for the message.
        chooser: tells which kernels do run, if this one does not.

    Raises:
        BackendError: it cannot run; names the reason and the backends that run here.
    """
    if named in _NOT_PROBED:
        return
    q, k, v = _small_input(attention)
    layer = attention.attention
    kept = layer.skip_sequence_parallel
    # A small input is not cut over ranks.
    layer.skip_sequence_parallel = True
    try:
        with torch.inference_mode():
            out = attention._run_packed_attention(
                q,
                k,
                v,
                cu_seqlens=torch.tensor([0, PROBE_VALID, PROBE_ROWS], dtype=torch.int32, device=q.device),
                max_seqlen=PROBE_VALID,
                packed_total=PROBE_ROWS,
            )
            finite = bool(out[:PROBE_VALID].isfinite().all().item())
    except Exception as exc:
        raise _cannot_run(named, one_line(exc), attention, chooser) from exc
    finally:
        layer.skip_sequence_parallel = kept
    if not finite:
        raise _cannot_run(named, "its result on a small input is not finite", attention, chooser)


def _small_input(attention: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = attention.q_norm.weight
    device = weight.device if weight.device.type != "meta" else torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(0)
    shape = (PROBE_ROWS, attention.num_heads, attention.head_dim)
    q, k, v = (torch.randn(shape, generator=generator, device=device, dtype=torch.float32).bfloat16() for _ in range(3))
    return q, k, v


def _cannot_run(named: str, reason: str, attention: Any, chooser: Chooser) -> BackendError:
    q, k, v = (x[None] for x in _small_input(attention))
    problems = chooser.problems(q, k[:, :PROBE_VALID], v[:, :PROBE_VALID], attention.softmax_scale)
    run = list(dict.fromkeys(_BACKEND_OF.get(name, "TORCH_SDPA") for name, why in problems.items() if why is None))
    return BackendError(
        f"attention backend {named} cannot run on this device",
        why=reason,
        fix=f"Leave {FLAG} out: the fastest exact kernel is then measured. These run here: {', '.join(run) or 'none'}.",
        named=named,
        runnable=run,
    )
