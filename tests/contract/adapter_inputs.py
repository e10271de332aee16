# SPDX-License-Identifier: Apache-2.0
"""A DiT with the host's own LoRA manager on it, and adapters for it: without a server, a text encoder or a VAE.

``tools/measure_workloads.py`` measures with the same code that the tests assert with.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager
from vllm_omni.diffusion.models.minimax_h3.time_request import minimax_h3_time_shift_sigmas
from vllm_omni.lora.request import LoRARequest

from tests.contract.dit_inputs import (
    AUDIO_SHIFT,
    VIDEO_SHIFT,
    Latents,
    Request,
    Weights,
    denoise,
    host_dit,
    make_request,
    precision_plan,
)
from vllm_h3_plugin.checkpoint.layout import DitConfig
from vllm_h3_plugin.conditioning.schedule import Schedule
from vllm_h3_plugin.conditioning.store import Origin, TableStore
from vllm_h3_plugin.conditioning.table import TableShape
from vllm_h3_plugin.host import loading
from vllm_h3_plugin.host.adaln import ADALN, AdalnTables
from vllm_h3_plugin.host.adaln_modules import uses_tables
from vllm_h3_plugin.host.bench.lora import BarePipeline
from vllm_h3_plugin.host.fused_block import fuse
from vllm_h3_plugin.host.quant_config import H3QuantizationConfig
from vllm_h3_plugin.host.schedules import schedule_of
from vllm_h3_plugin.host.standalone import build_dit, finish_loading
from vllm_h3_plugin.host.step_kernels import choose_kernels
from vllm_h3_plugin.quantization.contract import QuantBackend, choose_backend
from vllm_h3_plugin.quantization.cutlass_fp8 import system_facts

FUSED = ", fused"
"""Ends the name of a recipe whose blocks have the plugin's kernels."""


@dataclass(frozen=True)
class Served:
    """A DiT, and the clips that it made before it ever met an adapter."""

    dit: Any
    tables: AdalnTables | None
    manager: DiffusionLoRAManager
    before: dict[str, Latents]
    steps: int
    seed: int = 0

    def denoise(self, task: str) -> Latents:
        """Final latents of a request of this task."""
        return denoise_with(self.dit, self.tables, task, self.steps, self.seed)

    def adapter(self, path: Path | None, scale: float = 1.0, number: int = 7) -> None:
        """Put an adapter on; None: take it off."""
        request = None if path is None else LoRARequest(lora_name=path.name, lora_int_id=number, lora_path=str(path))
        self.manager.set_active_adapter(request, scale)


def denoise_with(dit: Any, tables: AdalnTables | None, task: str, steps: int, seed: int = 0) -> Latents:
    """A denoise of ``steps`` evaluations, with the table of its schedule where AdaLN is one."""
    request, schedule = prepared(task, next(dit.parameters()).device, steps, seed)
    if tables is not None:
        tables.activate(schedule)
    with torch.inference_mode():
        return denoise(dit, request, steps)


def prepared(task: str, device: torch.device, steps: int, seed: int = 0) -> tuple[Request, Schedule]:
    """A request and its schedule, read off what the host's ``_build_denoise_inputs`` would return for it."""
    request = make_request(task, device, seed)
    # 0.28 counts points of the schedule and 0.30 counts evaluations (time_request.py).
    count = next(n for n in (steps, steps + 1) if len(minimax_h3_time_shift_sigmas(num_steps=n)) == steps + 1)
    video, audio = (
        minimax_h3_time_shift_sigmas(num_steps=count, shift_scale=shift) for shift in (VIDEO_SHIFT, AUDIO_SHIFT)
    )
    return request, schedule_of({"branch": request.branch, "sigmas_video": video, "sigmas_audio": audio})


def tables_of(dit: Any, config: DitConfig, weights: Weights, device: torch.device) -> AdalnTables:
    """Tables that are made from weights in memory."""
    store = TableStore(
        TableShape.of(config), Origin("w", {}), device=device, device_bytes=1 << 30, folder=None, disk_bytes=0
    )
    adaln = [(name, tensor) for name, tensor in weights.items() if ADALN in name]
    embedder = {name: tensor for name, tensor in weights.items() if name.startswith("time_embedder.")}
    return AdalnTables(dit, store, lambda progress: adaln, lambda: embedder)


def serve(
    recipe: str,
    config: DitConfig,
    weights: Weights,
    device: torch.device,
    *,
    steps: int = 4,
    seed: int = 0,
    backend: QuantBackend | None = None,
    tasks: tuple[str, ...] = ("t2va", "fl2va"),
) -> Served:
    """A DiT of a recipe, with AdaLN resident for ``bf16`` and as a table for the others.

    Args:
        recipe: its name, with :data:`FUSED` behind it for the plugin's kernels.
        backend: None: the device's.
    """
    tables = None
    if recipe == "bf16":
        dit: Any = host_dit(config, weights, device, recipe)
    else:
        precisions = precision_plan(recipe.removesuffix(FUSED), config)
        if precisions.quantized and backend is None:
            backend = choose_backend(None, system_facts(device), precisions.recipe.method or "fp8")[0]
        quantization = H3QuantizationConfig(precisions, backend) if precisions.quantized and backend else None
        dit = build_dit(config, quantization, device, tables=True)
        loading.load_dit(dit, weights, config=config, diffusers=False)
        finish_loading(dit)
        if recipe.endswith(FUSED):
            assert backend is not None
            assert fuse(dit, choose_kernels(device, backend)) is None
        tables = tables_of(dit, config, weights, device)
    before = {task: denoise_with(dit, tables, task, steps, seed) for task in tasks}
    manager = DiffusionLoRAManager(BarePipeline(dit, config, tables=uses_tables(dit)), device, torch.bfloat16)
    return Served(dit, tables, manager, before, steps, seed)


def same(one: Latents, other: Latents) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def minus(one: Latents, other: Latents) -> Latents:
    """What one has more than the other."""
    return one[0] - other[0], one[1] - other[1]
