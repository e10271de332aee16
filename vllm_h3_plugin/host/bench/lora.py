# SPDX-License-Identifier: Apache-2.0
"""What a Turbo adapter costs a denoise step: the same blocks with and without it, in turns, in one process.

The host's own LoRA manager puts the adapter beside the plugin's layers; between turns its low-rank path is switched on
and off, which is not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager
from vllm_omni.diffusion.models.minimax_h3 import pipeline_minimax_h3 as host_pipeline
from vllm_omni.lora.request import LoRARequest

from vllm_h3_plugin.checkpoint.configs import DitConfig
from vllm_h3_plugin.checkpoint.synthetic.adapters import AdapterSpec, write_adapter
from vllm_h3_plugin.errors import H3Error
from vllm_h3_plugin.host.adapters import CheckedAdapters
from vllm_h3_plugin.host.bench.clock import in_turns, settled_ms
from vllm_h3_plugin.host.bench.step_models import Model, RandomWeights, Request, build_plugin
from vllm_h3_plugin.memory.requests import RequestSize
from vllm_h3_plugin.pins import installed_host
from vllm_h3_plugin.serving.adapters import AdapterRules


@dataclass(frozen=True)
class Overhead:
    """Milliseconds of a step's blocks.

    Attributes:
        layers: blocks that ran.
        tokens: packed tokens.
    """

    layers: int
    tokens: int
    without_ms: float
    with_ms: float

    @property
    def share(self) -> float:
        """What the adapter adds, as a share of the blocks without it."""
        return self.with_ms / self.without_ms - 1


class BarePipeline(CheckedAdapters, host_pipeline.MiniMaxH3Pipeline):  # type: ignore[misc]
    """What the host's LoRA manager needs of a pipeline.

    Args:
        tables: AdaLN is a table.
    """

    def __init__(self, dit: Any, config: DitConfig, *, tables: bool) -> None:
        nn.Module.__init__(self)
        self.partition = "fl2va"
        self.transformer = dit
        self._dit_modules = ["transformer"]
        self.default_video_shift, self.default_audio_shift = 12.0, 3.0
        self._turbo_lora_specs: dict[int, Any] = {}
        self._turbo_lora_adapter_ids: set[int] = set()
        self._native_lora_adapter_ids: set[int] = set()
        self._lora_sigma_schedules: dict[int, Any] = {}
        self.adapter_rules = AdapterRules(config, "fl2va", tables, installed_host().vllm_omni != "0.28.0")


class Switch:
    """A Turbo adapter on a model, on or off.

    Args:
        folder: where the adapter's file is written.
    """

    def __init__(self, model: Model, config: DitConfig, device: torch.device, folder: Path) -> None:
        self._manager = DiffusionLoRAManager(BarePipeline(model.dit, config, tables=True), device, torch.bfloat16)
        path = write_adapter(folder, AdapterSpec("turbo", config))
        self._request = LoRARequest(lora_name="turbo", lora_int_id=1, lora_path=str(path))

    def __call__(self, on: bool) -> None:
        """Put the adapter on, or take it off."""
        self._manager.set_active_adapter(self._request if on else None)


def measure_overhead(
    config: DitConfig, size: RequestSize, device: torch.device, folder: Path, rounds: int = 5
) -> Overhead:
    """Blocks of one step with a Turbo adapter of rank 128 and without. Needs ``single_rank``.

    Args:
        config: widths, and as many blocks as are to run.
        folder: for the adapter's file.

    Raises:
        H3Error: a turn failed, or the adapter changed nothing.
    """
    model = build_plugin(RandomWeights(config, device))
    model.set_depth(config.num_layers)
    request = Request(model, size, device)
    with torch.inference_mode():
        switch = Switch(model, config, device, folder)
        results = []
        for on in (False, True):
            switch(on)
            results.append(request.blocks().clone())
        if torch.equal(*results):
            raise H3Error("the adapter changed nothing", why="its layers were not found or are not active")

        def blocks(on: bool) -> Callable[[], float]:
            def turn() -> float:
                switch(on)
                return settled_ms(request.blocks, device)

            return turn

        times, failed = in_turns({on: blocks(on) for on in (False, True)}, rounds, warm=1)
    if failed:
        raise H3Error("a turn failed", why="; ".join(failed.values()))
    return Overhead(config.num_layers, request.tokens, times[False], times[True])
