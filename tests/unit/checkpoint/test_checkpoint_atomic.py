# SPDX-License-Identifier: Apache-2.0
"""Files appear whole or not at all; what a killed process left is swept, what a living one writes is not."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from tests.unit.checkpoint.snapshot_kit import kill_self, killed
from vllm_h3_plugin.checkpoint import atomic, file_lock
from vllm_h3_plugin.checkpoint.atomic import replacing, require_space, sweep, temporary_beside
from vllm_h3_plugin.checkpoint.file_lock import hold, holder
from vllm_h3_plugin.errors import SnapshotError


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_file_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "table.bin"
    path.write_text("old")
    with replacing(path) as temporary:
        assert temporary.parent == tmp_path
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and names(tmp_path) == ["table.bin"]


def test_bytes_reach_the_disk_before_the_name_and_then_the_folder(tmp_path: Path, monkeypatch) -> None:
    order = []
    fsync, replace = os.fsync, Path.replace

    def note_fsync(descriptor: int) -> None:
        order.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def note_replace(self: Path, target: Path) -> Path:
        order.append(("replace", self.name))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    with replacing(tmp_path / "x") as temporary:
        temporary.write_text("new")
    assert order == [("fsync", temporary.name), ("replace", temporary.name), ("fsync", tmp_path.name)]


@pytest.mark.parametrize("fault", ["block", "fsync", "rename"])
def test_a_failure_leaves_the_old_file_and_no_temporary(tmp_path: Path, monkeypatch, fault: str) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    if fault == "fsync":
        monkeypatch.setattr(os, "fsync", refuse)
    if fault == "rename":
        monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space"), replacing(path) as temporary:
        temporary.write_text("new")
        if fault == "block":
            refuse()
    assert path.read_text() == "old" and names(tmp_path) == ["x"]


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    def child() -> None:
        with temporary_beside(tmp_path / "a") as file, temporary_beside(tmp_path / "b") as folder:
            file.write_text("half")
            (folder / "deep").mkdir(parents=True)
            (folder / "deep" / "x").write_text("half")
            kill_self()

    killed(child)
    assert len(names(tmp_path)) == 4
    (tmp_path / "mine.tmp").write_text("not a temporary of this project")
    assert len(sweep(tmp_path)) == 2
    assert names(tmp_path) == ["mine.tmp"]


def test_a_temporary_of_a_living_process_is_not_swept(tmp_path: Path) -> None:
    with temporary_beside(tmp_path / "a") as temporary:
        temporary.write_text("half")
        assert sweep(tmp_path) == () and temporary.read_text() == "half"
        temporary.rename(tmp_path / "elsewhere")
        temporary.write_text("another file of that name")
        assert sweep(tmp_path) == ()
    assert names(tmp_path) == ["elsewhere"]


def test_a_lock_without_its_temporary_is_swept_too(tmp_path: Path) -> None:
    def child() -> None:
        with replacing(tmp_path / "a") as temporary:
            temporary.write_text("whole")
            temporary.replace(tmp_path / "a")
            kill_self()

    killed(child)
    assert len(names(tmp_path)) == 2
    assert sweep(tmp_path) == () and names(tmp_path) == ["a"]


def test_a_missing_folder_has_nothing_to_sweep(tmp_path: Path) -> None:
    assert sweep(tmp_path / "none") == ()


def test_a_lock_taken_on_a_removed_file_is_taken_again(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "x.lock"
    first = hold(path)
    assert first is not None
    flock = fcntl.flock

    def removed_meanwhile(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        first.release(remove=True)
        flock(descriptor, how)

    monkeypatch.setattr(file_lock.fcntl, "flock", removed_meanwhile)
    second = hold(path)
    assert second is not None and path.exists()
    assert hold(path) is None
    second.release()


def test_shared_locks_go_together_and_keep_an_exclusive_one_out(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    one, two = hold(path, shared=True), hold(path, shared=True)
    assert one is not None and two is not None and hold(path) is None
    one.release()
    two.release()
    with hold(path) as alone:  # type: ignore[union-attr]
        alone.sign()
        assert hold(path, shared=True) is None and holder(path) == f"process {os.getpid()}"
    assert holder(path) == "another process"


def test_readers_may_share_a_folder_that_they_cannot_write(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "x.lock"
    opened = os.open

    def read_only(name: object, flags: int, *args: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return opened(name, flags, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", read_only)
    nothing = hold(path, shared=True)
    assert nothing is not None and nothing.path is None
    path.write_text("")
    held = hold(path, shared=True)
    assert held is not None and held.path == path
    with pytest.raises(PermissionError):
        hold(path)
    held.release()


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(file_lock.fcntl, "flock", refuse)
    with pytest.raises(SnapshotError, match="No locks available") as caught:
        hold(tmp_path / "x.lock")
    assert str(tmp_path / "x.lock") in str(caught.value) and "H3_CACHE_DIR" in caught.value.fix


def test_too_little_room_names_needed_and_free_and_the_way_out(tmp_path: Path, monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 3 << 30))
    folder = tmp_path / "not" / "yet" / "there"
    require_space(folder, 3 << 30, "snapshot x")
    with pytest.raises(SnapshotError) as caught:
        require_space(folder, 55 << 30, "snapshot x")
    text = str(caught.value)
    for part in (str(folder), "snapshot x", "55.00 GiB", "3.00 GiB", "H3_CACHE_DIR", "H3_SNAPSHOT=off", "Free space"):
        assert part in text
    assert caught.value.details["needed_bytes"] == 55 << 30 and caught.value.details["free_bytes"] == 3 << 30
    assert atomic.free_bytes(folder) == 3 << 30
