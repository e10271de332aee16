# SPDX-License-Identifier: Apache-2.0
"""Stages that leave a CUDA device and come back through the page-locked slot, equal to the byte."""

from __future__ import annotations

import torch

from vllm_h3_plugin.memory.hot_cache import HostCopy, HotCache

MIB = 300


class Bytes:
    """A source that is no host copy, as the shared base is."""

    def __init__(self, data: torch.Tensor) -> None:
        self._copy = HostCopy(data)

    def read_into(self, out: torch.Tensor, offset: int) -> None:
        self._copy.read_into(out, offset)


def test_twenty_swaps_through_the_slot_free_the_device_and_leave_every_byte() -> None:
    """300 MiB take more than two turns of a slot of 128 MiB."""
    weight = torch.randint(-128, 127, (MIB, 1 << 20), dtype=torch.int8, device="cuda")
    before = weight.cpu()
    cache = HotCache(("dit",))
    cache.add("dit", {"weight": weight}, lambda name, data: Bytes(data))
    held = torch.cuda.memory_allocated()
    for _ in range(20):
        cache.drop("dit")
        assert torch.cuda.memory_allocated() <= held - (MIB << 20)
        with cache.use("dit"):
            assert torch.equal(weight.cpu(), before)
