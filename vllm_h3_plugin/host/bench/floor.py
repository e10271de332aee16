# SPDX-License-Identifier: Apache-2.0
"""The floor under a step: its matrix multiplications and its attention, back to back, and nothing between them.

The same kernels on the very operands of a step of the plugin, replayed as one CUDA graph. A sum of kernel times would
be lower and could not be reached: under sustained load a GPU clocks down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vllm_h3_plugin.attention.exact import Run, valid_prefix
from vllm_h3_plugin.attention.prefix_sdpa import prefix_sdpa
from vllm_h3_plugin.errors import BackendError
from vllm_h3_plugin.host.bench.clock import device_ms, in_turns, reason_of
from vllm_h3_plugin.quantization.activation import QuantizedActivation
from vllm_h3_plugin.quantization.contract import Packed, QuantBackend

_CLOSE = 1.15
"""Kernels within this factor of the best on a few heads are timed on all of them."""


@dataclass
class BlockOperands:
    """What the kernels of one block are given in a step of the plugin.

    Attributes:
        products: layer name -> (quantized activation, resident weight), in the order of computation.
        attention: queries ``[1, rows, heads, head_dim]``, keys and values of the rows that hold tokens.
        scale: of the scores.
    """

    products: dict[str, tuple[QuantizedActivation, Packed]]
    attention: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    scale: float


def operands(blocks: Sequence[Any], step: Callable[[], object]) -> list[BlockOperands]:
    """Run a step of the plugin and keep what its matrix multiplications and its attention are given.

    The numbers themselves count: on an H200, whose clock follows its power, the same kernels on the same shapes took
    7 % (products) and 14 % (attention) less time on independent random numbers than on those of a model.

    Args:
        blocks: fused ones, that ``step`` runs.

    Raises:
        BackendError: a block does not hand on quantized activations.
    """
    kept: list[dict[str, Any]] = [{} for _ in blocks]
    hooks = []
    for block, into in zip(blocks, kept, strict=True):
        layers = {f"attn.{name}": getattr(block.attn, name) for name in ("qkv_proj", "out_proj")}
        layers |= {f"mlp.{name}": getattr(block.mlp, name) for name in ("fc1", "fc2")}
        for name, layer in {**layers, "attention": block.attn.attention}.items():
            hooks.append(layer.register_forward_pre_hook(partial(_keep, into, name)))
    try:
        step()
    finally:
        for hook in hooks:
            hook.remove()
    return [_block_operands(block, found) for block, found in zip(blocks, kept, strict=True)]


def _keep(into: dict[str, Any], name: str, module: Any, args: tuple[Any, ...]) -> None:
    into[name] = args


def _block_operands(block: Any, found: dict[str, Any]) -> BlockOperands:
    products = {}
    for name in ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2"):
        layer = block.get_submodule(name)
        activation = found[name][0]
        if not isinstance(activation, QuantizedActivation):
            raise BackendError(
                "the floor has no operands",
                why=f"the plugin's blocks are not fused: {name} was given {type(activation)}",
            )
        products[name] = (activation, Packed(layer.weight, layer.weight_scale))
    q, k, v, metadata = found["attention"]
    valid = int(metadata.extra.get("valid_kv_length", k.shape[1]))
    return BlockOperands(products, (q, *valid_prefix(k, v, valid)), block.attn.attention.softmax_scale)


@dataclass
class Floor:
    """The kernels of some blocks at one size.

    Attributes:
        replay: runs them once.
        attention: name of the attention kernel, and why faster ones were not taken.
        graph: whether it is one CUDA graph; on the CPU it is not.
        flops: of one replay.
    """

    replay: Callable[[], object]
    attention: str
    graph: bool
    flops: int


def floor(blocks: Sequence[BlockOperands], backend: QuantBackend, flops: int) -> Floor:
    """Record the kernels of some blocks.

    Args:
        flops: of all of them.

    Raises:
        BackendError: no attention kernel can be recorded.
    """

    def step(attend: Run) -> None:
        for block in blocks:
            (_, qkv), (_, out_proj), *mlp = block.products.items()
            backend.matmul(*qkv, None)
            attend(*block.attention, block.scale)
            backend.matmul(*out_proj, None)
            for _, product in mlp:
                backend.matmul(*product, None)

    fastest = fastest_attention(*blocks[0].attention, blocks[0].scale)
    if blocks[0].attention[0].device.type != "cuda":
        name, attend = fastest[0]
        return Floor(partial(step, attend), name, False, flops)
    refused = []
    for name, attend in fastest:
        try:
            replay = _record(partial(step, attend))
        except Exception as exc:  # noqa: BLE001 - a kernel may raise anything while a graph is recorded
            refused.append(f"{name} cannot be recorded: {reason_of(exc)}")
            continue
        return Floor(replay, "; ".join([name, *refused]), True, flops)
    raise BackendError("no attention kernel can be recorded into a CUDA graph", why="; ".join(refused))


def _record(work: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def fastest_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> list[tuple[str, Run]]:
    """Names of exact kernels that are near the best on these tensors, and how they are run; the fastest first.

    The order in which a device prefers them does not count here.
    """
    if q.device.type != "cuda":
        return [
            (
                "torch's on the CPU",
                lambda q, k, v, scale: prefix_sdpa(q, k, v, valid=k.shape[1], scale=scale, causal=False),
            )
        ]
    from vllm_h3_plugin.attention.device import cuda_chooser, device_capability, device_facts, find_flash
    from vllm_h3_plugin.attention.exact import exact_kernels

    # Which run here at all, and which are near the best, is the chooser's knowledge.
    chooser = cuda_chooser(q.device, None, lambda words: None)
    taken = chooser.kernel(q, k, v, scale)
    times = chooser.choices[-1].milliseconds or {taken.name: 0.0}
    close = {name for name, ms in times.items() if ms <= _CLOSE * min(times.values())} | {taken.name}
    flash = find_flash(device_capability(q.device))
    every = exact_kernels(device_facts(q.device, flash), flash.function if flash else None)
    runs = {kernel.name: kernel.run for kernel in every if kernel.name in close}
    whole, _ = in_turns(
        {
            name: lambda run=run: device_ms([lambda: run(q, k, v, scale)], q.device, 2)  # type: ignore[misc]
            for name, run in runs.items()
        },
        2,
        warm=1,
    )
    return [(name, runs[name]) for name in sorted(whole, key=lambda name: whole[name])]
