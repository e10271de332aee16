# SPDX-License-Identifier: Apache-2.0
"""The host's adapter loaders, made to read an adapter of the model that is served.

Why: they compare every tensor with constants of the real model (``lora.py`` ``_TURBO_TARGET_DIMS`` and
``_TURBO_EXPECTED_RAW_TARGETS``, ``npu/lora.py`` ``_NATIVE_*``), so that a checkpoint of another width or depth has no
adapter. 0.28 also knows one Turbo file alone, by name and alpha.
How: while one adapter is read, these constants are those of the model's own tables; at the real width they are the same
values, which a test holds. Nothing else of the loaders changes.
Removal: when the host derives them from the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from vllm_omni.diffusion.models.minimax_h3 import lora as host_turbo
from vllm_omni.diffusion.models.minimax_h3.npu import lora as host_flashgen

from vllm_h3_plugin.checkpoint.adapter import Adapter
from vllm_h3_plugin.checkpoint.adapter_layout import DitConfig, flashgen_layers, turbo_layers
from vllm_h3_plugin.errors import HostError


def turbo_constants(config: DitConfig, adapter: Adapter | None = None) -> dict[str, Any]:
    """Constants of the host's Turbo loader for a model, and on 0.28 for a file of the family.

    Args:
        adapter: the file; only 0.28 has constants for it.
    """
    layers = turbo_layers(config)
    suffixes = {name.split(".", 2 if name.startswith("transformer") else 3)[-1]: name for name in layers}
    constants: dict[str, Any] = {
        "_TURBO_TARGET_DIMS": {end: (layers[name].wide, layers[name].high) for end, name in suffixes.items()},
        "_TURBO_EXPECTED_RAW_TARGETS": frozenset(layers),
    }
    if adapter is not None and adapter.kind == "turbo" and hasattr(host_turbo, "_TURBO_FILENAME"):
        constants |= {"_TURBO_FILENAME": adapter.file.name, "_TURBO_ALPHA": adapter.alpha}
    return constants


def flashgen_constants(config: DitConfig) -> dict[str, Any]:
    """Constants of the host's FlashGen loader for a model."""
    layers = flashgen_layers(config)
    block, final = layers["blocks.0.adaln_proj.linear"], layers["final_layer.adaln_proj.linear"]
    ends = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
    return {
        "_NATIVE_TARGET_DIMS": {
            **{end: (layers[f"blocks.0.{end}"].wide, layers[f"blocks.0.{end}"].high) for end in ends},
            "adaln_proj.linear": (block.wide, block.high),
        },
        "_NATIVE_FINAL_ADALN_DIMS": (final.wide, final.high),
        "_NATIVE_EXPECTED_TARGETS": frozenset(layers),
        "_NATIVE_NUM_QUERY_GROUPS": config.num_attention_heads,
        "_NATIVE_HEAD_DIM": config.attention_head_dim,
        "_NATIVE_QKV_SLICE": config.inner_size,
    }


@contextmanager
def loaders_for(config: DitConfig, adapter: Adapter) -> Iterator[None]:
    """Adapters that are read inside are held against this model.

    Raises:
        HostError: the host's loader has lost one of these constants.
    """
    kept: list[tuple[ModuleType, dict[str, Any]]] = []
    try:
        for module, constants in (
            (host_turbo, turbo_constants(config, adapter)),
            (host_flashgen, flashgen_constants(config)),
        ):
            missing = sorted(name for name in constants if not hasattr(module, name))
            if missing:
                raise HostError(
                    f"{module.__name__} has no {missing[0]}",
                    why="this plugin gives the host's adapter loader the shape of the model by that name",
                    fix="Use the pinned host: `vllm-h3 doctor`.",
                )
            kept.append((module, {name: getattr(module, name) for name in constants}))
            for name, value in constants.items():
                setattr(module, name, value)
        yield
    finally:
        for module, values in kept:
            for name, value in values.items():
                setattr(module, name, value)
