# SPDX-License-Identifier: Apache-2.0
"""A snapshot is written whole or not at all: full disks, killed processes, two writers and wrong pieces."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file

from tests.unit.checkpoint.snapshot_kit import (
    ENTRIES,
    KEY,
    folder_of,
    kill_self,
    killed,
    left,
    pieces,
    tensors,
    write,
)
from vllm_h3_plugin.checkpoint import snapshot_writer, write_behind
from vllm_h3_plugin.checkpoint.page_cache import cached_share
from vllm_h3_plugin.checkpoint.snapshot import open_snapshot
from vllm_h3_plugin.checkpoint.snapshot_manifest import Entry, Piece, SnapshotKey
from vllm_h3_plugin.checkpoint.snapshot_writer import SnapshotWriter
from vllm_h3_plugin.errors import LoadError, SnapshotError


def writer(cache_dir: Path, **kwargs: Any) -> SnapshotWriter:
    return SnapshotWriter(cache_dir, KEY, kwargs.pop("parts", ENTRIES), **kwargs)


def whole(cache_dir: Path, seed: int = 0) -> bool:
    """Whether the snapshot can be opened and holds what was written with that seed."""
    with open_snapshot(cache_dir, KEY) as snapshot:  # type: ignore[union-attr]
        stored = {
            (part, name): tensor
            for part in snapshot.parts
            for name, tensor in load_file(snapshot.file(part).path).items()
        }
    expected = tensors(seed)
    return stored.keys() == expected.keys() and all(
        torch.equal(stored[name].float(), expected[name].float()) for name in expected
    )


def test_entries_stand_whole_and_in_the_order_given_whatever_the_order_of_pieces(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert folder == folder_of(tmp_path) and left(tmp_path) == [KEY.id]
    assert sorted(os.listdir(folder)) == ["manifest.json", "text_encoder.safetensors", "transformer.safetensors"]
    assert whole(tmp_path)
    with open_snapshot(tmp_path, KEY) as snapshot:  # type: ignore[union-attr]
        for part, entries in ENTRIES.items():
            assert [record.name for record in snapshot.file(part).tensors if record.nbytes] == [
                entry.name for entry in entries if entry.nbytes
            ]
            assert snapshot.file(part).tensors[0].offset % 4096 == 0


def test_what_put_took_may_be_reused_by_the_caller(tmp_path: Path) -> None:
    with writer(tmp_path) as open_writer:
        for part, name, shard, tensor in pieces():
            buffer = tensor.clone()
            open_writer.put(part, name, shard, buffer)
            buffer.zero_()
        open_writer.commit()
    assert whole(tmp_path)


def test_strided_tensors_and_pieces_larger_than_a_chunk_are_written_right(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(snapshot_writer, "_CHUNK_BYTES", 16)
    monkeypatch.setattr(write_behind, "_FLUSH", 32)
    expected = torch.arange(21 * 6, dtype=torch.float32).reshape(6, 21).t()
    assert not expected.is_contiguous()
    entries = (Entry("w", "F32", (21, 6), (Piece(None, 0, 21),)),)
    with writer(tmp_path, parts={"x": entries}) as open_writer:
        open_writer.put("x", "w", None, expected)
        folder = open_writer.commit()
    assert torch.equal(load_file(folder / "x.safetensors")["w"], expected)
    with open_snapshot(tmp_path, KEY) as snapshot:  # type: ignore[union-attr]
        assert snapshot.digests("x") == {"w@-": blake3(expected.contiguous().numpy().tobytes()).hexdigest()}


def test_waiting_copies_are_bounded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(snapshot_writer, "_QUEUE_BYTES", 8192)
    gate = threading.Event()
    pwrite = os.pwrite
    entries = tuple(Entry(f"w{i}", "F32", (8,), (Piece(None, 0, 8),)) for i in range(8))
    with writer(tmp_path, parts={"x": entries}) as open_writer:
        monkeypatch.setattr(os, "pwrite", lambda *args: (gate.wait(180), pwrite(*args))[1])
        done: list[int] = []

        def load() -> None:
            for i in range(8):
                open_writer.put("x", f"w{i}", None, torch.full((8,), float(i)))
                done.append(i)

        thread = threading.Thread(target=load)
        thread.start()
        thread.join(0.3)
        assert done == [0, 1], "each takes a page, so two fit in 8192"
        gate.set()
        thread.join(180)
        folder = open_writer.commit()
    assert load_file(folder / "x.safetensors")["w7"].eq(7).all()


def test_written_files_leave_the_page_cache(tmp_path: Path) -> None:
    entries = (Entry("w", "F32", (1 << 20,), (Piece(None, 0, 1 << 20),)),)
    with writer(tmp_path, parts={"x": entries}) as open_writer:
        open_writer.put("x", "w", None, torch.ones(1 << 20))
        folder = open_writer.commit()
    assert cached_share([folder / "x.safetensors"]) <= 0.02


def test_leaving_without_commit_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), writer(tmp_path) as open_writer:
        open_writer.put(*next(pieces()))
        raise KeyboardInterrupt
    assert left(tmp_path) == []
    with pytest.raises(LoadError, match="it has ended"):
        open_writer.put(*list(pieces())[1])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("transformer", "nothing.weight", None, torch.ones(1)), "not in its layout"),
        (("transformer", "qkv.weight", None, torch.ones(8, 6)), "not in its layout"),
        (("vae", "qkv.weight", "q", torch.ones(8, 6)), "not in its layout"),
        (("transformer", "norm.weight", None, torch.ones(4)), "[5]"),
        (("transformer", "norm.weight", None, torch.ones(5).bfloat16()), "torch.float32"),
    ],
)
def test_a_piece_that_is_not_in_the_layout_is_named(tmp_path: Path, arguments: Any, reason: str) -> None:
    with writer(tmp_path) as open_writer, pytest.raises(LoadError) as caught:
        open_writer.put(*arguments)
    assert arguments[1] in str(caught.value) and reason in str(caught.value)


def test_a_piece_comes_exactly_once(tmp_path: Path) -> None:
    with writer(tmp_path) as open_writer:
        *rest, last = pieces()
        for piece in rest:
            open_writer.put(*piece)
        with pytest.raises(LoadError, match="put before"):
            open_writer.put(*rest[0])
        with pytest.raises(LoadError, match=r"norm\.weight|qkv") as caught:
            open_writer.commit()
    assert caught.value.details["open"] == [f"transformer: {last[1]}@{last[2]}"]
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    "broken",
    [
        (Piece(None, 0, 3),),
        (Piece(0, 0, 2), Piece(1, 3, 1)),
        (Piece(0, 0, 3), Piece(1, 2, 2)),
        (Piece(0, 0, 2), Piece(1, 1, 2)),
        (Piece(0, 0, 2), Piece(0, 2, 2)),
        (),
    ],
)
def test_pieces_that_do_not_fill_their_entry_are_refused(tmp_path: Path, broken: tuple[Piece, ...]) -> None:
    with pytest.raises(LoadError, match=r"w \[4, 2\] do not fill it exactly once"):
        writer(tmp_path, parts={"x": (Entry("w", "F32", (4, 2), broken),)})


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 100))
    with pytest.raises(SnapshotError) as caught:
        writer(tmp_path)
    text = str(caught.value)
    assert f"snapshot {KEY.id}" in text and "100 bytes are free" in text and "H3_SNAPSHOT=off" in text
    assert left(tmp_path) == []


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_disk_that_fills_up_ends_the_snapshot_and_not_the_load(tmp_path: Path, monkeypatch, call: str) -> None:
    old = write(tmp_path, seed=1)
    with writer(tmp_path) as open_writer:

        def full(*args: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, call, full)
        for piece in pieces():
            open_writer.put(*piece)
        with pytest.raises(SnapshotError) as caught:
            open_writer.commit()
    monkeypatch.undo()
    text = str(caught.value)
    for part in (".safetensors", "No space left on device", "needs", "are free", "H3_CACHE_DIR", "H3_SNAPSHOT=off"):
        assert part in text
    assert caught.value.details["needed_bytes"] > 0 and caught.value.details["free_bytes"] > 0
    assert left(tmp_path) == [old.name] and whole(tmp_path, seed=1)


def test_a_full_disk_gets_its_space_back_at_once(tmp_path: Path, monkeypatch) -> None:
    with writer(tmp_path) as open_writer:

        def full(*args: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "pwrite", full)
        open_writer.put("transformer", "norm.weight", None, torch.ones(5))
        for _ in range(300):
            if open_writer.failure is not None and not any(name.endswith(".tmp") for name in left(tmp_path)):
                break
            threading.Event().wait(0.01)
        else:
            pytest.fail("the half-written files are still there")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError) as caught:
        SnapshotWriter(tmp_path / "file", KEY, ENTRIES)
    assert str(tmp_path / "file") in str(caught.value) and "H3_CACHE_DIR" in caught.value.fix


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("moment", ["put", "manifest", "rename", "after"])
def test_a_killed_writer_leaves_a_temporary_that_the_next_one_removes(
    tmp_path: Path, moment: str, replaced: bool
) -> None:
    if replaced:
        write(tmp_path, seed=1)

    def child() -> None:
        rename = Path.rename

        def rename_last(self: Path, target: Path) -> Path:
            if target == folder_of(tmp_path):
                kill_self()
            return rename(self, target)

        open_writer = writer(tmp_path)
        for number, piece in enumerate(pieces()):
            open_writer.put(*piece)
            if moment == "put" and number == 3:
                kill_self()
        if moment == "manifest":
            SnapshotWriter._manifest = kill_self  # type: ignore[assignment,method-assign]
        if moment == "rename":
            Path.rename = rename_last  # type: ignore[assignment,method-assign]
        if moment == "after":
            snapshot_writer.discard = kill_self  # type: ignore[assignment]
            Path.rename = lambda self, to: (rename(self, to), to == folder_of(tmp_path) and kill_self())  # type: ignore
        open_writer.commit()

    killed(child)
    names = left(tmp_path)
    if moment == "after":
        assert whole(tmp_path)
    elif replaced and moment != "rename":
        assert whole(tmp_path, seed=1)
    else:
        assert KEY.id not in names and open_snapshot(tmp_path, KEY) is None
    assert any(name.endswith(".tmp.lock") for name in names)
    write(tmp_path, seed=2)
    assert left(tmp_path) == [KEY.id] and whole(tmp_path, seed=2)


def test_of_two_writers_one_is_told_that_the_other_writes(tmp_path: Path) -> None:
    with writer(tmp_path) as first:
        with pytest.raises(SnapshotError) as caught:
            writer(tmp_path)
        assert caught.value.details["busy"] is True
        assert KEY.id in str(caught.value) and f"process {os.getpid()} writes" in str(caught.value)
        assert "goes on without" in caught.value.fix
        for piece in pieces():
            first.put(*piece)
        first.commit()
    assert whole(tmp_path) and left(tmp_path) == [KEY.id]


def test_two_processes_that_start_at_once_make_one_snapshot(tmp_path: Path) -> None:
    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                write(tmp_path, seed=7)
                code = 0
            except SnapshotError as exc:
                code = 1 if exc.details.get("busy") else 98
            finally:
                os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert set(codes) <= {0, 1} and 0 in codes, codes
    assert whole(tmp_path, seed=7) and left(tmp_path) == [KEY.id]


def test_writers_of_different_keys_do_not_meet(tmp_path: Path) -> None:
    other = SnapshotKey(KEY.source, KEY.recipe, KEY.backend, KEY.host, "0.0.1")
    with writer(tmp_path) as open_writer:
        write(tmp_path, other)
        for piece in pieces():
            open_writer.put(*piece)
        open_writer.commit()
    assert whole(tmp_path) and folder_of(tmp_path, other).is_dir()
