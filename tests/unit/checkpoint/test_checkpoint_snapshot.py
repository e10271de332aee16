# SPDX-License-Identifier: Apache-2.0
"""A snapshot is opened only if it is whole and of the key asked for; what is wrong is named, with the way out."""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from tests.unit.checkpoint.snapshot_kit import ENTRIES, KEY, flip, folder_of, pieces, write
from vllm_h3_plugin.checkpoint.file_lock import hold
from vllm_h3_plugin.checkpoint.page_cache import cached_share
from vllm_h3_plugin.checkpoint.reader import WeightSource
from vllm_h3_plugin.checkpoint.snapshot import Snapshot, find_stale, open_snapshot, parse_piece
from vllm_h3_plugin.checkpoint.snapshot_manifest import Entry, Piece, SnapshotKey, piece_name
from vllm_h3_plugin.checkpoint.snapshot_paths import lock_of
from vllm_h3_plugin.checkpoint.snapshot_store import first_damage, list_snapshots, remove_snapshot
from vllm_h3_plugin.checkpoint.snapshot_writer import SnapshotWriter
from vllm_h3_plugin.errors import BusyError, SnapshotError


def opened(cache_dir: Path, key: SnapshotKey = KEY) -> Snapshot:
    snapshot = open_snapshot(cache_dir, key)
    assert snapshot is not None
    return snapshot


def refused(cache_dir: Path, key: SnapshotKey = KEY) -> SnapshotError:
    """The refusal of this key's snapshot; it gives the way out and leaves no lock behind."""
    with pytest.raises(SnapshotError) as caught:
        open_snapshot(cache_dir, key)
    assert f"vllm-h3 snapshot remove {key.id}" in caught.value.fix
    assert caught.value.details["path"] in str(caught.value)
    with hold(lock_of(folder_of(cache_dir, key))) as lock:  # type: ignore[union-attr]
        assert lock is not None
    return caught.value


def edit_manifest(folder: Path, old: str, new: str, *, sign: bool = True) -> None:
    path = folder / "manifest.json"
    body = json.loads(path.read_text().replace(old, new))
    if sign:
        del body["digest"]
        body["digest"] = blake3(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps(body))


def test_no_snapshot_is_none_and_leaves_no_trace(tmp_path: Path) -> None:
    assert open_snapshot(tmp_path, KEY) is None and find_stale(tmp_path, KEY) == []
    assert os.listdir(tmp_path) == []


def test_pieces_stream_as_they_were_put(tmp_path: Path) -> None:
    write(tmp_path)
    expected = {(part, name, shard): tensor for part, name, shard, tensor in pieces()}
    read = {}
    with opened(tmp_path) as snapshot:
        assert snapshot.parts == tuple(ENTRIES) and snapshot.notes["checkpoint"] == "/models/FL2VA"
        for part in snapshot.parts:
            digests = snapshot.digests(part)
            order = [record.offset for record in snapshot.part(part).tensors]
            assert order == sorted(order)
            for name, tensor in WeightSource(snapshot.part(part)):
                read[part, *parse_piece(name)] = tensor
                raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                assert blake3(raw).hexdigest() == digests[name]
    assert read.keys() == expected.keys()
    for piece, tensor in expected.items():
        assert read[piece].dtype == tensor.dtype and torch.equal(read[piece].float(), tensor.float()), piece


@pytest.mark.parametrize("shard", [None, 0, 1, "q", "k", "v"])
def test_piece_names_can_be_taken_apart(shard: str | int | None) -> None:
    assert parse_piece(piece_name("a.b.weight", shard)) == ("a.b.weight", shard)


