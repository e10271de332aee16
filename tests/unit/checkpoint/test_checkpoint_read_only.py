# SPDX-License-Identifier: Apache-2.0
"""No operator of torch writes a mapped tensor: each attempt is an error that says so, and the bytes stay."""

from __future__ import annotations

import copy
import mmap
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_h3_plugin.checkpoint.read_only import ReadOnlyTensor, read_only
from vllm_h3_plugin.errors import LoadError

CONTENT = bytes(range(256)) * 16


@pytest.fixture
def mapped(tmp_path: Path) -> torch.Tensor:
    """[16, 256] uint8 over a mapping that really is read-only: a write that came through would end this process."""
    path = tmp_path / "base"
    path.write_bytes(CONTENT)
    descriptor = os.open(path, os.O_RDONLY)
    mapping = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    os.close(descriptor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read_only(torch.frombuffer(mapping, dtype=torch.uint8)).view(16, 256)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "copy_": lambda t: t.copy_(torch.zeros(16, 256, dtype=torch.uint8)),
    "fill_": lambda t: t.fill_(1),
    "item assignment": lambda t: t.__setitem__(0, 1),
    "+=": lambda t: t.__iadd__(1),
    "out=": lambda t: torch.add(t, 1, out=t),
    "index_copy_": lambda t: t.index_copy_(0, torch.tensor([0]), torch.zeros(1, 256, dtype=torch.uint8)),
    "_foreach": lambda t: torch._foreach_add_([t], 1),
    "resize_": lambda t: t.resize_(2, 2),
    "transposed view": lambda t: t.t().zero_(),
    "row of a view": lambda t: t.view(torch.int8)[3].zero_(),
    "split": lambda t: t.split(4)[1].zero_(),
    "unbind": lambda t: t.unbind(0)[0].zero_(),
    "reshape": lambda t: t.reshape(-1).zero_(),
    "contiguous": lambda t: t.contiguous().zero_(),
    "to of the same dtype": lambda t: t.to(torch.uint8).zero_(),
    "alias": lambda t: torch.ops.aten.alias(t).zero_(),
    ".data": lambda t: t.data.zero_(),
    "detach": lambda t: t.detach().zero_(),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False).data.zero_(),
    "storage": lambda t: t.untyped_storage().fill_(0),
    "storage of .data": lambda t: t.data.untyped_storage().fill_(0),
    "numpy": lambda t: t.numpy(),
    "from_dlpack": lambda t: torch.from_dlpack(t),
    "as_subclass": lambda t: t.as_subclass(torch.Tensor),
    "set_": lambda t: t.set_(torch.zeros(3, dtype=torch.uint8)),
    "set_ of a plain tensor": lambda t: torch.empty(0, dtype=torch.uint8).set_(t),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
@pytest.mark.parametrize("way", WRITES)
def test_a_write_is_an_error_before_it_reaches_the_mapping(mapped: torch.Tensor, way: str, mode: Callable) -> None:
    with mode(), pytest.raises(LoadError, match="would write a tensor of the shared read-only base") as caught:
        WRITES[way](mapped)
    assert "all ranks of this machine map the same bytes" in str(caught.value) and "clone()" in caught.value.fix
    assert bytes(mapped.flatten().tolist()) == CONTENT


def test_reading_works_and_gives_plain_tensors_of_its_own(mapped: torch.Tensor) -> None:
    weight = mapped.float()
    assert type(weight) is torch.Tensor and type(mapped.clone()) is torch.Tensor
    assert type(torch.empty_like(mapped)) is torch.Tensor and type(torch.cat([mapped, mapped])) is torch.Tensor
    assert torch.equal(torch.zeros(256, dtype=torch.uint8).copy_(mapped[1]), mapped[1].clone())
    bf16 = mapped.view(torch.bfloat16)
    assert type(torch.nn.functional.linear(torch.ones(2, 128, dtype=torch.bfloat16), bf16)) is torch.Tensor
    for copied in (copy.deepcopy(mapped), pickle.loads(pickle.dumps(mapped))):
        assert type(copied) is torch.Tensor and torch.equal(copied, mapped.clone())
        copied.zero_()


def test_views_share_the_mapping(mapped: torch.Tensor) -> None:
    for view in (mapped.t(), mapped[2:5], mapped.view(torch.int8), mapped.narrow(1, 3, 4), mapped.contiguous()):
        assert isinstance(view, ReadOnlyTensor)
    assert mapped.contiguous().data_ptr() == mapped.data_ptr()
    parameter = torch.nn.Parameter(mapped, requires_grad=False)
    assert isinstance(parameter, torch.nn.Parameter) and parameter.data_ptr() == mapped.data_ptr()
