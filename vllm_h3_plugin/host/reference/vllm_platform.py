# SPDX-License-Identifier: Apache-2.0
"""The vLLM half of the reference platform."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class ReferencePlatform(CpuPlatform):
    """vLLM's CPU platform as an out-of-tree plugin, usable from the CUDA wheels."""

    # Regional compile costs ~12 s on the first request here and buys nothing on tiny models.
    simple_compile_backend = "eager"

    @classmethod
    def import_kernels(cls) -> None:
        """The CUDA wheels carry no CPU kernels; what is needed is defined in :mod:`cpu_ops`."""