@pytest.mark.parametrize("field", ["source", "recipe", "backend", "host", "plugin"])
def test_every_field_of_the_key_makes_another_snapshot(tmp_path: Path, field: str) -> None:
    write(tmp_path)
    other = replace(KEY, **{field: "other"})
    assert other.id != KEY.id and open_snapshot(tmp_path, other) is None
    stale = find_stale(tmp_path, other, "/models/FL2VA")
    assert [s.id for s in stale] == [KEY.id] and set(stale[0].differs) == {field}
    assert str(stale[0]) == f"snapshot {KEY.id} is of {field} {getattr(KEY, field)} (now other)"
    assert find_stale(tmp_path, KEY, "/models/FL2VA") == []


def test_snapshots_of_another_checkpoint_are_not_stale(tmp_path: Path) -> None:
    write(tmp_path)
    other = replace(KEY, source="other")
    assert find_stale(tmp_path, other, "/models/Ref2VA") == [] and find_stale(tmp_path, other) == []
    assert len(find_stale(tmp_path, replace(KEY, plugin="0"))) == 1, "of the same files, whatever their path"


def test_a_half_written_one_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "manifest.json").unlink()
    error = refused(tmp_path)
    assert error.details["path"] == str(folder) and "half-written" in str(error)


@pytest.mark.parametrize("by", [1, 100_000])
def test_a_truncated_file_is_refused(tmp_path: Path, by: int) -> None:
    file = write(tmp_path) / "transformer.safetensors"
    size = file.stat().st_size
    os.truncate(file, max(0, size - by))
    error = refused(tmp_path)
    assert error.details["path"] == str(file) and f"the manifest says {size}" in str(error)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path) / "text_encoder.safetensors"
    file.unlink()
    error = refused(tmp_path)
    assert error.details["path"] == str(file) and "missing" in str(error)


def test_a_changed_header_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path) / "transformer.safetensors"
    flip(file, file.read_bytes().index(b"norm.weight"))  # still a sound header, of another parameter
    error = refused(tmp_path)
    assert error.details["path"] == str(file) and "its header does not have the digest" in str(error)


@pytest.mark.parametrize(
    ("old", "new", "sign", "reason"),
    [
        ('"format": 1,', '"format": 2,', True, "of format 2, and this version reads format 1"),
        ('"format": 1,', "", True, "of format None"),
        ("4444", "4445", True, "it is the manifest of snapshot"),
        ('"fp8"', '"bf16"', False, "changed or damaged"),
    ],
)
def test_a_foreign_or_damaged_manifest_is_refused(tmp_path: Path, old: str, new: str, sign: bool, reason: str) -> None:
    folder = write(tmp_path)
    edit_manifest(folder, old, new, sign=sign)
    error = refused(tmp_path)
    assert error.details["path"] == str(folder / "manifest.json") and reason in str(error)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1,'])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path)
    (folder / "manifest.json").write_text(text)
    assert refused(tmp_path).details["path"] == str(folder / "manifest.json")


