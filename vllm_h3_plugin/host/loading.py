# SPDX-License-Identifier: Apache-2.0
"""From the checkpoint's files into the host's modules, and the proof that every parameter was filled once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from vllm_h3_plugin.checkpoint.dit_placement import ROPE, diffusers_placement, native_placement, rope_inv_freq
from vllm_h3_plugin.checkpoint.layout import DitConfig
from vllm_h3_plugin.checkpoint.loader import LoadReport, Placement, fill, plan, tensors_of
from vllm_h3_plugin.errors import LoadError
from vllm_h3_plugin.quantization.plan import PrecisionPlan
from vllm_h3_plugin.quantization.precision import Precision

Tensors = Iterable[tuple[str, torch.Tensor]]

_RESIDENT_DTYPE = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP8_CHANNEL: torch.float8_e4m3fn,
    Precision.FP8_TENSOR: torch.float8_e4m3fn,
}


def load_dit(
    dit: torch.nn.Module, names: Iterable[str], tensors: Tensors, *, config: DitConfig, diffusers: bool
) -> LoadReport:
    """Fill the host's DiT from either layout.

    Args:
        dit: the host's ``MiniMaxH3DiTModel``, parameters still unfilled (quantized ones on the meta device).
        names: every tensor name of the checkpoint's DiT; the load is planned from them before a tensor is read.
        tensors: the same names with their tensors.
        config: the checkpoint's DiT config.
        diffusers: whether the names are those of the Diffusers layout.

    Raises:
        LoadError: see :mod:`vllm_h3_plugin.checkpoint.loader`.
    """
    if diffusers:
        names = (*names, ROPE)
        tensors = _with_rope(tensors, config)
    place = diffusers_placement(config) if diffusers else native_placement(config)
    params = tensors_of(dit)
    report = fill(params, tensors, plan(names, params, place))
    require_complete(dit, "transformer")
    return report


def _with_rope(tensors: Tensors, config: DitConfig) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors
    yield ROPE, rope_inv_freq(config.rope_inv_freq_len)


def load_text_encoder(encoder: Any, names: Iterable[str], tensors: Tensors) -> LoadReport:
    """Fill the host's text encoder; its own name map says what goes where (encoder.py ``_map_weight_name``)."""

    def place(name: str) -> tuple[Placement, ...]:
        mapped = encoder._map_weight_name(name)
        return () if mapped is None else (Placement(*mapped),)

    params = dict(encoder.named_parameters())
    report = fill(params, tensors, plan(names, params, place))
    require_complete(encoder, "text_encoder")
    return report


def require_complete(module: torch.nn.Module, part: str) -> None:
    """Refuse a layer that the host's layer-wise loading still waits for.

    The host would finalize it as it is, rows unfilled (layerwise.py ``finalize_layerwise_processing``).

    Raises:
        LoadError: names the layer and how much of it came.
    """
    for name, layer in module.named_modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.load_numel_total:
            raise LoadError(
                f"{part}.{name} is filled only in part",
                why=f"{info.load_numel} of {info.load_numel_total} elements came",
                fix="Run `vllm-h3 inspect` on the checkpoint, and `vllm-h3 doctor` on the host.",
                path=f"{part}.{name}",
            )
    for name, tensor in tensors_of(module).items():
        if tensor.is_meta:
            raise LoadError(f"{part}.{name} was never materialized", why="its tensors did not come", path=name)


def check_precisions(module: torch.nn.Module, part: str, plan: PrecisionPlan) -> dict[str, int]:
    """Hold every loaded linear layer against the plan: element type and number of scales.

    Args:
        module: a loaded DiT or text encoder.
        part: ``transformer`` or ``text_encoder``.

    Returns:
        Number of linear layers by precision.

    Raises:
        LoadError: a layer is resident in another precision than the recipe gives it.
    """
    counts: dict[str, int] = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, (LinearBase, torch.nn.Linear)):
            continue
        path = f"{part}.{name}"
        precision = plan[path].precision
        wanted, found = _RESIDENT_DTYPE[precision], layer.weight.dtype
        scales = getattr(layer, "weight_scale", None)
        rows = max(layer.weight.shape) if scales is None else layer.output_size_per_partition
        want_scales = precision.scale_count(rows)
        if found is not wanted or (0 if scales is None else scales.numel()) != want_scales:
            raise LoadError(
                f"{path} is resident as {found} with {0 if scales is None else scales.numel()} scales",
                why=f"the recipe gives it {precision.value}: {wanted} with {want_scales} scales",
                fix="Another plugin or a host of another version changed the layer; run `vllm-h3 doctor`.",
                path=path,
            )
        counts[precision.value] = counts.get(precision.value, 0) + 1
    return counts
