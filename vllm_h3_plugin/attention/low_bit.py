# SPDX-License-Identifier: Apache-2.0
"""Attention in fewer bits than BF16, which a recipe asks for by name (``"attention": "fp8"`` or ``"int8"``).

``fp8``: FlashAttention-3's FP8 kernel on Hopper, one scale per head. On Gaussian data, the hard case, its output is
5.4 % away from BF16's, at 1.52 times the speed of cuDNN in BF16 (H200, 38 016 rows).

``int8``: the ``sageattention`` package, queries and keys in INT8 per block of rows. On the same data 1.3 % away. On an
H200 it was slower than cuDNN; on a GB10 others measured it 1.62 times as fast as torch's attention.

No kernel of our own multiplies here. On Hopper plain Triton with 8-bit queries and keys was slower than FA3 (89 and 69
against 45 ms), and what it would do on SM 12.x could not be measured.

Subtracting one vector per head from all keys changes nothing in the softmax: every score of a query moves by the same
amount. So keys are smoothed by a mean over some rows, which is exact, and leaves smaller numbers to quantize.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from vllm_h3_plugin.attention.exact import Run, within_int32
from vllm_h3_plugin.errors import BackendError, UsageError
from vllm_h3_plugin.quantization.contract import Support
from vllm_h3_plugin.quantization.fp8 import E4M3, E4M3_MAX
from vllm_h3_plugin.quantization.recipe import AttentionPrecision

MAX_TOKENS = {AttentionPrecision.FP8: 112_000, AttentionPrecision.INT8: 38_000}
"""Packed rows of a request up to which attention in few bits is allowed. FP8: the largest clip that a whole step was
measured on (docs/RESULTS.md: 1344x768 with 362 frames, 109 184 rows), and room for a long prompt. INT8: no step has
been measured; the rows at which its kernel alone was compared with BF16's, on Gaussian numbers (38 016). Others report
noise from INT8 attention near 160 000 tokens."""

MEAN_ROWS = 1024
"""About as many rows are taken for the mean of the keys, evenly spread."""

ALLOWED = "is allowed up to"
"""Words of the refusal above :data:`MAX_TOKENS`, by which it is known again where a worker's error is only text."""

SCALE_FLOOR = 2.0**-100
"""Smallest scale, so that a head of zeros divides by something."""


class Fp8Inputs(NamedTuple):
    """What FA3's FP8 kernel takes.

    Attributes:
        q: ``[1, Sq, heads, head_dim]`` E4M3, contiguous.
        k, v: ``[1, Sk, heads, head_dim]`` E4M3, contiguous.
        q_scale, k_scale, v_scale: ``[1, heads]`` FP32; value = element * scale.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor


class QuantizeHeads(Protocol):
    """Quantizes queries, smoothed keys and values; see :func:`quantize_heads`."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mean: torch.Tensor) -> Fp8Inputs: ...


