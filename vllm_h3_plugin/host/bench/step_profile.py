# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes on the device, by kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import torch

GROUPS = ("GEMM", "attention", "norm, quantize", "copies", "other")
"""``norm, quantize``: everything between the products: norms, modulation, gates, activation, rotation, quantization."""

# In order: FlashAttention-3 is built with CUTLASS and says so in its names, and what Inductor generates is named after
# every operation that it fuses, copies and products included.
_PATTERNS = (
    ("attention", r"flash|fmha|sdpa|attention|_attn_|sage|attn_fwd"),
    ("norm, quantize", r"^triton_|quant|norm|silu|act_and_mul|gate|modulat|scale_shift|rope|rotary"),
    ("GEMM", r"gemm|nvjet|cutlass|cublas|xmma|splitk|wgmma|matmul"),
    ("copies", r"memcpy|memset|copy|fill|cat|index"),
)
_COMPILED = [(group, re.compile(pattern, re.IGNORECASE)) for group, pattern in _PATTERNS]


def group_of(kernel: str) -> str:
    """Which of :data:`GROUPS` a kernel belongs to, from its name."""
    if "gemm" in kernel.lower() and not re.search("flash|fmha|sdpa", kernel, re.IGNORECASE):
        return "GEMM"  # a GEMM that quantizes or activates at its end is one all the same
    return next((group for group, pattern in _COMPILED if pattern.search(kernel)), "other")


def by_group(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sums of (kernel, value) by group; every group is there."""
    sums = dict.fromkeys(GROUPS, 0.0)
    for name, value in kernels:
        sums[group_of(name)] += value
    return sums


def busy_ms(work: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of kernels that ``work`` runs on the CUDA device, by group."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return by_group(
        (event.key, event.self_device_time_total / 1e3)
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA
    )
