# SPDX-License-Identifier: Apache-2.0
"""Weights are read once, in file order, whole, from the files that were checked, and leave the page cache behind."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

from vllm_h3_plugin.checkpoint import shard_io
from vllm_h3_plugin.checkpoint.faults import FaultLog
from vllm_h3_plugin.checkpoint.inventory import PartInventory, take_inventory
from vllm_h3_plugin.checkpoint.layout import DTYPE_BYTES
from vllm_h3_plugin.checkpoint.page_cache import cached_share, drop
from vllm_h3_plugin.checkpoint.reader import TORCH_DTYPES, ReadOptions, WeightSource
from vllm_h3_plugin.checkpoint.safetensors_header import read_header
from vllm_h3_plugin.errors import CheckpointError, SnapshotError


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
@pytest.mark.parametrize(
    "options",
    [
        None,
        ReadOptions(),
        ReadOptions(threads=1, block_bytes=1000),
        ReadOptions(threads=5, buffer_bytes=150_000, block_bytes=4096),
        ReadOptions(buffer_bytes=1),
    ],
    ids=["own", "default", "one-thread", "small-ring", "no-ring"],
)
def test_tensors_equal_those_of_the_safetensors_library(pristine: Path, name: str, options: ReadOptions | None) -> None:
    part = take_inventory(pristine / "FL2VA").partitions[0].part(name)
    expected = reference(part)
    order = []
    for tensor_name, tensor in WeightSource(part, options=options):
        order.append(tensor_name)
        assert tensor.dtype == expected[tensor_name].dtype and torch.equal(tensor, expected[tensor_name])
    assert order == [record.name for record in part.tensors if record.name not in part.ignored]


def test_tensors_of_its_own_memory_stay_valid(dit: PartInventory) -> None:
    expected = reference(dit)
    kept = dict(WeightSource(dit))
    assert set(kept) == set(expected)
    assert all(torch.equal(kept[name], expected[name]) for name in expected)
    assert len({tensor.data_ptr() for tensor in kept.values()}) == len(kept)


def test_tensors_lie_in_one_buffer_that_is_used_again(dit: PartInventory) -> None:
    largest = max(record.nbytes for record in dit.tensors)
    options = ReadOptions(buffer_bytes=largest + 2 * 4096, block_bytes=4096)
    begins, ends = set(), set()
    for _, tensor in WeightSource(dit, options=options):
        begins.add(tensor.untyped_storage().data_ptr())
        ends.add(tensor.data_ptr() + tensor.nbytes)
    assert len(begins) == 1
    assert max(ends) - min(begins) <= largest + 3 * 4096 < dit.nbytes


def test_a_tensor_is_left_alone_until_the_next_is_taken(dit: PartInventory) -> None:
    expected = reference(dit)
    largest = max(record.nbytes for record in dit.tensors)
    for name, tensor in WeightSource(dit, options=ReadOptions(buffer_bytes=2 * largest, block_bytes=1024)):
        time.sleep(0.002)  # the threads read ahead meanwhile, as far as there is room
        assert torch.equal(tensor, expected[name])


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


def test_tensors_that_the_ring_cannot_hold_share_one_buffer(dit: PartInventory) -> None:
    sizes = sorted(record.nbytes for record in dit.tensors)
    ring = sizes[-4] - 512
    storages = {
        (tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        for _, tensor in WeightSource(dit, options=ReadOptions(buffer_bytes=ring))
    }
    assert len(storages) == 2
    assert sum(size for _, size in storages) <= ring + sizes[-1] + 5 * 4096


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

    monkeypatch.setattr(shard_io.os, "preadv", preadv)
    source = WeightSource(dit, wanted=lambda name: "adaln_proj" not in name)
    names = [name for name, _ in source]
    assert names == [record.name for record in dit.tensors if "adaln_proj" not in record.name]
    assert source.total_bytes < dit.nbytes
    skipped = {record.offset for record in dit.tensors if "adaln_proj" in record.name}
    assert skipped.isdisjoint(reads)


@pytest.mark.parametrize("options", [None, ReadOptions(buffer_bytes=50_000, block_bytes=1000)], ids=["own", "ring"])
def test_nothing_is_left_when_the_consumer_stops_early(dit: PartInventory, options: ReadOptions | None) -> None:
    files, threads = os.listdir("/proc/self/fd"), threading.active_count()
    iterator = iter(WeightSource(dit, options=options))
    next(iterator)
    assert threading.active_count() > threads
    iterator.close()  # type: ignore[attr-defined]
    assert os.listdir("/proc/self/fd") == files and threading.active_count() == threads
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error):
            for _ in WeightSource(dit, options=options):
                raise error
        assert os.listdir("/proc/self/fd") == files and threading.active_count() == threads


def test_ctrl_c_while_the_consumer_waits_ends_the_threads(dit: PartInventory) -> None:
    files, threads = os.listdir("/proc/self/fd"), threading.active_count()

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(WeightSource(dit, progress=interrupt))
    assert os.listdir("/proc/self/fd") == files and threading.active_count() == threads


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


def test_file_that_is_replaced_while_it_is_read(dit: PartInventory) -> None:
    path = dit.files[0].path
    stat = path.stat()
    with pytest.raises(CheckpointError, match="changed while") as caught:
        for number, _ in enumerate(WeightSource(dit)):
            if number == 0:
                copy = path.with_name("copy")
                copy.write_bytes(path.read_bytes())
                os.utime(copy, ns=(stat.st_atime_ns, stat.st_mtime_ns))
                copy.rename(path)
    assert str(path) in caught.value.what and "taken its name" in caught.value.why and caught.value.fix


def test_file_that_is_removed_while_it_is_read(dit: PartInventory) -> None:
    path = dit.files[0].path
    with pytest.raises(CheckpointError, match="changed while") as caught:
        for _ in WeightSource(dit):
            path.unlink(missing_ok=True)
    assert str(path) in caught.value.what and "No such file" in caught.value.why


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

    monkeypatch.setattr(shard_io, "_O_DIRECT", 0)
    monkeypatch.setattr(shard_io.os, "preadv", preadv)
    read = []
    with pytest.raises(CheckpointError) as caught:
        for name, _ in WeightSource(dit):
            read.append(name)
    assert read == [tensor.name for tensor in dit.tensors[:3]], "what lies before the fault comes first"
    assert f"{record.file} ends at byte {record.offset + 16}, inside tensor {record.name}" in caught.value.what
    assert caught.value.details["offset"] == record.offset + 16 and caught.value.fix


def test_disk_error_names_path_and_offset(dit: PartInventory, monkeypatch: pytest.MonkeyPatch) -> None:
    def preadv(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(shard_io.os, "preadv", preadv)
    with pytest.raises(CheckpointError) as caught:
        list(WeightSource(dit))
    record = dit.tensors[0]
    assert f"{record.file} cannot be read at byte {record.offset}" in caught.value.what
    assert "Input/output error" in caught.value.why and "disk" in caught.value.fix


def flip(path: Path, offset: int) -> None:
    """Change one byte behind the back of size and time."""
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.unlink()  # a hard link
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def sha256_of(part: PartInventory) -> dict[Path, str]:
    return {file.path: hashlib.sha256(file.path.read_bytes()).hexdigest() for file in part.files}


def blake3_of(part: PartInventory) -> dict[str, str]:
    return {r.name: blake3(r.file.read_bytes()[r.offset : r.offset + r.nbytes]).hexdigest() for r in part.tensors}


RING = ReadOptions(buffer_bytes=100_000, block_bytes=1000)


@pytest.mark.parametrize("options", [None, RING], ids=["own", "ring"])
def test_right_digests_change_nothing(checkpoint, options: ReadOptions | None) -> None:
    part = checkpoint.inventory().partitions[0].part("text_encoder")
    expected = reference(part)
    source = WeightSource(part, options=options, tensor_digests=blake3_of(part), file_digests=sha256_of(part))
    assert source.total_bytes == sum(file.size for file in part.files), "headers and dropped tensors are read too"
    names = []
    for name, tensor in source:
        names.append(name)
        assert torch.equal(tensor, expected[name])
    assert names == [record.name for record in part.tensors if record.name not in part.ignored]
    assert len(list(source)) == len(names), "it can be read again"


@pytest.mark.parametrize("options", [None, RING], ids=["own", "ring"])
def test_a_flipped_byte_in_a_tensor_is_found_before_the_tensor_is_handed_out(dit: PartInventory, options) -> None:
    record = dit.tensors[5]
    digests = blake3_of(dit)
    flip(record.file, record.offset + record.nbytes - 1)
    seen = []
    with pytest.raises(SnapshotError) as caught:
        for name, _ in WeightSource(dit, options=options, tensor_digests=digests):
            seen.append(name)
    assert seen == [tensor.name for tensor in dit.tensors[:5]]
    assert str(record.file) in caught.value.what and record.name in caught.value.what
    assert digests[record.name] in caught.value.why and caught.value.details["found"] in caught.value.what
    assert "snapshot" in caught.value.fix


def test_a_tensor_without_a_digest_is_refused_up_front(dit: PartInventory) -> None:
    digests = blake3_of(dit)
    name = dit.tensors[3].name
    del digests[name]
    with pytest.raises(SnapshotError, match="has no digest") as caught:
        WeightSource(dit, tensor_digests=digests)
    assert name in caught.value.what and str(dit.tensors[3].file) in caught.value.what and caught.value.fix
    WeightSource(dit, tensor_digests=digests, wanted=lambda other: other != name)


@pytest.mark.parametrize("where", ["header", "ignored tensor", "last byte"])
def test_a_flipped_byte_anywhere_in_a_file_is_found(checkpoint, where: str) -> None:
    part = checkpoint.inventory().partitions[0].part("text_encoder")
    dropped = next(record for record in part.tensors if record.name in part.ignored)
    file = next(file for file in part.files if file.path == dropped.file)
    digests = sha256_of(part)
    flip(file.path, {"header": 9, "ignored tensor": dropped.offset, "last byte": file.size - 1}[where])
    last = [record.name for record in file.tensors if record.name not in part.ignored][-1]
    seen = []
    with pytest.raises(CheckpointError) as caught:
        for name, _ in WeightSource(part, options=RING, file_digests=digests):
            seen.append(name)
    assert str(file.path) in caught.value.what and caught.value.details["found"] in caught.value.what
    assert digests[file.path] in caught.value.why and "Download this file again" in caught.value.fix
    later = {record.name for other in part.files if other.path > file.path for record in other.tensors}
    assert later.isdisjoint(seen), "nothing of a later file comes after the verdict"
    assert where != "last byte" or file.tensors[-1].name != last or last not in seen


def test_a_file_without_a_digest_is_refused_up_front(dit: PartInventory) -> None:
    digests = sha256_of(dit)
    del digests[dit.files[1].path]
    with pytest.raises(CheckpointError) as caught:
        WeightSource(dit, file_digests=digests)
    assert str(dit.files[1].path) in caught.value.what and "vllm-h3 checksums" in caught.value.fix


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> PartInventory:
    """96 MiB in two shards, written to the disk: less would be lost in the kernel's readahead."""
    folder = tmp_path_factory.mktemp("large")
    for number in range(2):
        sizes = [10_000_001, 5, 3000, 20_000_000, 700_000, 4097, 17_000_000, 3_000_000]
        tensors = {f"{number}.{i}": torch.full((size,), i, dtype=torch.uint8) for i, size in enumerate(sizes)}
        save_file(tensors, folder / f"{number}.safetensors")
        with (folder / f"{number}.safetensors").open("rb+") as file:
            os.fsync(file.fileno())
    parts = [part_of(path) for path in sorted(folder.iterdir())]
    return PartInventory("x", folder, tuple(p.files[0] for p in parts), tuple(t for p in parts for t in p.tensors))


