# SPDX-License-Identifier: Apache-2.0
"""Placing and filling: every parameter once, every shard once, faults named before a tensor is read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vllm_h3_plugin.checkpoint.loader import (
    Placement,
    call_weight_loader,
    fill,
    first_half,
    plan,
    second_half,
    tensors_of,
    ungroup_qkv,
)
from vllm_h3_plugin.errors import LoadError


def _param(*shape: int, loader: object = None) -> torch.Tensor:
    param = torch.nn.Parameter(torch.zeros(*shape), requires_grad=False)
    if loader is not None:
        param.weight_loader = loader  # type: ignore[attr-defined]
    return param


def _fused(param: torch.Tensor, tensor: torch.Tensor, shard: int) -> None:
    half = param.shape[0] // 2
    param.data[shard * half : (shard + 1) * half] = tensor


PARAMS = {"norm.weight": _param(4), "fc1.weight": _param(4, 2, loader=_fused)}
PLACES = {
    "norm.weight": (Placement("norm.weight"),),
    "fc1.weight": (Placement("fc1.weight", 0, first_half), Placement("fc1.weight", 1, second_half)),
    "dropped.weight": (),
}
SOURCE = {"norm.weight": torch.ones(4), "fc1.weight": torch.arange(8.0).view(4, 2)}


def test_fill_goes_through_loaders_of_two_and_three_arguments() -> None:
    report = fill(PARAMS, SOURCE.items(), plan(SOURCE, PARAMS, PLACES.get))
    assert torch.equal(PARAMS["norm.weight"], SOURCE["norm.weight"])
    assert torch.equal(PARAMS["fc1.weight"], SOURCE["fc1.weight"])
    assert (report.params, report.tensors, report.nbytes) == (frozenset(PARAMS), 2, 48)


def test_a_tensor_that_the_model_drops_is_no_fault() -> None:
    fill(PARAMS, SOURCE.items(), plan([*SOURCE], PARAMS, PLACES.get))
    assert plan([*SOURCE, "dropped.weight"], PARAMS, PLACES.get)["dropped.weight"] == ()


def test_an_unknown_tensor_is_named_before_anything_is_read() -> None:
    with pytest.raises(LoadError, match=r"extra\.weight fits no parameter"):
        plan([*SOURCE, "extra.weight"], PARAMS, PLACES.get)


def test_an_unfilled_parameter_is_named() -> None:
    with pytest.raises(LoadError, match=r"norm\.weight is filled by no tensor"):
        plan(["fc1.weight"], PARAMS, PLACES.get)


def test_a_missing_shard_is_named() -> None:
    places = {**PLACES, "gate": (Placement("fc1.weight", 0),)}
    with pytest.raises(LoadError, match=r"fc1\.weight is filled only in part"):
        plan(["norm.weight", "gate"], PARAMS, places.get)


def test_two_tensors_for_one_shard_are_both_named() -> None:
    places = {**PLACES, "other": (Placement("norm.weight"),)}
    with pytest.raises(LoadError, match=r"by norm\.weight and by other"):
        plan([*SOURCE, "other"], PARAMS, places.get)


def test_a_tensor_that_comes_twice_is_refused() -> None:
    placements = plan(SOURCE, PARAMS, PLACES.get)
    with pytest.raises(LoadError, match="came more than once"):
        fill(PARAMS, [*SOURCE.items(), ("norm.weight", torch.zeros(4))], placements)


def test_a_tensor_that_never_comes_is_named() -> None:
    with pytest.raises(LoadError, match=r"tensor fc1\.weight never came"):
        fill(PARAMS, [("norm.weight", torch.ones(4))], plan(SOURCE, PARAMS, PLACES.get))


def test_a_tensor_that_was_not_planned_for_is_refused() -> None:
    with pytest.raises(LoadError, match="was not planned for"):
        fill(PARAMS, [("late.weight", torch.ones(4))], plan(SOURCE, PARAMS, PLACES.get))


def test_a_loader_of_the_wrong_arity_is_named_with_its_parameter() -> None:
    param = _param(4, 2, loader=lambda param, tensor: None)
    with pytest.raises(LoadError) as caught:
        call_weight_loader(Placement("fc1.weight", 0), param, torch.ones(2, 2))
    assert "fc1.weight[0] does not take 3 arguments" in caught.value.what
    assert "doctor" in caught.value.fix


def test_a_type_error_inside_a_loader_is_not_mistaken_for_its_arity() -> None:
    def broken(param: torch.Tensor, tensor: torch.Tensor) -> None:
        raise TypeError("inside")

    with pytest.raises(TypeError, match="inside"):
        call_weight_loader(Placement("norm.weight"), _param(4, loader=broken), torch.ones(4))


def test_shapes_are_checked_where_there_is_no_loader() -> None:
    with pytest.raises(LoadError, match=r"norm\.weight is \[4\]"):
        call_weight_loader(Placement("norm.weight"), _param(4), torch.ones(5))


def test_a_shard_needs_a_loader() -> None:
    with pytest.raises(LoadError, match="has no weight loader"):
        call_weight_loader(Placement("norm.weight", "q"), _param(4), torch.ones(4))


def test_ungroup_puts_each_heads_rows_where_attention_reads_them() -> None:
    heads, width = 3, 2
    grouped = torch.arange(heads * 3 * width, dtype=torch.float32).view(-1, 1)
    rows = ungroup_qkv(grouped, heads=heads, head_dim=width).view(3, heads, width)
    for part in range(3):
        for head in range(heads):
            start = (head * 3 + part) * width
            assert rows[part, head].tolist() == [start, start + 1]


def test_ungroup_refuses_other_row_counts() -> None:
    with pytest.raises(LoadError, match="num_attention_heads"):
        ungroup_qkv(torch.zeros(10, 2), heads=3, head_dim=2)


def test_persistent_buffers_are_to_be_filled_and_others_are_not() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.register_buffer("kept", torch.zeros(1))
            self.register_buffer("scratch", torch.zeros(1), persistent=False)

    assert set(tensors_of(torch.nn.Sequential(Module()))) == {"0.weight", "0.kept"}


def test_fill_takes_a_generator_that_reuses_its_memory() -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(8)
        for name, tensor in SOURCE.items():
            view = buffer[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view

    fill(PARAMS, stream(), plan(SOURCE, PARAMS, PLACES.get))
    assert torch.equal(PARAMS["norm.weight"], SOURCE["norm.weight"])
