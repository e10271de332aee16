# SPDX-License-Identifier: Apache-2.0
"""The identity of a checkpoint's files changes with them, and only with them, and costs next to nothing."""

from __future__ import annotations

import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.checkpoint.page_cache import cached_bytes, drop
from vllm_h3_plugin.checkpoint.source_identity import part_identity, source_identity
from vllm_h3_plugin.errors import CheckpointError


def identity(path: Path, task: str | None = None) -> str:
    return source_identity(take_inventory(path, task).require_clean())


def replace_byte(path: Path, offset: int, *, keep_time: bool = True) -> None:
    times = path.stat()
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.unlink()
    path.write_bytes(raw)
    if keep_time:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_it_is_the_same_wherever_the_checkpoint_lies_and_however_it_is_named(checkpoint, tmp_path: Path) -> None:
    before = identity(checkpoint.fl2va)
    assert len(before) == 64 and int(before, 16)
    assert identity(checkpoint.root, "fl2va") == before
    shutil.copytree(checkpoint.root, tmp_path / "elsewhere", copy_function=shutil.copy2)
    assert identity(tmp_path / "elsewhere" / "FL2VA") == before
    assert identity(checkpoint.root / "Ref2VA") != before
    assert identity(checkpoint.root, "combined") != before


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "video_vae", "audio_vae"])
@pytest.mark.parametrize("where", ["first", "last", "time"])
def test_it_changes_with_a_files_bytes_and_time(checkpoint, part: str, where: str) -> None:
    before, before_part = identity(checkpoint.fl2va), part_identity(checkpoint.inventory().partitions[0].part(part))
    shard = checkpoint.shard(part)
    if where == "time":
        later = shard.stat().st_mtime_ns + 1
        checkpoint.write(shard, shard.read_bytes())
        os.utime(shard, ns=(0, later))
    else:
        raw = shard.read_bytes()
        header = 8 + int.from_bytes(raw[:8], "little")
        replace_byte(shard, header if where == "first" else len(raw) - 1)
    assert identity(checkpoint.fl2va) != before
    assert part_identity(checkpoint.inventory().partitions[0].part(part)) != before_part


def test_every_sample_counts_and_what_lies_between_is_missed_as_documented(checkpoint) -> None:
    shard = checkpoint.shard("text_encoder")
    size = shard.stat().st_size
    last = size - 4096
    offsets = [last * i // 63 for i in range(64)]
    gaps = [a + 4096 for a, b in pairwise(offsets) if b - a > 4096]
    before = identity(checkpoint.fl2va)
    replace_byte(shard, offsets[40])
    assert identity(checkpoint.fl2va) != before
    replace_byte(shard, offsets[40])
    replace_byte(shard, gaps[-1])
    assert identity(checkpoint.fl2va) == before


@pytest.mark.parametrize("name", ["transformer/config.json", "text_encoder/config.json", "model_index.json"])
def test_it_changes_with_a_config_and_not_with_its_time(checkpoint, name: str) -> None:
    before = identity(checkpoint.fl2va)
    path = checkpoint.fl2va / name
    checkpoint.write(path, path.read_bytes())
    assert identity(checkpoint.fl2va) == before
    checkpoint.write(path, path.read_bytes() + b"\n")
    assert identity(checkpoint.fl2va) != before


def test_it_changes_with_a_files_name(checkpoint) -> None:
    part = checkpoint.inventory().partitions[0].part("video_vae")
    before = part_identity(part)
    file = part.files[0].path
    file.rename(file.with_name("diffusion_pytorch_model2.safetensors"))
    renamed = checkpoint.inventory().partitions[0].part("video_vae")
    if renamed.files:
        assert part_identity(renamed) != before


def test_a_file_that_changed_since_the_inventory_is_named(checkpoint) -> None:
    inventory = checkpoint.inventory()
    replace_byte(checkpoint.shard(), -1, keep_time=False)
    # Another time than any other test gave this file, which they share.
    os.utime(checkpoint.shard(), ns=(0, checkpoint.shard().stat().st_mtime_ns + 1))
    with pytest.raises(CheckpointError, match="changed while the checkpoint was in use") as caught:
        source_identity(inventory)
    assert caught.value.details["path"] == str(checkpoint.shard())


def test_a_file_that_is_gone_is_named(checkpoint) -> None:
    inventory = checkpoint.inventory()
    gone = checkpoint.shard()
    gone.unlink()
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        source_identity(inventory)
    assert str(gone) in str(caught.value)


def test_it_leaves_no_pages_in_the_cache(checkpoint) -> None:
    inventory = checkpoint.inventory()
    files = [file.path for part in inventory.partitions[0].parts for file in part.files]
    for path in files:
        checkpoint.write(path, path.read_bytes())
        os.sync()
    inventory = checkpoint.inventory()
    drop(files)
    source_identity(inventory)
    assert sum(map(cached_bytes, files)) <= 4096 * len(files)
