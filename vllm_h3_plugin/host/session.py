# SPDX-License-Identifier: Apache-2.0
"""Everything that is decided before the model is built: checkpoint, recipe, backend. Takes no memory for weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger
from vllm_omni.diffusion.data import TransformerConfig
from vllm_omni.platforms import current_omni_platform

from vllm_h3_plugin import settings
from vllm_h3_plugin.checkpoint.adapter import Adapter
from vllm_h3_plugin.checkpoint.inventory import Inventory, PartitionInventory, take_inventory
from vllm_h3_plugin.checkpoint.layout import DitConfig, LinearSpec, TextEncoderConfig, linear_layers
from vllm_h3_plugin.errors import BackendError, UsageError
from vllm_h3_plugin.memory.weights import shapes_of
from vllm_h3_plugin.quantization.contract import LayerFacts, QuantBackend, choose_backend
from vllm_h3_plugin.quantization.cutlass_fp8 import system_facts
from vllm_h3_plugin.quantization.plan import PrecisionPlan, plan
from vllm_h3_plugin.quantization.recipe import Recipe, resolve_recipe

logger = init_logger(__name__)


@dataclass(frozen=True)
class Session:
    """One server's decisions.

    Attributes:
        inventory: the checkpoint, checked.
        linears: every linear layer of the model.
        plan: precision of each of them.
        backend: what computes the quantized ones; None when there are none.
        backend_reason: why this backend.
        fused: a FastH3 adapter that becomes a part of the DiT's weights while they load.
    """

    inventory: Inventory
    linears: tuple[LinearSpec, ...]
    plan: PrecisionPlan
    backend: QuantBackend | None
    backend_reason: str
    fused: Adapter | None = None


def open_session(od_config: Any) -> Session:
    """Check the checkpoint, resolve the recipe, choose the backend and ask it about every layer.

    Args:
        od_config: the host's ``OmniDiffusionConfig`` with its own quantization config still in place.

    Raises:
        CheckpointError, RecipeError, BackendError, UsageError, SettingsError: whatever is wrong, before any weight is
            read and before the model is built.
    """
    recipe = resolve_recipe(requested_method(od_config.quantization_config), settings.load().recipe)
    task = getattr(od_config, "task_type", None)
    inventory = take_inventory(Path(str(od_config.model)), None if task == "auto" else task)
    return make_session(recipe, inventory.require_clean(), current_omni_platform.get_torch_device())


def make_session(recipe: Recipe, inventory: Inventory, device: torch.device) -> Session:
    """:func:`open_session` for a recipe, an inventory and a device that are at hand."""
    linears = linear_layers(*model_configs(inventory))
    precision_plan = plan(recipe, linears)
    if not precision_plan.quantized:
        return Session(inventory, linears, precision_plan, None, "the recipe quantizes nothing")
    facts = system_facts(device)
    assert recipe.method is not None  # a recipe that quantizes has one
    backend, reason = choose_backend(None, facts, recipe.method)
    logger.info("recipe %s on backend %s: %s", recipe.name, backend.name, reason)
    for spec in linears:
        precision = precision_plan[spec.path].precision
        if not precision.quantized:
            continue
        layer = LayerFacts(
            spec.path, spec.in_features, spec.out_features, spec.bias, precision, facts.device, facts.capability
        )
        support = backend.supports(layer)
        if not support:
            raise BackendError(
                f"backend {backend.name} cannot compute {spec.path} in {precision.value}",
                why=support.reason,
                fix="Give this layer bf16 in a recipe of your own.",
                path=spec.path,
            )
    return Session(inventory, linears, precision_plan, backend, reason)


def model_configs(inventory: Inventory) -> tuple[DitConfig, TextEncoderConfig]:
    """The configs of a clean inventory's first partition (where two are served, the host gives both one shape)."""
    partition: PartitionInventory = inventory.partitions[0]
    assert partition.dit is not None and partition.text is not None  # require_clean has passed
    return partition.dit, partition.text


def give_dit_config(od_config: Any, inventory: Inventory) -> None:
    """Put the DiT's config where the host's constructor reads it, when both partitions are served.

    The host then looks for ``transformer/config.json`` in the root (0.30.0 and 0.28.0: the path of ``combined`` is the
    root), where there is none, and would build the real model's widths whatever the partitions hold.

    Raises:
        CheckpointError: the two DiTs have different shapes.
    """
    if len(inventory.partitions) == 1:
        return
    shapes_of(inventory)
    path = inventory.partitions[0].path / "transformer" / "config.json"
    od_config.tf_model_config = TransformerConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))


def requested_method(quantization_config: Any) -> str | None:
    """The word after ``--quantization``, from the config that the host built of it.

    Raises:
        UsageError: a per-component config, which would name parts that a recipe names by module path.
    """
    if quantization_config is None:
        return None
    name = str(quantization_config.get_name())
    if name == "component":
        raise UsageError(
            "a per-component --diffusion-quantization-config was given for H3",
            why="H3's precisions come from one recipe, by module path",
            fix="Drop the flag and name a recipe in H3_RECIPE, for example fp8-text-bf16.",
        )
    return name
