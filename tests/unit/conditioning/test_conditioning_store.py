# SPDX-License-Identifier: Apache-2.0
"""Tables wait on the device and on disk, within bounds; a file is whole or is not used; each is built once."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit.conditioning.conftest import SHAPE, steps, table_of
from vllm_h3_plugin.conditioning.store import Origin, TableStore
from vllm_h3_plugin.conditioning.table import AdalnTable

Make = Callable[..., TableStore]
ROW = SHAPE.nbytes(1)


def never() -> AdalnTable:
    raise AssertionError("a table that is at hand was built")


def test_a_table_is_built_once_and_then_found_on_the_device(store: Make) -> None:
    tables = store(folder=None)
    first = tables.get(steps(0.5), lambda: table_of(steps(0.5)))
    assert tables.get(steps(0.5), never) is first


def test_another_server_finds_it_on_disk_with_equal_bytes(store: Make) -> None:
    made = store().get(steps(0.5, 0.25), lambda: table_of(steps(0.5, 0.25), 0.1))
    found = store().get(steps(0.5, 0.25), never)
    assert torch.equal(found.values, made.values) and found.values.data_ptr() != made.values.data_ptr()


@pytest.mark.parametrize("other", [Origin("other weights", {"torch": "x"}), Origin("weights", {"torch": "y"})])
def test_tables_of_other_weights_or_other_arithmetic_are_not_found(store: Make, other: Origin) -> None:
    store().get(steps(0.5), lambda: table_of(steps(0.5), 1))
    made = store(origin=other).get(steps(0.5), lambda: table_of(steps(0.5), 2))
    assert made.values.unique().tolist() == [2]


def test_the_least_recently_used_leaves_the_device_before_memory_is_taken(store: Make) -> None:
    tables = store(folder=None, device_bytes=2 * ROW)
    for value in (0.1, 0.2):
        tables.get(steps(value), lambda value=value: table_of(steps(value)))  # type: ignore[misc]
    tables.get(steps(0.1), never)
    room: list[int] = []

    def build() -> AdalnTable:
        room.append(tables.nbytes)
        return table_of(steps(0.3))

    tables.get(steps(0.3), build)
    assert room == [ROW]
    assert tables.resident(steps(0.1)) is not None and tables.resident(steps(0.2)) is None


def test_a_table_larger_than_the_bound_is_kept_alone(store: Make) -> None:
    tables = store(folder=None, device_bytes=ROW)
    tables.get(steps(0.1), lambda: table_of(steps(0.1)))
    tables.get(steps(0.2, 0.3), lambda: table_of(steps(0.2, 0.3)))
    assert tables.nbytes == 2 * ROW and tables.resident(steps(0.1)) is None


def test_files_beyond_the_bound_go_least_recently_used_first(store: Make, tmp_path: Path) -> None:
    probe = store()
    probe.save(table_of(steps(0.9)))
    path = probe.path(steps(0.9))
    assert path is not None
    size = path.stat().st_size
    path.unlink()
    tables = store(disk_bytes=2 * size + 1)
    for index, value in enumerate((0.1, 0.2)):
        tables.save(table_of(steps(value)))
        path = tables.path(steps(value))
        assert path is not None
        os.utime(path, (index, index))
    assert tables.load(steps(0.1)) is not None  # used: now the younger of the two
    tables.save(table_of(steps(0.3)))
    left = {value for value in (0.1, 0.2, 0.3) if tables.on_disk(steps(value))}
    assert left == {0.1, 0.3}


def test_a_use_is_no_change_of_the_file_for_who_reads_it_meanwhile(store: Make) -> None:
    """Ranks of one machine read one file; the reader refuses one whose time of change moves under it."""
    tables = store()
    tables.save(table_of(steps(0.1)))
    path = tables.path(steps(0.1))
    assert path is not None
    os.utime(path, (1, 1))
    changed = path.stat().st_mtime_ns
    assert store().load(steps(0.1)) is not None
    assert path.stat().st_mtime_ns == changed and path.stat().st_atime_ns > changed


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def _foreign(path: Path) -> None:
    path.write_bytes(b"not a table")


@pytest.mark.parametrize("damage", [_flip, _truncate, _foreign])
def test_a_damaged_file_is_said_and_built_again(
    store: Make, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    tables = store()
    tables.save(table_of(steps(0.5), 1))
    path = tables.path(steps(0.5))
    assert path is not None
    damage(path)
    with caplog.at_level(logging.WARNING):
        made = store().get(steps(0.5), lambda: table_of(steps(0.5), 3))
    assert made.values.unique().tolist() == [3]
    assert str(path) in caplog.text and "built again" in caplog.text
    assert store().get(steps(0.5), never).values.unique().tolist() == [3]


def test_a_full_disk_costs_the_file_and_not_the_table(
    store: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vllm_h3_plugin.conditioning.store.save_file", full)
    tables = store()
    with caplog.at_level(logging.WARNING):
        assert tables.get(steps(0.5), lambda: table_of(steps(0.5))).nbytes == ROW
    assert "No space left" in caplog.text and not tables.on_disk(steps(0.5))
    folder = tables.path(steps(0.5)).parent  # type: ignore[union-attr]
    assert [file for file in folder.iterdir() if file.suffix not in (".lock",) and file.stat().st_size] == []


def test_a_folder_that_cannot_be_written_is_said_and_done_without(
    store: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        tables = store(folder=tmp_path / "file" / "tables")
    assert "not kept on disk" in caplog.text
    assert tables.get(steps(0.5), lambda: table_of(steps(0.5))).nbytes == ROW


def test_servers_that_want_one_table_at_once_build_it_once(store: Make) -> None:
    built = []

    def build() -> AdalnTable:
        built.append(1)
        time.sleep(0.3)
        return table_of(steps(0.5), len(built))

    # One store each, as in two processes: nothing but the folder joins them.
    threads = [threading.Thread(target=lambda: store().get(steps(0.5), build)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]


_BUILDER = """
import sys, time
from pathlib import Path
import torch
from tests.unit.conditioning.conftest import ORIGIN, SHAPE, steps, table_of
from vllm_h3_plugin.conditioning import store

if sys.argv[2] == "saving":
    real = store.save_file
    def slow(tensors, path, notes):
        real(tensors, path, notes)
        print("begun", flush=True)
        time.sleep(60)
    store.save_file = slow

def build():
    if sys.argv[2] == "building":
        print("begun", flush=True)
        time.sleep(60)
    return table_of(steps(0.5))

tables = store.TableStore(SHAPE, ORIGIN, device=torch.device("cpu"), device_bytes=1 << 20,
                          folder=Path(sys.argv[1]), disk_bytes=1 << 20)
tables.get(steps(0.5), build)
"""


@pytest.mark.parametrize("moment", ["building", "saving"])
def test_kill_9_while_a_table_is_built_leaves_nothing_that_is_taken_for_one(
    store: Make, tmp_path: Path, moment: str
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _BUILDER, str(tmp_path / "tables"), moment], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    began = time.monotonic()
    made = store().get(steps(0.5), lambda: table_of(steps(0.5), 4))
    assert made.values.unique().tolist() == [4] and time.monotonic() - began < 30
    files = [file.name for file in (tmp_path / "tables").iterdir() if file.suffix != ".lock"]
    assert files == [store().path(steps(0.5)).name]  # type: ignore[union-attr]
