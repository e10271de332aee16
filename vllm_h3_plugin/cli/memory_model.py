# SPDX-License-Identifier: Apache-2.0
"""The model that ``vllm-h3 memory`` is asked about: a checkpoint or the real sizes, and what is added to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_h3_plugin.errors import UsageError

if TYPE_CHECKING:
    from vllm_h3_plugin.memory.weights import ModelShapes


def shapes_asked(checkpoint: Path | None, true_size: bool, both: bool, lora: Path | None) -> ModelShapes:
    """Shapes to predict from.

    Raises:
        UsageError: no model or two were named, or ``--both`` of a checkpoint.
        CheckpointError, AdapterError: what is wrong with either.
    """
    from vllm_h3_plugin.checkpoint.adapter import check_adapter

    shapes = _model(checkpoint, true_size, both)
    if lora is None:
        return shapes
    adapter = check_adapter(lora, shapes.dit)
    # A fused adapter becomes part of the weights and takes no bytes of its own.
    return replace(shapes, adapter_bytes=0 if adapter.fused else adapter.nbytes)


def _model(checkpoint: Path | None, true_size: bool, both: bool) -> ModelShapes:
    from vllm_h3_plugin.checkpoint.inventory import ANY_TASK, take_inventory
    from vllm_h3_plugin.memory.weights import ModelShapes, shapes_of

    if true_size and checkpoint is not None:
        raise UsageError(
            f"--true-size and {checkpoint}", why="they name two models", fix="Give the checkpoint or --true-size."
        )
    if true_size:
        return ModelShapes(second_dit=both)
    if checkpoint is None:
        raise UsageError(
            "no model to count",
            why="neither a checkpoint nor --true-size was given",
            fix="Give the FL2VA folder of a checkpoint, or --true-size for the real model's sizes without one.",
        )
    if both:
        raise UsageError(
            f"--both with {checkpoint}",
            why="a checkpoint says by itself how many partitions it has",
            fix="Give the root that holds FL2VA and Ref2VA, without --both.",
        )
    return shapes_of(take_inventory(checkpoint, ANY_TASK))
