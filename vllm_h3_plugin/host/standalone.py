# SPDX-License-Identifier: Apache-2.0
"""The host's H3 modules without a server: for the contract checks, the parity tests and the benchmarks.

One process, one rank. What the host sets up for a diffusion worker is set up here in the same order
(diffusion/worker/diffusion_worker.py), and taken down again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm_omni.platforms import current_omni_platform

from vllm_h3_plugin.checkpoint.layout import DitConfig
from vllm_h3_plugin.host.adaln import finish_loading
from vllm_h3_plugin.host.adaln_modules import adaln_from_tables
from vllm_h3_plugin.host.dit import HostDiT, MiniMaxH3DiTModel, plugin_dit
from vllm_h3_plugin.host.quant_config import H3QuantizationConfig

__all__ = ["build_dit", "describe_platform", "finish_loading", "platform_device", "single_rank"]


def platform_device() -> torch.device:
    """Device of the platform that the host detected."""
    return torch.device(current_omni_platform.device_type)


def describe_platform() -> str:
    """Platform class and device name, for people."""
    return f"{type(current_omni_platform).__name__} on {current_omni_platform.get_device_name()}"


@contextmanager
def single_rank() -> Iterator[torch.device]:
    """Be the only rank of a distributed world, with BF16 as default dtype; yields the device."""
    device = platform_device()
    config = VllmConfig() if device.type == "cuda" else VllmConfig(device_config=DeviceConfig(device="cpu"))
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
            init_distributed_environment(
                world_size=1,
                rank=0,
                distributed_init_method=f"file://{folder}/rendezvous",
                local_rank=0,
                backend="nccl" if device.type == "cuda" else "gloo",
            )
            initialize_model_parallel(1)
            # Linear methods ask the model config for its dtype; there is no model config outside of a server.
            config.model_config = SimpleNamespace(dtype=torch.bfloat16, is_moe=False, is_quantized=False)
            yield device
    finally:
        cleanup_dist_env_and_memory()
        torch.set_default_dtype(dtype)


def build_dit(
    config: DitConfig,
    quantization: H3QuantizationConfig | None,
    device: torch.device,
    *,
    tables: bool = False,
    stock: bool = False,
) -> torch.nn.Module:
    """A DiT with unfilled parameters, as the pipeline builds it.

    Needs :func:`single_rank` around it.

    Args:
        tables: whether it reads AdaLN from tables and has no weights of it.
        stock: the host's own classes, not the plugin's.
    """

    od_config: Any = SimpleNamespace(
        tf_model_config=config.to_native(),
        parallel_config=SimpleNamespace(ulysses_degree=1, ring_degree=1),
        cache_config={},
    )
    with device, adaln_from_tables() if tables else nullcontext(), nullcontext() if stock else plugin_dit():
        return (HostDiT if stock else MiniMaxH3DiTModel)(od_config, quantization)