def test_a_folder_of_another_key_is_refused_with_the_field_that_differs(tmp_path: Path) -> None:
    other = replace(KEY, plugin="0.0.1")
    write(tmp_path, other).rename(folder_of(tmp_path))
    assert f"manifest of snapshot {other.id}" in str(refused(tmp_path))


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch) -> None:
    file = write(tmp_path) / "transformer.safetensors"
    path_open = Path.open

    def deny(self: Path, *args: object, **kwargs: object) -> object:
        if self == file:
            raise PermissionError(13, "Permission denied", str(self))
        return path_open(self, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", deny)
    error = refused(tmp_path)
    assert error.details["path"] == str(file) and "Permission denied" in str(error)


def test_a_refused_snapshot_gives_way_to_a_new_one(tmp_path: Path) -> None:
    folder = write(tmp_path)
    os.truncate(folder / "transformer.safetensors", 100)
    refused(tmp_path)
    write(tmp_path, seed=3)
    with opened(tmp_path) as snapshot:
        assert first_damage(snapshot) is None


def test_a_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    folder = write(tmp_path)
    with opened(tmp_path) as snapshot:
        records = snapshot.part("transformer").tensors
    victim = next(record for record in records if record.name == "qkv.weight@k")
    flip(victim.file, victim.offset + victim.nbytes - 1)
    later = next(record for record in records if record.name == "norm.weight@-")
    flip(later.file, later.offset)
    seen: list[int] = []
    with opened(tmp_path) as snapshot:
        damage = first_damage(snapshot, progress=seen.append)
    assert damage is not None and (damage.part, damage.param, damage.shard) == ("transformer", "qkv.weight", "k")
    text = str(damage.error(KEY.id))
    assert str(folder / "transformer.safetensors") in text and "qkv.weight, shard k" in text
    assert str(victim.offset) in text and f"vllm-h3 snapshot remove {KEY.id}" in text
    assert sum(seen) > 0


def test_while_it_is_read_it_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    write(tmp_path)
    with opened(tmp_path) as snapshot, opened(tmp_path):
        source = iter(WeightSource(snapshot.part("transformer")))
        next(source)
        with pytest.raises(SnapshotError, match="in use") as caught:
            SnapshotWriter(tmp_path, KEY, ENTRIES)
        assert caught.value.details["busy"] is True
        with pytest.raises(BusyError, match=KEY.id):
            remove_snapshot(list_snapshots(tmp_path)[0])
        assert len(list(source)) == 9 - 1
    write(tmp_path, seed=1)


def test_a_mapped_file_stays_as_it_was_when_a_new_one_takes_its_place(tmp_path: Path) -> None:
    write(tmp_path)
    with opened(tmp_path) as snapshot:
        file = snapshot.file("transformer")
    with file.path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        before = file.path.read_bytes()
        write(tmp_path, seed=1)
        assert file.path.read_bytes() != before and mapped[:] == before


def test_one_that_is_being_replaced_is_not_read(tmp_path: Path) -> None:
    write(tmp_path)
    with SnapshotWriter(tmp_path, KEY, ENTRIES), pytest.raises(SnapshotError) as caught:
        open_snapshot(tmp_path, KEY)
    assert caught.value.details["busy"] is True and f"process {os.getpid()} writes" in str(caught.value)
    opened(tmp_path).close()


def test_one_that_is_being_written_for_the_first_time_is_none(tmp_path: Path) -> None:
    with SnapshotWriter(tmp_path, KEY, ENTRIES):
        assert open_snapshot(tmp_path, KEY) is None


def test_a_lost_reader_lets_go(tmp_path: Path) -> None:
    write(tmp_path)
    opened(tmp_path)
    write(tmp_path, seed=1)


def test_it_can_be_read_from_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch) -> None:
    folder = write(tmp_path)
    lock_of(folder).unlink()
    os_open = os.open

    def read_only(name: object, flags: int, *args: int) -> int:
        if flags & (os.O_RDWR | os.O_CREAT):
            raise OSError(30, "Read-only file system")
        return os_open(name, flags, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", read_only)
    with opened(tmp_path) as snapshot:
        assert len(list(WeightSource(snapshot.part("transformer")))) == 9


def test_a_removed_snapshot_is_gone_with_its_lock(tmp_path: Path) -> None:
    write(tmp_path)
    remove_snapshot(list_snapshots(tmp_path)[0])
    assert os.listdir(tmp_path / "snapshots") == [] and open_snapshot(tmp_path, KEY) is None


def test_verifying_leaves_no_pages_in_the_cache(tmp_path: Path) -> None:
    entries = (Entry("w", "F32", (1 << 20,), (Piece(0, 0, 1 << 19), Piece(1, 1 << 19, 1 << 19))),)
    with SnapshotWriter(tmp_path, KEY, {"x": entries}) as writer:
        writer.put("x", "w", 0, torch.zeros(1 << 19))
        writer.put("x", "w", 1, torch.ones(1 << 19))
        writer.commit()
    with opened(tmp_path) as snapshot:
        assert first_damage(snapshot) is None
        assert cached_share([snapshot.file("x").path]) <= 0.02
