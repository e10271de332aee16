# SPDX-License-Identifier: Apache-2.0
"""Restarts of a real server: from the snapshot that the first start left, and past every way in which it can be bad."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ports import own_port
from tests.server.conftest import Running, Servers, request
from vllm_h3_plugin.checkpoint.atomic import temporaries
from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.checkpoint.page_cache import cached_bytes, cached_share
from vllm_h3_plugin.checkpoint.snapshot_store import OK, SnapshotInfo, list_snapshots

MOST_CACHED = 0.02
"""Share of a checkpoint's bytes that may stay in the page cache."""
HEADER_READAHEAD = 128 << 10
"""What Linux reads behind a header unless told otherwise (read_ahead_kb)."""


def load_of(running: Running) -> dict[str, Any]:
    """What the server says about its load."""
    load: dict[str, Any] = running.info["workers"][0]["load"]
    return load


def only_snapshot(cache: Path) -> SnapshotInfo:
    """The one snapshot of a cache folder, which holds nothing unfinished."""
    assert temporaries(cache / "snapshots") == () and temporaries(cache / "tables") == ()
    (snapshot,) = list_snapshots(cache)
    return snapshot


def test_a_start_without_a_snapshot_writes_one_and_tells_seconds_and_bytes(fp8: Running) -> None:
    load, snapshot = load_of(fp8), only_snapshot(fp8.cache)
    assert load["origin"] == "checkpoint" and load["detail"] == f"snapshot {snapshot.id} written"
    assert load["nbytes"] > snapshot.nbytes > 0
    parts = ("transformer", "text_encoder", "writing snapshot", "table of transformer")
    assert all(load["seconds"][part] >= 0 for part in parts)
    assert sum(load["seconds"][part] for part in parts) <= load["seconds"]["total"] + 0.1
    assert [vae["part"] for vae in load["vaes"]] == ["video_vae", "audio_vae"]
    assert all(vae["nbytes"] > 0 and vae["seconds"] >= 0 for vae in load["vaes"])
    assert f"H3 snapshot written to {snapshot.path}" in fp8.log


def test_the_next_start_loads_it_and_makes_the_same_clip(fp8: Running, fp8_again: Running, tmp_path: Path) -> None:
    load, snapshot = load_of(fp8_again), only_snapshot(fp8.cache)
    assert (load["origin"], load["detail"]) == ("snapshot", snapshot.id)
    assert 0.9 * snapshot.nbytes < load["nbytes"] < load_of(fp8)["nbytes"]
    assert fp8_again.info["workers"][0]["layers"] == fp8.info["workers"][0]["layers"]
    for seed in (1, 2):
        first = fp8.make(request(seed=seed), tmp_path / f"first{seed}.mp4").read_bytes()
        assert fp8_again.make(request(seed=seed), tmp_path / f"again{seed}.mp4").read_bytes() == first


def test_a_snapshot_with_one_flipped_byte_is_named_passed_by_and_made_anew(
    own_servers: Servers, fl2va: Path, fp8: Running, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(fp8.cache, cache)
    snapshot = only_snapshot(cache)
    file = snapshot.path / "transformer.safetensors"
    before = file.read_bytes()
    with file.open("r+b") as stream:
        stream.seek(len(before) * 3 // 4)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
    damaged = own_servers.start(fl2va, recipe="fp8", cache=cache)
    assert load_of(damaged)["origin"] == "checkpoint"
    said = next(line for line in damaged.log.splitlines() if "H3 snapshot is not used" in line)
    assert str(file) in said and re.search(r"tensor \S+@\S+ has BLAKE3", said)
    again = only_snapshot(cache)
    assert (again.id, again.state) == (snapshot.id, OK) and file.read_bytes() == before
    asked = request(seed=3)
    made = damaged.make(asked, tmp_path / "damaged.mp4").read_bytes()
    assert made == fp8.make(asked, tmp_path / "whole.mp4").read_bytes()


def test_require_without_a_snapshot_ends_the_start_with_reason_and_fix(fl2va: Path, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "vllm-h3"), "serve", "reference", "-c", str(fl2va)]
    done = subprocess.run(
        [*command, "--port", str(own_port())],
        env={**os.environ, "H3_SNAPSHOT": "require", "H3_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 7, done.stderr[-3000:]
    last = done.stderr[done.stderr.rindex("error: the server") :]
    assert f"no snapshot in {tmp_path}" in last
    assert "Start once with H3_SNAPSHOT=auto, which writes one" in last
    assert "loading video_vae" not in done.stderr, "10 GiB were read for a start that had to be refused"
    assert list_snapshots(tmp_path) == []


@pytest.fixture(scope="module")
def at_once(
    servers: Servers, checkpoint_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Running, Running]:
    """Two servers started at the same time on one cache folder and a checkpoint that nothing else reads."""
    checkpoint = checkpoint_of(partition="fl2va", seed=3)
    for file in checkpoint.rglob("*.safetensors"):  # else pages that wait for the disk cannot be dropped
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    cache = tmp_path_factory.mktemp("at-once")
    profiles = [servers.profile(checkpoint, recipe="fp8") for _ in range(2)]
    one, two = (servers.launch(profile, cache=cache) for profile in profiles)
    return servers.ready(one), servers.ready(two)


def test_two_servers_at_once_make_one_snapshot_and_equal_clips(
    at_once: tuple[Running, Running], tmp_path: Path
) -> None:
    one, two = at_once
    assert one.cache == two.cache and only_snapshot(one.cache).state == OK
    assert "checkpoint" in {load_of(running)["origin"] for running in at_once}
    first = one.make(request(), tmp_path / "one.mp4").read_bytes()
    assert two.make(request(), tmp_path / "two.mp4").read_bytes() == first


def test_a_ready_server_leaves_nothing_of_its_files_in_the_page_cache(at_once: tuple[Running, Running]) -> None:
    checkpoint = Path(at_once[0].server.command.argv[4])
    inventory = take_inventory(checkpoint).require_clean()
    parts = [part for partition in inventory.partitions for part in partition.parts]
    assert {"video_vae", "audio_vae", "transformer", "text_encoder"} <= {part.name for part in parts}
    files = [file.path for part in parts for file in part.files]
    assert cached_share(files) <= MOST_CACHED
    # What these small files have in the cache is the kernel's readahead behind their headers.
    for file in (*files, *only_snapshot(at_once[0].cache).path.glob("*.safetensors")):
        assert cached_bytes(file) <= max(MOST_CACHED * file.stat().st_size, HEADER_READAHEAD), file