CASES: dict[str, dict[str, Any]] = {
    "own memory": {},
    "ring": {"options": ReadOptions(buffer_bytes=32 << 20, block_bytes=1 << 20)},
    "one thread": {"options": ReadOptions(threads=1)},
    "few wanted": {"options": ReadOptions(block_bytes=1 << 20), "wanted": lambda name: name[-1] in "0136"},
    "early in the file": {"options": ReadOptions(), "wanted": lambda name: name[-1] == "0"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pause", [0, 0.02], ids=["fast", "slow"])
def test_page_cache_holds_at_most_2_percent_afterwards(large: PartInventory, case: str, pause: float) -> None:
    paths = [file.path for file in large.files]
    drop(paths)
    for _ in WeightSource(large, **CASES[case]):
        time.sleep(pause)
    assert cached_share(paths) <= 0.02


def test_page_cache_holds_nothing_of_what_a_stopped_reader_left(large: PartInventory) -> None:
    paths = [file.path for file in large.files]
    drop(paths)
    iterator = iter(WeightSource(large))
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    assert cached_share(paths) <= 0.02


def test_pages_are_dropped_behind_every_block(dit: PartInventory, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: set[tuple[str, int]] = set()

    def drop_range(descriptor: int, begin: int, end: int) -> None:
        dropped.update((os.readlink(f"/proc/self/fd/{descriptor}"), byte) for byte in range(begin, end))

    monkeypatch.setattr(shard_io, "_O_DIRECT", 0)
    monkeypatch.setattr(shard_io, "drop_range", drop_range)
    for name, _ in WeightSource(dit, options=RING):
        record = next(tensor for tensor in dit.tensors if tensor.name == name)
        path = str(record.file.resolve())
        assert all((path, byte) in dropped for byte in range(record.offset, record.offset + record.nbytes))


def test_eight_threads_are_not_slower_than_one(large: PartInventory) -> None:
    """Only as a guard against threads that wait for each other: this file is small and the machine may be busy."""
    paths = [file.path for file in large.files]

    def seconds(threads: int) -> float:
        drop(paths)
        started = time.perf_counter()
        for _ in WeightSource(large, options=ReadOptions(threads=threads, buffer_bytes=64 << 20, block_bytes=4 << 20)):
            pass
        return time.perf_counter() - started

    pairs = [(seconds(8), seconds(1)) for _ in range(3)]
    assert min(eight for eight, _ in pairs) <= 2 * max(one for _, one in pairs)


def _fallen_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that were read through the page cache, a number for each such read."""
    fallen: list[int] = []
    cached = shard_io.OpenShard._read_cached

    def read(self: shard_io.OpenShard, view: memoryview, offset: int, done: int, what: str) -> None:
        fallen.append(len(view) - done)
        cached(self, view, offset, done, what)

    monkeypatch.setattr(shard_io.OpenShard, "_read_cached", read)
    return fallen


@pytest.mark.parametrize("block_bytes", [1 << 20, 4096, 1024])
@pytest.mark.parametrize("options", [None, ReadOptions(buffer_bytes=1 << 20)])
def test_bytes_that_are_read_past_the_page_cache_are_the_files(
    dit: PartInventory, options: ReadOptions | None, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fallen = _fallen_back(monkeypatch)
    expected = reference(dit)
    how = None if options is None else replace(options, block_bytes=block_bytes)
    shard = shard_io.OpenShard(dit.files[0])
    direct = shard.direct
    shard.close()
    if not direct:
        pytest.skip("the folder of temporary files is on a file system without O_DIRECT")
    for name, tensor in WeightSource(dit, options=how):
        assert torch.equal(as_bytes(tensor), as_bytes(expected[name]))
    assert fallen == []


def test_a_file_system_that_cannot_do_it_is_read_through_the_cache(
    dit: PartInventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: str, flags: int, *args: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args)

    monkeypatch.setattr(shard_io.os, "open", refuse)
    fallen = _fallen_back(monkeypatch)
    expected = reference(dit)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in WeightSource(dit, options=RING))
    assert sum(fallen) == dit.nbytes


@pytest.mark.parametrize("at_most", [0, 100, 4096, 5000])
def test_a_direct_read_that_is_cut_short_is_finished_through_the_cache(
    dit: PartInventory, at_most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def preadv(descriptor: int, views: list[memoryview], offset: int) -> int:
        direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        if direct and at_most < 4096:
            return min(at_most, real(descriptor, views, offset))
        return real(descriptor, [views[0][:4096]] if direct else views, offset)

    monkeypatch.setattr(shard_io.os, "preadv", preadv)
    expected = reference(dit)
    for name, tensor in WeightSource(dit, options=RING):
        assert torch.equal(as_bytes(tensor), as_bytes(expected[name]))


def test_a_tensor_that_lies_at_an_odd_byte_is_read_as_well(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3, dtype=torch.uint8), "b": torch.arange(5, dtype=torch.int64)}
    save_file(tensors, tmp_path / "x.safetensors")
    part = part_of(tmp_path / "x.safetensors")
    first, second = part.tensors
    raw = (tmp_path / "x.safetensors").read_bytes()
    moved = raw[: first.offset] + b"\0" + raw[first.offset :]
    (tmp_path / "x.safetensors").write_bytes(moved)
    stat = (tmp_path / "x.safetensors").stat()
    records = tuple(replace(record, offset=record.offset + 1) for record in (first, second))
    file = replace(part.files[0], size=stat.st_size, mtime_ns=stat.st_mtime_ns, tensors=records)
    read = dict(WeightSource(replace(part, files=(file,), tensors=records)))
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
