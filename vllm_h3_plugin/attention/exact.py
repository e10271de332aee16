# SPDX-License-Identifier: Apache-2.0
"""Exact attention kernels as values: what each takes, and how it is run. None of them is handed a mask.

Shapes everywhere: queries ``[1, Sq, heads, head_dim]``, keys and values ``[1, Sk, heads, head_dim]``, BF16 (or FP16),
strides as they come. H3 pads its rows behind the tokens, so keys and values are sliced to the valid prefix, which says
what a mask would and costs nothing. Queries keep their pad rows: these come out finite, and nobody reads them.

"Exact" means BF16 products summed in FP32; the kernels differ in the order of sums alone, about 0.4 % on random data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from vllm_h3_plugin.attention.preference import DeviceFacts, availability
from vllm_h3_plugin.quantization.contract import Support

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""``run(q, k, v, scale) -> [1, Sq, heads, head_dim]``."""

MATH_ROWS = 2048
"""Most keys for which the math kernel is tried: it keeps ``heads * Sq * Sk`` scores, 0.9 GiB in FP32 for 56 heads."""

_SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class AttentionShape:
    """One call's sizes and element type."""

    query_rows: int
    key_rows: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor) -> AttentionShape:
        """From queries and keys."""
        return cls(q.shape[1], k.shape[1], q.shape[2], q.shape[3], q.dtype)

    @property
    def flop(self) -> int:
        """Floating-point operations of both products."""
        return 4 * self.query_rows * self.key_rows * self.heads * self.head_dim


@dataclass(frozen=True)
class Kernel:
    """One exact kernel.

    Attributes:
        name: one of ``preference.NAMES``.
        available: whether this device should have it at all, and why.
        run: see :data:`Run`. Raises whatever the kernel raises.
    """

    name: str
    available: Support
    run: Run

    def supports(self, shape: AttentionShape) -> Support:
        """Whether it takes the shape, as far as can be told without running it. Depends on the key rows' power of two
        alone, among shapes of one dtype and head size."""
        if not self.available:
            return self.available
        if shape.dtype not in (torch.bfloat16, torch.float16) and self.name != "math":
            return Support(False, f"it takes BF16 and FP16, not {shape.dtype}")
        if self.name == "cudnn" and shape.key_rows <= 1:
            # Host: backends/cudnn_attn.py, "cudnn SDPA does not support key/value sequence length 1".
            return Support(False, "cuDNN does not attend to a single key")
        if self.name == "math" and max(shape.key_rows, shape.query_rows) > MATH_ROWS:
            return Support(False, f"its matrix of scores is too large above {MATH_ROWS} rows")
        return self.available


_INT32_MAX = 2**31 - 1


def within_int32(x: torch.Tensor) -> torch.Tensor:
    """``[1, rows, heads, head_dim]`` dense where strides would take 32-bit offsets past their end: views of a fused QKV
    do at 100 000 rows of 3 * 7168."""
    return x if x.shape[1] * x.stride(1) <= _INT32_MAX else x.contiguous()


def pinned_sdpa(name: str) -> Run:
    """torch's attention held to one kernel. A list of several would fall through to math without a word."""
    backend = _SDPA[name]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        q, k, v = within_int32(q), within_int32(k), within_int32(v)
        with sdpa_kernel([backend]):
            return scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=scale
            ).transpose(1, 2)

    return run


def flash_package(function: Callable[..., Any]) -> Run:
    """A FlashAttention package's ``flash_attn_func``: takes ``[batch, rows, heads, head_dim]`` as it stands."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        q, k, v = within_int32(q), within_int32(k), within_int32(v)
        out = function(q, k, v, softmax_scale=scale, causal=False)
        # Some versions also return the log of the softmax's denominator.
        return out[0] if isinstance(out, tuple) else out

    return run


def exact_kernels(facts: DeviceFacts, flash: Callable[..., Any] | None = None) -> tuple[Kernel, ...]:
    """All exact kernels in this device's order of preference, those included that it cannot have (with the reason).

    Args:
        facts: of the device.
        flash: ``flash_attn_func`` of the package that ``facts.flash`` describes.
    """
    kernels = []
    for name, support in availability(facts.capability, facts.cudnn, facts.flash).items():
        if name in _SDPA:
            kernels.append(Kernel(name, support, pinned_sdpa(name)))
        elif support and flash is not None:
            kernels.append(Kernel(name, support, flash_package(flash)))
        else:
            kernels.append(Kernel(name, support and Support(False, "its function was not found"), _absent))
    return tuple(kernels)


def _absent(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    raise NotImplementedError("a kernel that is not available was run")


def valid_prefix(k: torch.Tensor, v: torch.Tensor, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first ``valid`` rows, as views.

    Raises:
        ValueError: ``valid`` is outside ``1..rows``.
    """
    rows = k.shape[1]
    if not 0 < valid <= rows:
        raise ValueError(f"valid rows must be within 1..{rows}, got {valid}")
    return (k, v) if valid == rows else (k[:, :valid], v[:, :valid])


def reference_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, rows: int) -> torch.Tensor:
    """The first ``rows`` query rows of the first head in plain FP32: ``[rows, head_dim]``.

    Rows do not depend on each other, so this is a check of any kernel that costs ``rows * Sk``, whatever ``Sq`` is.
    """
    scores = (q[0, :rows, 0].float() @ k[0, :, 0].float().T) * scale
    return scores.softmax(-1) @ v[0, :, 0].float()
