# SPDX-License-Identifier: Apache-2.0
"""Ranks of one machine share one read-only base: real processes, their disk reads and their memory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.rank_processes import CUT, KEY, WHOLE, drop_from_cache, run_ranks, take, write_base
from vllm_h3_plugin.checkpoint import file_lock, one_builder
from vllm_h3_plugin.checkpoint.atomic import temporaries
from vllm_h3_plugin.checkpoint.read_only import ReadOnlyTensor
from vllm_h3_plugin.checkpoint.shared_base import SharedBase, require_host_memory
from vllm_h3_plugin.checkpoint.snapshot import open_snapshot
from vllm_h3_plugin.errors import BusyError, LoadError, SnapshotError

MIB = 160
RANKS = 4


def opened(cache: Path) -> SharedBase:
    snapshot = open_snapshot(cache, KEY)
    assert snapshot is not None
    return SharedBase(snapshot)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with a small base in it."""
    folder = tmp_path_factory.mktemp("cache")
    write_base(folder, 16)
    return folder


def test_ranks_read_one_copy_hold_one_copy_and_read_nothing_when_warm(tmp_path: Path) -> None:
    folder = write_base(tmp_path, MIB)
    with opened(tmp_path) as base:
        nbytes = base.nbytes
    drop_from_cache(folder)
    found = run_ranks(tmp_path, RANKS, mib=MIB, prompts=20)
    assert not any(rank.built for rank in found)
    assert sum(rank.read_bytes for rank in found) <= 1.02 * nbytes
    assert 0.9 * nbytes < sum(rank.pss for rank in found) <= 1.1 * nbytes
    # What is cut lies in each rank's own memory: a quarter of a quarter.
    assert all(rank.pss_anon < 0.4 * nbytes / RANKS for rank in found)
    assert [rank.warm_read_bytes for rank in found] == [0] * RANKS
    assert len({rank.sums[0] for rank in found}) == 1 and len({rank.sums[1] for rank in found}) == RANKS


def test_one_builds_and_the_others_wait_and_one_that_is_killed_is_followed_by_another(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 4, mib=16, prompts=1, pause_s=2.0, kill_builder=True)
    assert len(found) == 3 and sum(rank.built for rank in found) == 1
    # What was cut off half-way was not taken for the base.
    assert len({rank.sums[0] for rank in found}) == 1
    assert temporaries(tmp_path / "snapshots") == ()


def test_views_are_of_the_mapping_and_cuts_are_copies(cache: Path) -> None:
    with opened(cache) as base:
        (weight, scale), (cut, _) = take(base, 1, 2)[0][:2], take(base, 1, 2)[1][:2]
        assert isinstance(weight, ReadOnlyTensor) and weight.dtype is torch.int8 and scale.dtype is torch.float32
        assert type(cut) is torch.Tensor and cut.shape == (2048, 1024)
        whole = base.view(CUT, "0.weight")
        assert whole is not None and torch.equal(cut, whole[2048:].clone())
        with pytest.raises(LoadError, match="would write a tensor of the shared read-only base"):
            weight[0].zero_()


def test_views_outlive_the_base_that_gave_them(cache: Path) -> None:
    with opened(cache) as base:
        view = base.view(WHOLE, "0.weight")
    assert view is not None
    view.sum()


def test_every_rank_verifies_its_share_and_a_flipped_bit_is_found_by_one_of_them(tmp_path: Path) -> None:
    path = write_base(tmp_path, 16) / f"{WHOLE}.safetensors"
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
    found = 0
    with opened(tmp_path) as base:
        for rank in range(RANKS):
            try:
                base.verify(rank, RANKS)
            except SnapshotError as exc:
                found += 1
                assert str(path) in exc.what and "BLAKE3" in exc.why and "vllm-h3 snapshot remove" in exc.fix
    assert found == 1


def test_a_file_cut_off_while_it_is_mapped_is_named_before_a_view_is_used_and_when_it_is_copied(tmp_path: Path) -> None:
    path = write_base(tmp_path, 16) / f"{WHOLE}.safetensors"
    size = path.stat().st_size
    with opened(tmp_path) as base:
        base.check()
        os.truncate(path, size // 2)
        with pytest.raises(SnapshotError, match="was cut off or changed while it is the base") as caught:
            base.check()
        assert str(path) in caught.value.what and f"{size // 2} bytes and had {size}" in caught.value.why
        assert "Restart the server" in caught.value.fix
        last = base.snapshot.file(WHOLE).tensors[-2]
        with pytest.raises(SnapshotError, match="was cut off"):
            base.read(WHOLE, last)


TOUCH = """
import os, sys
from pathlib import Path
from tests.unit.loader.test_loader_shared_base import opened
from tools.rank_processes import WHOLE
from vllm_h3_plugin.checkpoint.shared_base import announce_bus_errors
announce_bus_errors()
# A second thread that meets the hole ends the process in the middle of the first one's message.
import torch
torch.set_num_threads(1)
base = opened(Path(sys.argv[1]))
record = base.snapshot.file(WHOLE).tensors[-2]
view = base.view(WHOLE, record.name)
os.truncate(record.file, 4096)
view.sum()
"""


def test_a_page_that_goes_away_between_two_checks_leaves_a_message(tmp_path: Path) -> None:
    write_base(tmp_path, 16)
    done = subprocess.run([sys.executable, "-c", TOUCH, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode < 0
    assert "Bus error" in done.stderr and "shared_base" not in done.stdout and "read_only.py" in done.stderr


@pytest.mark.parametrize("why", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_where_no_lock_can_be_made_each_process_builds_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: int, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, **kwargs: object) -> None:
        raise OSError(why, os.strerror(why), str(path))

    monkeypatch.setattr(one_builder, "hold", refuse)
    with caplog.at_level("WARNING"):
        outcome = one_builder.build_once(tmp_path / "x.lock", lambda: None, lambda: "built")
    assert (outcome.built, outcome.here) == ("built", True)
    assert str(tmp_path / "x.lock") in caplog.text and os.strerror(why) in caplog.text


def test_a_builder_that_fails_to_read_is_no_missing_lock(tmp_path: Path) -> None:
    """Its error is passed on, and nothing is built a second time."""
    tries = []

    def build() -> None:
        tries.append(1)
        raise OSError(errno.EIO, "the disk cannot read it")

    with pytest.raises(OSError, match="the disk cannot read it"):
        one_builder.build_once(tmp_path / "x.lock", lambda: None, build)
    assert tries == [1]


def test_a_full_disk_leaves_only_the_builders_name_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_lock.os, "pwrite", full)
    assert one_builder.build_once(tmp_path / "x.lock", lambda: None, lambda: "built").here


def test_a_base_that_the_machine_has_not_the_memory_for_is_refused_with_both_numbers() -> None:
    require_host_memory(2 << 30, 3 << 30)
    with pytest.raises(BusyError, match=r"needs 66\.0 GiB of host memory and 20\.0 GiB are free") as caught:
        require_host_memory(66 << 30, 20 << 30)
    assert "H3_SHARED_BASE=off" in caught.value.fix
