# SPDX-License-Identifier: Apache-2.0
"""What attention in few bits gains and what it costs: a step of the plugin beside the same one with cuDNN in BF16."""

from __future__ import annotations

from typing import Any

import torch

from vllm_h3_plugin.attention.exact import pinned_sdpa
from vllm_h3_plugin.host.attention import ChosenBackend, PrefixImpl, install
from vllm_h3_plugin.host.bench.clock import in_turns, wall_ms
from vllm_h3_plugin.host.bench.step_cells import LowBit
from vllm_h3_plugin.host.bench.step_models import Model, Request, attention_as
from vllm_h3_plugin.memory.requests import RequestSize
from vllm_h3_plugin.quantization.recipe import AttentionPrecision


def put_cudnn(dit: torch.nn.Module) -> None:
    """cuDNN's BF16 attention in the blocks; the refiner keeps what it has."""
    for block in dit.blocks:  # type: ignore[union-attr]
        layer: Any = block.attn.attention
        layer.attn_backend = ChosenBackend
        layer.attention = PrefixImpl(pinned_sdpa("cudnn"), layer.softmax_scale)


class _Beside:
    """Runs exact attention and hands its result on; the other's difference is kept."""

    def __init__(self, exact: Any, other: Any) -> None:
        self.exact, self.other, self.error = exact, other, 0.0

    def forward(self, *args: Any) -> torch.Tensor:
        want: torch.Tensor = self.exact.forward(*args)
        got = self.other.forward(*args)
        self.error = ((got.float() - want.float()).norm() / want.float().norm()).item()
        return want


def measure(
    model: Model, size: RequestSize, device: torch.device, rounds: int, precision: AttentionPrecision
) -> LowBit:
    """Compare on one request.

    Raises:
        BackendError: the precision cannot run here; says why.
    """
    dit = model.dit
    request = Request(model, size, device)

    def low_bit() -> None:
        install(dit, precision=precision)

    with attention_as(dit, low_bit):
        other = [block.attn.attention.attention for block in dit.blocks]
        few = [rows.float() for rows in request.forward()]
    with attention_as(dit, lambda: put_cudnn(dit)):
        exact = [rows.float() for rows in request.forward()]
        beside = [_Beside(block.attn.attention.attention, own) for block, own in zip(dit.blocks, other, strict=True)]
        for block, both in zip(dit.blocks, beside, strict=True):
            block.attn.attention.attention = both
        request.forward()

    def turn(kernels: list[Any]) -> float:
        def put() -> None:
            put_cudnn(dit)
            for block, kernel in zip(dit.blocks, kernels, strict=True):
                block.attn.attention.attention = kernel

        with attention_as(dit, put):
            return wall_ms(request.forward, device)

    exact_kernels = [both.exact for both in beside]
    times, failed = in_turns({"exact": lambda: turn(exact_kernels), "low bit": lambda: turn(other)}, rounds, warm=1)
    if failed:
        raise RuntimeError("; ".join(failed.values()))
    joined = [torch.cat([rows.flatten() for rows in result]) for result in (exact, few)]
    return LowBit(
        size=size,
        precision=precision.value,
        exact_ms=times["exact"],
        low_bit_ms=times["low bit"],
        cosine=torch.nn.functional.cosine_similarity(joined[0].double(), joined[1].double(), dim=0).item(),
        layer_errors={f"block {index}": both.error for index, both in enumerate(beside)},
        layers=len(beside),
    )
