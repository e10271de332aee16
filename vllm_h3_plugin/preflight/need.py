# SPDX-License-Identifier: Apache-2.0
"""What a recipe needs of memory and disk, predicted from the checkpoint's headers, or from the real model's sizes."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_h3_plugin.checkpoint.inventory import Inventory
from vllm_h3_plugin.checkpoint.layout import linear_layers
from vllm_h3_plugin.memory.activations import predict_peak
from vllm_h3_plugin.memory.coefficients import DEFAULT
from vllm_h3_plugin.memory.requests import RequestSize
from vllm_h3_plugin.memory.weights import ModelShapes, predict_resident, shapes_of
from vllm_h3_plugin.quantization.plan import plan
from vllm_h3_plugin.quantization.recipe import load_recipe

GIB = 2**30

CLASSIC_GATE = 105 * GIB
"""MemAvailable that published set-ups of one Spark ask for before they start a server whose AdaLN weights stay
resident."""

USUAL_CLIP = RequestSize(768, 448, 124)
"""The clip that must fit beside the model: 5 s at 768x448."""

_SNAPSHOT_PARTS = ("dit", "refiner", "text_encoder")


@dataclass(frozen=True)
class Need:
    """Bytes.

    Attributes:
        recipe: its name.
        model: the checkpoint's path, or ``true size``.
        resident: what the server holds once it is ready, its processes included.
        load_peak: most that the device holds while the server loads.
        clip: peak of :data:`USUAL_CLIP` on top; device and host together.
        clip_device: the device's share of it.
        classic: whether :data:`CLASSIC_GATE` applies.
        snapshot: upper bound of the quantized snapshot's size; 0 if nothing is quantized.
        table: of the default schedule's AdaLN table; 0 if the recipe keeps the weights.
    """

    recipe: str
    model: str
    resident: int
    load_peak: int
    clip: int
    clip_device: int
    classic: bool
    snapshot: int
    table: int


def need_of(recipe_name: str, inventory: Inventory | None) -> Need:
    """Predict the need of a recipe.

    Args:
        inventory: of a sound checkpoint; None for the real model's sizes.

    Raises:
        RecipeError: the recipe cannot be read or does not fit the model.
        CheckpointError: the inventory has a fault.
    """
    shapes = ModelShapes() if inventory is None else shapes_of(inventory)
    recipe = load_recipe(recipe_name)
    precision = plan(recipe, linear_layers(shapes.dit, shapes.text))
    resident = predict_resident(shapes, precision)
    quantized = bool(precision.quantized)
    peak = predict_peak(shapes, USUAL_CLIP, quantized=quantized)
    processes = DEFAULT.process_bytes
    return Need(
        recipe=recipe.name,
        model=shapes.name,
        resident=resident.nbytes + processes,
        load_peak=resident.load_peak_bytes + processes,
        clip=peak.unified_bytes,
        clip_device=peak.device_bytes,
        classic=resident.table is None,
        snapshot=sum(resident.parts.get(part, 0) for part in _SNAPSHOT_PARTS) if quantized else 0,
        table=0 if resident.table is None else resident.table.nbytes,
    )
