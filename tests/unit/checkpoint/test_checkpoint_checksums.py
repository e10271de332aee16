# SPDX-License-Identifier: Apache-2.0
"""`vllm-h3 checksums` writes what `sha256sum -c` checks, finds every bad file, and serves the reader."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vllm_h3_plugin.checkpoint import checksums as manifests
from vllm_h3_plugin.checkpoint.checksums import digests_for, read_manifest, weight_files
from vllm_h3_plugin.checkpoint.hash_files import hash_files, stat_file
from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.checkpoint.page_cache import cached_share, drop
from vllm_h3_plugin.checkpoint.reader import WeightSource
from vllm_h3_plugin.cli.main import main
from vllm_h3_plugin.errors import CheckpointError, UsageError


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["checksums", *map(str, arguments)])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@pytest.fixture
def manifest(checkpoint, tmp_path: Path, run) -> Path:
    path = tmp_path / "sums"
    assert run(checkpoint.root, "--output", path)[0] == 0
    return path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_sha256sum_checks_what_was_written(checkpoint, manifest: Path) -> None:
    lines = manifest.read_text().splitlines()
    names = sorted(str(path.relative_to(checkpoint.root)) for path in checkpoint.root.rglob("*.safetensors"))
    assert [line[66:] for line in lines] == names and len(names) > 8, "VAEs and both partitions included"
    for line, name in zip(lines, names, strict=True):
        assert line == f"{hashlib.sha256((checkpoint.root / name).read_bytes()).hexdigest()}  {name}"
    checked = subprocess.run(["sha256sum", "-c", "--strict", manifest], cwd=checkpoint.root, capture_output=True)
    assert checked.returncode == 0


def test_default_name_is_that_of_the_folder(checkpoint, run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(checkpoint.root)
    assert code == 0 and out.startswith("H3.sha256: ")
    monkeypatch.chdir(checkpoint.fl2va)
    assert run(".")[0] == 0
    assert (checkpoint.fl2va / "FL2VA.sha256").is_file()
    assert all(line[66:].startswith("FL2VA/") for line in Path("FL2VA.sha256").read_text().splitlines())


def test_an_existing_file_is_overwritten_by_force_only(checkpoint, manifest: Path, run) -> None:
    manifest.write_text("mine")
    code, _, err = run(checkpoint.root, "--output", manifest)
    assert code == 2 and str(manifest) in err and "--force" in err and manifest.read_text() == "mine"
    assert run(checkpoint.root, "--output", manifest, "--force")[0] == 0
    assert len(read_manifest(manifest)) > 8
    assert [path.name for path in manifest.parent.iterdir() if path.suffix == ".part"] == []


def test_a_file_that_came_meanwhile_is_not_overwritten(tmp_path: Path, monkeypatch) -> None:
    target, real = tmp_path / "sums", os.fsync

    def fsync(descriptor: int) -> None:
        target.write_text("theirs")
        real(descriptor)

    monkeypatch.setattr(manifests.os, "fsync", fsync)
    with pytest.raises(UsageError, match="exists"):
        manifests.write_manifest(target, {"a": "0" * 64})
    assert target.read_text() == "theirs" and list(tmp_path.iterdir()) == [target]


def test_a_folder_that_is_not_there_is_named(checkpoint, tmp_path: Path, run) -> None:
    code, _, err = run(checkpoint.root, "--output", tmp_path / "absent" / "sums")
    assert code == 2 and str(tmp_path / "absent" / "sums") in err and "--output" in err


def test_a_broken_checkpoint_is_not_listed(checkpoint, tmp_path: Path, run) -> None:
    checkpoint.shard().unlink()
    code, _, err = run(checkpoint.root, "--output", tmp_path / "sums")
    assert code == 3 and str(checkpoint.shard().parent) in err and not (tmp_path / "sums").exists()


@pytest.mark.parametrize("which", ["root", "FL2VA", "Ref2VA"])
def test_a_list_of_both_partitions_serves_each(checkpoint, manifest: Path, run, which: str) -> None:
    path = checkpoint.root if which == "root" else checkpoint.root / which
    code, out, err = run(path, "--check", manifest, "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["bad"] == {}
    inventory = take_inventory(path, "any")
    digests = digests_for(manifest, inventory)
    part = inventory.partitions[0].part("transformer")
    assert len(list(WeightSource(part, file_digests=digests))) == len(part.tensors)


def test_check_lists_every_bad_missing_and_unlisted_file(checkpoint, manifest: Path, run) -> None:
    flip(checkpoint.shard("transformer", 0))
    checkpoint.shard("video_vae").unlink()
    cut = checkpoint.shard("audio_vae")
    checkpoint.write(cut, cut.read_bytes()[:-5])
    unlisted = f"FL2VA/transformer/{checkpoint.shard('transformer', 1).name}"
    kept = [line for line in manifest.read_text().splitlines() if unlisted not in line]
    manifest.write_text("\n".join(kept) + "\n")
    code, out, err = run(checkpoint.root, "--check", manifest, "--json")
    assert code == 3
    *lines, last = out.splitlines()
    bad = json.loads(last)["error"]["bad"]
    assert json.loads(last)["ok"] is False and len(bad) == 4 and len(lines) == 5
    by_part = {name.split("/")[1]: verdict for name, verdict in bad.items() if name != unlisted}
    assert by_part["transformer"].startswith("SHA-256 ") and "listed" in by_part["transformer"]
    assert by_part["video_vae"].startswith("missing") and by_part["audio_vae"].startswith("SHA-256 ")
    assert "not listed" in bad[unlisted]
    assert all(name in err for name in bad) and "Download damaged and missing files again" in err and "--force" in err


def test_check_says_when_the_list_is_of_something_else(checkpoint, tmp_path: Path, run) -> None:
    other = tmp_path / "other"
    other.write_text(f"{'0' * 64}  elsewhere/x.safetensors\n")
    code, _, err = run(checkpoint.fl2va, "--check", other)
    assert code == 3 and str(other) in err and f"vllm-h3 checksums {checkpoint.fl2va}" in err


@pytest.mark.parametrize("option", ["--force", "--output"])
def test_check_writes_nothing(checkpoint, manifest: Path, run, option: str) -> None:
    more = [manifest.with_name("new")] if option == "--output" else []
    code, _, err = run(checkpoint.root, "--check", manifest, option, *more)
    assert code == 2 and option in err


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("no checksum", "64 hex digits"),
        (f"{'0' * 63}  a", "64 hex digits"),
        (f"{'0' * 64}  ../a", "leads out"),
        (f"{'0' * 64}  /a", "leads out"),
        (f"{'1' * 64}  first", "another SHA-256"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "sums"
    path.write_text(f"# comment\n{'0' * 64}  first\n\n{line}\n")
    with pytest.raises(CheckpointError) as caught:
        read_manifest(path)
    assert f"{path}, line 4" in caught.value.what and why in caught.value.why
    assert "vllm-h3 checksums" in caught.value.fix


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00"])
def test_a_list_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "sums"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(path)
    assert str(path) in caught.value.what and "vllm-h3 checksums" in caught.value.fix


def test_binary_mode_and_capitals_are_read(tmp_path: Path) -> None:
    (tmp_path / "sums").write_text(f"{'A' * 64} *./a/b\n")
    assert read_manifest(tmp_path / "sums") == {"a/b": "a" * 64}


def test_a_shard_that_the_list_lacks_is_named_with_the_command(checkpoint, manifest: Path) -> None:
    lost = checkpoint.shard("text_encoder")
    kept = [line for line in manifest.read_text().splitlines() if f"FL2VA/text_encoder/{lost.name}" not in line]
    manifest.write_text("\n".join(kept))
    with pytest.raises(CheckpointError) as caught:
        digests_for(manifest, checkpoint.inventory())
    assert str(manifest) in caught.value.what and str(lost) in caught.value.what
    assert f"vllm-h3 checksums {checkpoint.fl2va} --output {manifest} --force" in caught.value.fix


def test_hashing_leaves_the_page_cache_empty_and_counts_every_byte(checkpoint) -> None:
    files = list(weight_files(checkpoint.inventory()).values())
    paths = [file.path for file in files]
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    drop(paths)
    seen: list[int] = []
    assert all(found.sha256 for found in hash_files(files, threads=3, progress=seen.append))
    assert sum(seen) == sum(file.size for file in files)
    assert cached_share(paths) <= 0.02


def test_hashing_stops_when_it_is_closed(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(8 << 30)
    threads, descriptors = threading.active_count(), os.listdir("/proc/self/fd")
    hashing = hash_files([stat_file(tmp_path / "small"), stat_file(tmp_path / "large")], threads=2)
    assert next(hashing).path.name == "small"
    hashing.close()  # type: ignore[attr-defined]
    assert threading.active_count() == threads and os.listdir("/proc/self/fd") == descriptors


def test_checksums_need_no_torch(checkpoint, tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None\nfrom vllm_h3_plugin.cli import main\nmain()"
    command = [sys.executable, "-c", code, "checksums", checkpoint.fl2va, "--output", tmp_path / "sums"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(read_manifest(tmp_path / "sums")) > 4