def means(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Mean key and mean value of each head over evenly spread rows.

    What is subtracted from every key changes no softmax, and what is subtracted from every value is added to the result
    again, so neither has to be exact.

    Args:
        k, v: ``[1, Sk, heads, head_dim]``.

    Returns:
        ``[2, heads, head_dim]`` FP32.
    """
    step = max(1, k.shape[1] // MEAN_ROWS)
    return torch.stack([x[0, ::step].mean(0, dtype=torch.float32) for x in (k, v)])


def quantize_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mean: torch.Tensor) -> Fp8Inputs:
    """The reference, in plain torch: ``scale = max(max|x| / 448, floor)`` per head, ``element = E4M3(x / scale)``.

    The scale of a float format matters little: E4M3 keeps its 3 bits of mantissa over 2^14. After RMSNorm queries and
    keys have a known bound that would do, but values have none, and a measured maximum is safe for every model.

    Args:
        q: ``[1, Sq, heads, head_dim]`` BF16, any strides with a last one of 1.
        k, v: ``[1, Sk, heads, head_dim]`` likewise.
        mean: ``[2, heads, head_dim]`` FP32, subtracted from every key and every value: :func:`means`.

    Returns:
        Infinities and NaN come out as NaN in their head, never as a large number.
    """
    tensors, scales = [], []
    # A tensor as divisor: on CUDA torch turns division by a Python float into a multiplication by its reciprocal.
    largest = torch.tensor(E4M3_MAX, device=q.device)
    for x in (q.float(), k.float() - mean[0], v.float() - mean[1]):
        scale = (x.abs().amax(dim=(0, 1, 3)) / largest).clamp(min=SCALE_FLOOR)
        tensors.append((x / scale[:, None]).to(E4M3))
        scales.append(scale[None])
    return Fp8Inputs(tensors[0], tensors[1], tensors[2], scales[0], scales[1], scales[2])


def fp8_attention(function: Callable[..., Any], quantize: QuantizeHeads) -> Run:
    """FA3 in FP8 as a :data:`~vllm_h3_plugin.attention.exact.Run`; output in BF16.

    Values are smoothed as keys are. Hopper's FP8 tensor cores cut the sums of their products short; over tens of
    thousands of keys with values of one sign that bias grew to 30 % of the result (measured on an H200 at 37 824 rows),
    where values around zero cost 5 %.

    Args:
        function: ``flash_attn_func`` of FA3.
        quantize: :func:`quantize_heads` or the Triton kernel that does the same.
    """

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        mean = means(k, v)
        x = quantize(q, k, v, mean)
        out = function(
            x.q,
            x.k,
            x.v,
            softmax_scale=scale,
            causal=False,
            q_descale=x.q_scale,
            k_descale=x.k_scale,
            v_descale=x.v_scale,
        )
        out = out[0] if isinstance(out, tuple) else out
        return out.add_(mean[1])

    return run


def int8_attention(function: Callable[..., Any], *, changes_keys: bool) -> Run:
    """``sageattn`` as a :data:`~vllm_h3_plugin.attention.exact.Run`.

    Args:
        function: ``sageattention.sageattn``.
        changes_keys: whether it smooths the caller's keys in place, as 1.x does (``k -= km`` in its ``core.py``).
    """

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        q, k, v = (within_int32(x) for x in (q, k, v))
        if changes_keys:
            k = k.clone()
        return function(q, k, v, tensor_layout="NHD", is_causal=False, sm_scale=scale)

    return run


def reference_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """What :func:`fp8_attention` computes, from the same FP8 numbers, in plain FP32: for tests and small sizes."""
    mean = means(k, v)
    x = quantize_heads(q, k, v, mean)
    wide = ((t[0].float() * s[0, :, None]).transpose(0, 1) for t, s in ((x.q, x.q_scale), (x.k, x.k_scale)))
    queries, keys = wide
    values = (x.v[0].float() * x.v_scale[0, :, None]).transpose(0, 1)
    scores = (queries @ keys.transpose(1, 2)) * scale
    out = (scores.softmax(-1) @ values).transpose(0, 1)[None].to(q.dtype)
    return out.add_(mean[1])


def fp8_support(capability: int | None, flash: str | None) -> Support:
    """Whether a device can run ``fp8``: FA3 has FP8 kernels for SM 9.0 alone.

    Args:
        capability: as in ``DeviceFacts``.
        flash: kernel name of the FlashAttention package, or its description; None without one.
    """
    if capability != 90:
        chip = "a CPU" if capability is None else f"SM {capability // 10}.{capability % 10}"
        return Support(False, f"FlashAttention-3 has FP8 kernels for SM 9.0 (Hopper) and this is {chip}")
    if flash is None or flash.split()[0] != "fa3":
        return Support(False, "no FlashAttention-3 package is installed (`fa3_fwd` on PyPI)")
    return Support(True, flash)


def refuse(precision: AttentionPrecision, why: str) -> BackendError:
    """The error of a recipe whose attention cannot run here. Nothing is put in its place."""
    other = {AttentionPrecision.FP8: "int8", AttentionPrecision.INT8: "fp8"}[precision]
    return BackendError(
        f'the recipe\'s "attention": "{precision.value}" cannot run here',
        why=why,
        fix=f'Name a recipe with "attention": "exact" (as `fp8` has) or "{other}".',
        attention=precision.value,
    )


def check_tokens(precision: AttentionPrecision, tokens: int) -> None:
    """Refuse a request that is larger than what attention in few bits was measured on.

    Args:
        precision: of the recipe.
        tokens: packed rows of the request, pad rows included.

    Raises:
        UsageError: names both numbers.
    """
    limit = MAX_TOKENS.get(precision)
    if limit is None or tokens <= limit:
        return
    raise UsageError(
        f"the request has {tokens} tokens",
        why=f"attention in {precision.value} is allowed up to {limit}; beyond that its error is not known",
        fix="Ask for fewer frames, a smaller size or fewer references, or serve a recipe with exact attention.",
        tokens=tokens,
        limit=limit,
    )
