# SPDX-License-Identifier: Apache-2.0
"""The loader contract: named tensors fill a model's parameters through the model's own weight loaders, exactly once.

A *placement* says which parameter, and which shard of it, a checkpoint tensor fills, and how its rows are laid out
there. Placements are planned from names alone, before a byte of weights is read, so a missing, surplus or doubled
tensor costs no memory. Then each tensor goes through ``param.weight_loader`` with the arity that loader has: two
arguments for a whole parameter, three where a shard is named. Both accelerators load through this module.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_h3_plugin.errors import LoadError

Shard = str | int | None
Rows = Callable[[torch.Tensor], torch.Tensor]

Stage = Callable[[tuple["Placement", ...], torch.Tensor], torch.Tensor]
Put = Callable[["Placement", torch.Tensor, torch.Tensor], None]

# The shard sets that fill a parameter: whole, fused gate/up, fused q/k/v.
_COMPLETE: tuple[frozenset[Shard], ...] = (frozenset({None}), frozenset({0, 1}), frozenset({"q", "k", "v"}))


@dataclass(frozen=True)
class Placement:
    """Where one checkpoint tensor (or a part of its rows) goes."""

    param: str
    shard: Shard = None
    rows: Rows | None = None
    """Picks and orders the rows of the checkpoint tensor; None takes it as it is."""


@dataclass(frozen=True)
class LoadReport:
    """What a load filled."""

    params: frozenset[str]
    tensors: int
    nbytes: int


def ungroup_qkv(weight: torch.Tensor, *, heads: int, head_dim: int) -> torch.Tensor:
    """Reorder rows grouped per head ``[q_h, k_h, v_h]`` into ``[q, k, v]``.

    Args:
        weight: ``[heads * 3 * head_dim, in_features]``, native checkpoint layout.

    Returns:
        ``[3 * heads * head_dim, in_features]``: all query rows, then all key rows, then all value rows. To be applied
        exactly once: the result has the same shape, so a second application would go unnoticed by any shape check.

    Raises:
        LoadError: the first dimension does not fit the head counts.
    """
    if weight.shape[0] != heads * 3 * head_dim:
        raise LoadError(
            f"qkv weight has {weight.shape[0]} rows",
            why=f"{heads} heads of {head_dim} need {heads * 3 * head_dim} (q, k and v per head)",
            fix="Check num_attention_heads and attention_head_dim in transformer/config.json.",
        )
    return weight.view(heads, 3, head_dim, -1).transpose(0, 1).reshape(weight.shape)


def first_half(weight: torch.Tensor) -> torch.Tensor:
    """Rows of the first of two equal parts (native fc1: the gate)."""
    return weight[: weight.shape[0] // 2]


def second_half(weight: torch.Tensor) -> torch.Tensor:
    """Rows of the second of two equal parts (native fc1: the up projection)."""
    return weight[weight.shape[0] // 2 :]


def plan(
    names: Iterable[str], params: Mapping[str, torch.Tensor], place: Callable[[str], tuple[Placement, ...] | None]
) -> dict[str, tuple[Placement, ...]]:
    """Place every checkpoint tensor, before any of them is read.

    Args:
        names: names of the checkpoint's tensors.
        params: the model's parameters and persistent buffers by name.
        place: the placements of a name; an empty tuple for a tensor that the model does not use on purpose; None for
            one that it does not know.

    Raises:
        LoadError: a tensor that nothing wants, a parameter that nothing fills, one that is filled twice, or one whose
            shards are not all there.
    """
    placements: dict[str, tuple[Placement, ...]] = {}
    filled: dict[str, dict[Shard, str]] = defaultdict(dict)
    for name in names:
        targets = place(name)
        unknown = targets is None or any(target.param not in params for target in targets)
        if unknown:
            raise LoadError(
                f"tensor {name} fits no parameter of the model",
                why="checkpoint and model disagree about names",
                fix="Run `vllm-h3 inspect` on the checkpoint.",
                tensor=name,
            )
        assert targets is not None
        placements[name] = targets
        for target in targets:
            earlier = filled[target.param].setdefault(target.shard, name)
            if earlier != name:
                raise LoadError(
                    f"parameter {_label(target)} is filled twice",
                    why=f"by {earlier} and by {name}",
                    fix="Run `vllm-h3 inspect` on the checkpoint: one of the two does not belong there.",
                    parameter=target.param,
                )
    for param, shards in filled.items():
        if frozenset(shards) not in _COMPLETE:
            raise LoadError(
                f"parameter {param} is filled only in part",
                why=f"the checkpoint has shards {sorted(map(str, shards))}, from {sorted(shards.values())}",
                fix="A tensor is missing; run `vllm-h3 inspect` on the checkpoint.",
                parameter=param,
            )
    unfilled = sorted(set(params) - set(filled))
    if unfilled:
        raise LoadError(
            f"parameter {unfilled[0]} is filled by no tensor",
            why=f"{len(unfilled)} of {len(params)} parameters have no source",
            fix="Run `vllm-h3 inspect` on the checkpoint.",
            parameters=unfilled,
        )
    return placements


def fill(
    params: Mapping[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    placements: Mapping[str, tuple[Placement, ...]],
    *,
    stage: Stage = lambda targets, tensor: tensor,
    put: Put | None = None,
) -> LoadReport:
    """Send each tensor through the weight loaders of the parameters that it fills.

    Args:
        params: the model's parameters by name, as passed to :func:`plan`.
        tensors: (name, tensor on the CPU) in any order; each is read once and may be reused by its source afterwards.
        placements: the result of :func:`plan`.
        stage: gets a tensor and its placements before its rows are ordered; may move it to another device.
        put: gets (placement, parameter, rows) instead of :func:`call_weight_loader`; may quantize before it calls it.

    Raises:
        LoadError: a tensor comes twice or not at all, or a weight loader cannot take what the placement needs.
    """
    put = put or call_weight_loader
    open_shards = {(target.param, target.shard): name for name, targets in placements.items() for target in targets}
    count = nbytes = 0
    for name, tensor in tensors:
        if name not in placements:
            raise LoadError(f"tensor {name} was not planned for", why="the checkpoint changed since it was inspected")
        count += 1
        nbytes += tensor.nbytes
        staged = stage(placements[name], tensor)
        for target in placements[name]:
            if open_shards.pop((target.param, target.shard), None) is None:
                raise LoadError(
                    f"parameter {_label(target)} was filled twice",
                    why=f"tensor {name} came more than once",
                    fix="Run `vllm-h3 inspect` on the checkpoint.",
                )
            put(target, params[target.param], target.rows(staged) if target.rows else staged)
    if open_shards:
        (param, shard), name = next(iter(open_shards.items()))
        raise LoadError(
            f"parameter {_label(Placement(param, shard))} was not filled",
            why=f"tensor {name} never came; {len(open_shards)} shards are open",
            fix="Run `vllm-h3 inspect` on the checkpoint.",
            open=[f"{p}[{s}]" for p, s in open_shards],
        )
    return LoadReport(frozenset(t.param for ts in placements.values() for t in ts), count, nbytes)


def call_weight_loader(target: Placement, param: torch.Tensor, tensor: torch.Tensor) -> None:
    """Call ``param.weight_loader`` with two arguments, or three where the placement names a shard.

    Raises:
        LoadError: the loader cannot be called so, or the shapes differ where there is no loader.
    """
    loader = getattr(param, "weight_loader", None)
    if loader is None:
        _copy(target, param, tensor)
        return
    args: tuple[Any, ...] = (param, tensor) if target.shard is None else (param, tensor, target.shard)
    try:
        inspect.signature(loader).bind(*args)
    except TypeError as exc:
        raise LoadError(
            f"the weight loader of {_label(target)} does not take {len(args)} arguments",
            why=f"{getattr(loader, '__qualname__', loader)}: {exc}",
            fix="The host or another plugin replaced the loader with one of another arity; run `vllm-h3 doctor`.",
            parameter=target.param,
        ) from exc
    loader(*args)


def _copy(target: Placement, param: torch.Tensor, tensor: torch.Tensor) -> None:
    if target.shard is not None:
        raise LoadError(
            f"parameter {_label(target)} has no weight loader", why="a shard can only be placed by the layer's own"
        )
    if param.shape != tensor.shape:
        raise LoadError(
            f"parameter {target.param} is {list(param.shape)}",
            why=f"the checkpoint's tensor is {list(tensor.shape)}",
            fix="Check transformer/config.json against the weights.",
        )
    param.data.copy_(tensor)


def _label(target: Placement) -> str:
    return target.param if target.shard is None else f"{target.param}[{target.shard}]"


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of a module by name: what a checkpoint has to fill."""
    return dict(_persistent(module))


def _persistent(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer
