# SPDX-License-Identifier: Apache-2.0
"""Stages leave the device and come back equal to the byte; who goes first is the policy's to say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_h3_plugin.errors import LoadError, SettingsError
from vllm_h3_plugin.memory import hot_cache
from vllm_h3_plugin.memory.hot_cache import HostCopy, HotCache, Policy

ORDER = ("text_encoder", "dit", "vae")


def stages(budget: int | None = None, policy: Policy = "cycle") -> tuple[HotCache, dict[str, torch.nn.Linear]]:
    """Three stages of 1, 2 and 3 KiB."""
    cache = HotCache(ORDER, budget, policy)
    modules = {name: torch.nn.Linear(16, 16 * rows, bias=False) for rows, name in enumerate(ORDER, 1)}
    for name, module in modules.items():
        cache.add(name, dict(module.named_parameters()))
    return cache, modules


def test_twenty_swaps_leave_every_byte_as_it_was() -> None:
    cache, modules = stages()
    before = {name: module.weight.detach().clone() for name, module in modules.items()}
    cache.settle()
    for _ in range(20):
        for name in ORDER:
            with cache.use(name):
                assert torch.equal(modules[name].weight, before[name])
    assert cache.facts()["dit"]["reloads"] >= 19


def test_a_dropped_stage_holds_no_device_memory_and_keeps_what_it_comes_back_from() -> None:
    cache, modules = stages()
    cache.drop("vae")
    assert modules["vae"].weight.data.untyped_storage().nbytes() == 0 and cache.resident == ("text_encoder", "dit")
    with pytest.raises(RuntimeError, match=r"size mismatch|inconsistent|shape"):
        modules["vae"](torch.zeros(2, 16))
    with cache.use("vae"):
        assert modules["vae"](torch.zeros(2, 16)).shape == (2, 48)


def test_tensors_that_share_a_storage_share_it_again() -> None:
    cache, memory = HotCache(("dit",)), torch.arange(24.0)
    first, second = torch.nn.Parameter(memory[4:10].view(2, 3).t()), memory[6:]
    cache.add("dit", {"first": first, "second": second})
    before = first.detach().clone(), second.clone()
    cache.drop("dit")
    assert first.numel() == second.numel() == 0
    with torch.inference_mode(), cache.use("dit"):
        assert torch.equal(first, before[0]) and torch.equal(second, before[1]) and first.stride() == (1, 3)
        assert first.data.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_without_a_budget_the_largest_stage_fits_and_settling_evicts_what_comes_last() -> None:
    cache, _ = stages()
    assert cache.budget == 3072
    cache.settle()
    assert cache.resident == ("text_encoder", "dit")


@pytest.mark.parametrize(("policy", "evicted"), [("cycle", "text_encoder"), ("lru", "vae")])
def test_the_policy_says_who_goes_first(policy: Policy, evicted: str) -> None:
    """The DiT is asked for: after it comes the VAE, and then the text encoder, which was used last."""
    cache, _ = stages(6 << 10, policy)
    for name in ("dit", "vae", "text_encoder"):
        with cache.use(name):
            pass
    cache.drop("dit")
    cache._budget = 5 << 10
    with cache.use("dit"):
        assert set(ORDER) - set(cache.resident) == {evicted}


def test_a_stage_in_use_is_not_evicted_and_the_budget_is_named() -> None:
    cache, _ = stages(3072)
    cache.settle()
    with (
        cache.use("dit"),
        pytest.raises(SettingsError, match=r"stage vae of 0\.00 GiB does not fit") as caught,
        cache.use("vae"),
    ):
        pass
    assert "H3_RESIDENT_GIB" in caught.value.fix and "dit" in caught.value.why
    with cache.use("dit"), pytest.raises(LoadError, match="stage dit is in use"):
        cache.drop("dit")


@pytest.mark.parametrize("slot_bytes", [None, 1 << 20, 1000002])
def test_bytes_of_another_source_are_each_read_once(slot_bytes: int | None) -> None:
    """Through a slot piece by piece; without one, as on the CPU, into the new memory itself."""
    module = torch.nn.Linear(1024, 1024, bias=False)
    before = module.weight.detach().clone()
    seen: list[tuple[int, int]] = []

    class Bytes:
        def __init__(self, data: torch.Tensor) -> None:
            self.copy = HostCopy(data)

        def read_into(self, out: torch.Tensor, offset: int) -> None:
            seen.append((offset, out.numel()))
            self.copy.read_into(out, offset)

    cache = HotCache(("dit",), slot_bytes=slot_bytes)
    cache.add("dit", {"weight": module.weight}, lambda name, data: Bytes(data))
    cache.drop("dit")
    with cache.use("dit"):
        assert torch.equal(module.weight, before)
    assert sum(size for _, size in seen) == before.nbytes and (len(seen) == 1) == (slot_bytes is None)
    assert cache.facts()["dit"]["host_copy_bytes"] == 0


def test_a_copy_to_a_device_whose_events_are_unknown_is_waited_for() -> None:
    """The slot is filled again as soon as it is said to be free."""
    asked: list[dict[str, object]] = []
    card = SimpleNamespace(device=SimpleNamespace(type="npu"), copy_=lambda part, **how: asked.append(how))
    assert hot_cache._send(card, torch.zeros(4)) is None  # type: ignore[arg-type]
    assert asked == [{}], "not in the background"


def test_a_stage_without_a_turn_is_refused() -> None:
    with pytest.raises(LoadError, match="stage upscaler is not one of"):
        HotCache(ORDER).add("upscaler", {})
