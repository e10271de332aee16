# SPDX-License-Identifier: Apache-2.0
"""What is in the page cache is measured, not assumed, and can be dropped from it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from vllm_h3_plugin.checkpoint import page_cache
from vllm_h3_plugin.checkpoint.page_cache import cached_bytes, cached_share, drop
from vllm_h3_plugin.errors import CheckpointError

PAGE = mmap.PAGESIZE


def stored(path: Path, size: int) -> Path:
    """A file that is on the disk and nowhere else: pages that are still to be written cannot be dropped."""
    with path.open("wb") as file:
        file.write(os.urandom(size))
        file.flush()
        os.fsync(file.fileno())
    drop([path])
    return path


@pytest.mark.parametrize("size", [1, PAGE, 5 * PAGE + 7])
def test_a_file_that_was_read_is_cached_to_its_last_byte(tmp_path: Path, size: int) -> None:
    path = stored(tmp_path / "x", size)
    assert cached_bytes(path) == 0, "asking does not read"
    path.read_bytes()
    assert cached_bytes(path) == size
    drop([path])
    assert cached_bytes(path) == 0


def test_a_part_of_a_file_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "_WINDOW", 16 * PAGE)  # so that several are looked at
    path = stored(tmp_path / "x", 64 * PAGE)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for page in (0, 15, 16, 63):
            os.pread(descriptor, 1, page * PAGE)
    finally:
        os.close(descriptor)
    assert cached_bytes(path) == 4 * PAGE


def test_share_of_several_files(tmp_path: Path) -> None:
    read, unread, empty = (stored(tmp_path / name, size) for name, size in (("a", PAGE), ("b", 3 * PAGE), ("c", 0)))
    read.read_bytes()
    assert cached_share([read, unread, empty]) == 0.25
    assert cached_share([empty]) == cached_share([]) == 0


@pytest.mark.parametrize("ask", [cached_bytes, lambda path: drop([path])])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, ask) -> None:
    with pytest.raises(CheckpointError) as caught:
        ask(tmp_path / "absent")
    assert str(tmp_path / "absent") in caught.value.what and "No such file" in caught.value.why and caught.value.fix


def test_the_kernel_s_answer_about_files_of_others_is_not_believed(tmp_path: Path, monkeypatch) -> None:
    path = stored(tmp_path / "x", PAGE)
    monkeypatch.setattr(page_cache.os, "geteuid", lambda: os.getuid() + 12345)
    monkeypatch.setattr(page_cache.os, "access", lambda *_: False)
    with pytest.raises(CheckpointError) as caught:
        cached_bytes(path)
    assert str(path) in caught.value.what and "owner" in caught.value.fix
