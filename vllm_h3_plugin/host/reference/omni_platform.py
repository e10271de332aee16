# SPDX-License-Identifier: Apache-2.0
"""The vLLM-Omni half of the reference platform. Each hook below is one that a host calls and does not default."""

from __future__ import annotations

import psutil
import torch
from vllm.logger import init_logger
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

from vllm_h3_plugin.errors import BackendError
from vllm_h3_plugin.host.reference.vllm_platform import ReferencePlatform

logger = init_logger(__name__)

_MASK_FREE = "vllm_h3_plugin.host.attention.PrefixSDPABackend"
_MASKED = "vllm_h3_plugin.host.attention.MaskedSDPABackend"


class ReferenceOmniPlatform(OmniPlatform, ReferencePlatform):
    """CPU reference platform: development and tests, never real clips."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        """Mask-free SDPA unless the host's masked SDPA is asked for by name.

        Raises:
            BackendError: another backend was named; none of them runs on a CPU.
        """
        name = (selected_backend or "").upper()
        if name == "":
            return _MASK_FREE
        if name == "TORCH_SDPA":
            return _MASKED
        raise BackendError(
            f"attention backend {selected_backend}",
            why="the CPU reference platform runs scaled dot-product attention only",
            fix="Leave --diffusion-attention-backend out (mask-free), or name TORCH_SDPA (the host's masked form).",
        )

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        # Ranks share the CPU: any configured world size is allowed.
        return 64

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        """Nothing is asynchronous on a CPU."""

    @classmethod
    def empty_cache(cls) -> None:
        """There is no device cache."""

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    @classmethod
    def reset_peak_memory_stats(cls) -> None:
        """The process's resident set has no peak to reset."""

    @classmethod
    def max_memory_reserved(cls) -> int:
        return int(psutil.Process().memory_info().rss)

    @classmethod
    def max_memory_allocated(cls) -> int:
        return int(psutil.Process().memory_info().rss)

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        # Asked by 0.28 only (entrypoints/utils.py); 0.30 finds its deploy configs itself.
        return "vllm_omni/deploy"
