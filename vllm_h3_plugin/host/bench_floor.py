# SPDX-License-Identifier: Apache-2.0
"""The floor under a step: its matrix multiplications and its attention, back to back, and nothing between them.

The same kernels on the same shapes, with operands that are quantized already, replayed as one CUDA graph. A sum of
kernel times would be lower and could not be reached: under sustained load a GPU clocks down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from vllm_h3_plugin.attention.exact import Run
from vllm_h3_plugin.attention.prefix_sdpa import prefix_sdpa
from vllm_h3_plugin.checkpoint.configs import DitConfig
from vllm_h3_plugin.errors import BackendError
from vllm_h3_plugin.host.bench_clock import device_ms, in_turns, reason_of
from vllm_h3_plugin.quantization.activation import QuantizedActivation
from vllm_h3_plugin.quantization.contract import Packed, QuantBackend, choose_backend
from vllm_h3_plugin.quantization.cutlass_fp8 import system_facts
from vllm_h3_plugin.quantization.precision import Precision

_CLOSE = 1.15
"""Kernels within this factor of the best on a few heads are timed on all of them."""


def block_flops(config: DitConfig, rows: int, keys: int) -> int:
    """Of one block: four linears on ``rows`` tokens, attention of all rows over ``keys``."""
    hidden, inner, ffn = config.hidden_size, config.inner_size, config.ffn_hidden_size
    return 2 * rows * (4 * hidden * inner + 3 * hidden * ffn) + 4 * rows * keys * inner


class FloorWeights:
    """FP8 weights of the blocks' linears, ``N(0, 1/K)``; each block has its own, as no cache holds a model."""

    def __init__(self, config: DitConfig, layers: int, device: torch.device) -> None:
        self.config, self.device = config, device
        self.backend: QuantBackend = choose_backend(None, system_facts(device))[0]
        hidden, inner, ffn = config.hidden_size, config.inner_size, config.ffn_hidden_size
        shapes = ((3 * inner, hidden), (hidden, inner), (2 * ffn, hidden), (hidden, ffn))
        self.blocks = [[self._weight(n, k) for n, k in shapes] for _ in range(layers)]

    def _weight(self, n: int, k: int) -> Packed:
        values = torch.randn(n, k, device=self.device, dtype=torch.bfloat16) * k**-0.5
        return self.backend.pack(*self.backend.quantize_weight(values, Precision.FP8_CHANNEL, path="floor"))


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


def floor(weights: FloorWeights, layers: int, rows: int, keys: int) -> Floor:
    """Record the floor of the first ``layers`` blocks.

    Args:
        rows: of the packed sequence.
        keys: of them that hold tokens.
    """
    config, backend, device = weights.config, weights.backend, weights.device
    heads, dim = config.num_attention_heads, config.attention_head_dim
    scale = dim**-0.5

    def operand(k: int) -> QuantizedActivation:
        return QuantizedActivation(*backend.quantize_tokens(torch.randn(rows, k, device=device, dtype=torch.bfloat16)))

    hidden, inner, ffn = operand(config.hidden_size), operand(config.inner_size), operand(config.ffn_hidden_size)

    def split(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (part.view(1, rows, heads, dim) for part in qkv.chunk(3, dim=-1))
        return q, k[:, :keys], v[:, :keys]

    def step(attend: Run) -> None:
        for qkv, out_proj, fc1, fc2 in weights.blocks[:layers]:
            attend(*split(backend.matmul(hidden, qkv, None)), scale)
            backend.matmul(inner, out_proj, None)
            backend.matmul(hidden, fc1, None)
            backend.matmul(ffn, fc2, None)

    fastest = fastest_attention(*split(backend.matmul(hidden, weights.blocks[0][0], None)), scale)
    flops = layers * block_flops(config, rows, keys)
    if device.type != "cuda":
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
