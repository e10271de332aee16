# SPDX-License-Identifier: Apache-2.0
"""Weights are read once, in file order, whole, from the files that were checked, and leave the page cache behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_h3_plugin.checkpoint import reader
from vllm_h3_plugin.checkpoint.faults import FaultLog
from vllm_h3_plugin.checkpoint.inventory import PartInventory, take_inventory
from vllm_h3_plugin.checkpoint.layout import DTYPE_BYTES
from vllm_h3_plugin.checkpoint.reader import TORCH_DTYPES, WeightSource
from vllm_h3_plugin.checkpoint.safetensors_header import read_header
from vllm_h3_plugin.errors import CheckpointError


@pytest.fixture
def dit(checkpoint) -> PartInventory:
    return checkpoint.inventory().require_clean().partitions[0].part("transformer")


def reference(part: PartInventory) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in part.files:
        tensors |= load_file(file.path)
    return tensors


def part_of(path: Path) -> PartInventory:
    file = read_header(path, FaultLog())
    assert file is not None
    return PartInventory("x", path.parent, (file,), file.tensors)


@pytest.mark.parametrize("name", ["transformer", "text_encoder", "video_vae", "audio_vae"])
@pytest.mark.parametrize("reuse", [None, 1, 3])
def test_tensors_equal_those_of_the_safetensors_library(pristine: Path, name: str, reuse: int | None) -> None:
    part = take_inventory(pristine / "FL2VA").partitions[0].part(name)
    expected = reference(part)
    order = []
    for tensor_name, tensor in WeightSource(part, reuse=reuse):
        order.append(tensor_name)
        assert tensor.dtype == expected[tensor_name].dtype and torch.equal(tensor, expected[tensor_name])
    assert order == [record.name for record in part.tensors if record.name not in part.ignored]


def test_tensors_of_its_own_memory_stay_valid(dit: PartInventory) -> None:
    expected = reference(dit)
    kept = dict(WeightSource(dit))
    assert set(kept) == set(expected)
    assert all(torch.equal(kept[name], expected[name]) for name in expected)
    assert len({tensor.data_ptr() for tensor in kept.values()}) == len(kept)


def test_a_reused_buffer_is_valid_until_n_more_are_taken(dit: PartInventory) -> None:
    expected = reference(dit)
    recent: list[tuple[str, torch.Tensor]] = []
    pointers = set()
    for name, tensor in WeightSource(dit, reuse=3):
        pointers.add(tensor.untyped_storage().data_ptr())
        recent = [*recent, (name, tensor)][-3:]
        assert all(torch.equal(seen, expected[before]) for before, seen in recent)
    assert len(pointers) < len(expected), "memory is used again"


def test_every_dtype_and_empty_and_0d_tensors(tmp_path: Path) -> None:
    assert set(TORCH_DTYPES) == set(DTYPE_BYTES)
    tensors = {f"t{i}": torch.arange(6).reshape(2, 3).to(dtype) for i, dtype in enumerate(TORCH_DTYPES.values())}
    tensors |= {"empty": torch.empty(0, 5), "scalar": torch.tensor(2.5), "last": torch.tensor([7], dtype=torch.int8)}
    save_file(tensors, tmp_path / "x.safetensors")
    read = dict(WeightSource(part_of(tmp_path / "x.safetensors")))
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert torch.equal(as_bytes(read[name]), as_bytes(tensor))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.ndim else tensor


def test_a_tensor_larger_than_a_block(dit: PartInventory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_BLOCK", 1000)
    expected = reference(dit)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in WeightSource(dit))


def test_progress_goes_from_nothing_to_all(dit: PartInventory) -> None:
    seen: list[tuple[int, int]] = []
    source = WeightSource(dit, progress=lambda done, total: seen.append((done, total)))
    assert len(list(source)) == len(source)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (source.total_bytes, source.total_bytes) and source.total_bytes == dit.nbytes


def test_unwanted_tensors_are_not_read(dit: PartInventory, monkeypatch: pytest.MonkeyPatch) -> None:
    real, reads = os.preadv, []

    def preadv(descriptor: int, views: list[memoryview], offset: int) -> int:
        reads.append(offset)
        return real(descriptor, views, offset)

    monkeypatch.setattr(reader.os, "preadv", preadv)
    source = WeightSource(dit, wanted=lambda name: "adaln_proj" not in name)
    names = [name for name, _ in source]
    assert names == [record.name for record in dit.tensors if "adaln_proj" not in record.name]
    assert source.total_bytes < dit.nbytes
    skipped = {record.offset for record in dit.tensors if "adaln_proj" in record.name}
    assert skipped.isdisjoint(reads)


def test_pages_are_dropped_behind_every_read(dit: PartInventory, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: dict[str, list[tuple[int, int]]] = {}

    def fadvise(descriptor: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            dropped.setdefault(name, []).append((offset, offset + length))

    monkeypatch.setattr(reader.os, "posix_fadvise", fadvise)
    for name, _ in WeightSource(dit):
        record = next(tensor for tensor in dit.tensors if tensor.name == name)
        spans = dropped[str(record.file.resolve())]
        assert any(begin <= record.offset and record.offset + record.nbytes <= end for begin, end in spans)
        assert all(begin % 4096 == 0 for begin, _ in spans)


def test_files_are_closed_when_the_reader_stops_early(dit: PartInventory) -> None:
    before = os.listdir("/proc/self/fd")
    iterator = iter(WeightSource(dit))
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    assert os.listdir("/proc/self/fd") == before


def test_file_that_shrank_since_the_inventory(dit: PartInventory, checkpoint) -> None:
    path = dit.files[-1].path
    checkpoint.write(path, path.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as caught:
        list(WeightSource(dit))
    assert str(path) in caught.value.what and "start again" in caught.value.fix


def test_file_that_was_written_to_since_the_inventory(dit: PartInventory, checkpoint) -> None:
    path = dit.files[0].path
    checkpoint.write(path, path.read_bytes())
    os.utime(path, ns=(0, dit.files[0].mtime_ns + 1))
    with pytest.raises(CheckpointError, match="changed while"):
        next(iter(WeightSource(dit)))


def test_file_that_changes_while_it_is_read(dit: PartInventory) -> None:
    path = dit.files[0].path
    with pytest.raises(CheckpointError, match="changed while"):
        for _ in WeightSource(dit):
            os.utime(path, ns=(0, 1))


def test_file_that_is_gone(dit: PartInventory) -> None:
    path = dit.files[0].path
    path.unlink()
    with pytest.raises(CheckpointError) as caught:
        list(WeightSource(dit))
    assert str(path) in caught.value.what and "No such file" in caught.value.why


def test_short_read_names_path_and_offset(dit: PartInventory, monkeypatch: pytest.MonkeyPatch) -> None:
    record = dit.tensors[3]
    real = os.preadv

    def preadv(descriptor: int, views: list[memoryview], offset: int) -> int:
        if offset == record.offset + 16:
            return 0
        return real(descriptor, [views[0][:16]] if offset == record.offset else views, offset)

    monkeypatch.setattr(reader.os, "preadv", preadv)
    with pytest.raises(CheckpointError) as caught:
        list(WeightSource(dit))
    assert f"{record.file} ends at byte {record.offset + 16}, inside tensor {record.name}" in caught.value.what
    assert caught.value.details["offset"] == record.offset + 16 and caught.value.fix


def test_disk_error_names_path_and_offset(dit: PartInventory, monkeypatch: pytest.MonkeyPatch) -> None:
    def preadv(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(reader.os, "preadv", preadv)
    with pytest.raises(CheckpointError) as caught:
        list(WeightSource(dit))
    record = dit.tensors[0]
    assert f"{record.file} cannot be read at byte {record.offset}" in caught.value.what
    assert "Input/output error" in caught.value.why and "disk" in caught.value.fix
