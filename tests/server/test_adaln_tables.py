# SPDX-License-Identifier: Apache-2.0
"""AdaLN tables in a real server: built once a schedule, found again, kept for the next server.

That clips are the stock host's to the bit is in test_parity.py.
"""

from __future__ import annotations

import threading
from pathlib import Path

from tests.server.conftest import PREPARED_STEPS, Running, request

BUILT = "rows are built from the weights on disk"


def lines(running: Running, words: str) -> list[str]:
    """What the server logged with these words."""
    return [line for line in running.log.splitlines() if words in line]


def files(running: Running) -> set[str]:
    """Tables on disk."""
    return {path.name for path in (running.cache / "tables").glob("*.safetensors")}


def test_a_new_schedule_is_built_once_kept_on_disk_and_found_again(fp8: Running, tmp_path: Path) -> None:
    first = fp8.make(request(steps=6), tmp_path / "first.mp4").read_bytes()
    before, built = files(fp8), len(lines(fp8, BUILT))
    fp8.make(request(steps=7), tmp_path / "other.mp4")
    assert len(lines(fp8, BUILT)) == built + 1 and "text" in lines(fp8, BUILT)[-1]
    assert len(files(fp8) - before) == 1
    assert fp8.make(request(steps=6), tmp_path / "again.mp4").read_bytes() == first
    assert len(lines(fp8, BUILT)) == built + 1 and len(files(fp8) - before) == 1


def test_a_given_frame_is_another_schedule(fp8: Running, pictures: tuple[Path, Path], tmp_path: Path) -> None:
    fp8.make(request(steps=5, size=256), tmp_path / "text.mp4")
    built = len(lines(fp8, BUILT))
    fp8.make(request(pictures[0], steps=5), tmp_path / "image.mp4")
    assert len(lines(fp8, BUILT)) == built + 1 and "image" in lines(fp8, BUILT)[-1]


def test_clients_that_ask_at_once_for_one_new_schedule_cost_one_table(fp8: Running, tmp_path: Path) -> None:
    built = len(lines(fp8, BUILT))
    made: dict[int, bytes] = {}

    def ask(index: int) -> None:
        made[index] = fp8.make(request(steps=9), tmp_path / f"{index}.mp4").read_bytes()

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines(fp8, BUILT)) == built + 1
    assert len(made) == 3 and len(set(made.values())) == 1


def test_the_next_server_reads_tables_and_builds_none_but_what_it_was_told_to_prepare(
    fp8: Running, fp8_again: Running, tmp_path: Path
) -> None:
    # Before its first request: a phase that stayed would be a request that never moves, to whoever watches.
    assert fp8_again.info["progress"]["phase"] == "idle"
    built = lines(fp8_again, BUILT)
    assert [f"{PREPARED_STEPS} steps" in line for line in built] == [True]
    assert len(lines(fp8_again, "AdaLN table of 50 steps, text read from")) == 1
    clip = fp8_again.make(request(), tmp_path / "again.mp4").read_bytes()
    fp8_again.make(request(steps=PREPARED_STEPS), tmp_path / "prepared.mp4")
    assert lines(fp8_again, BUILT) == built
    assert clip == fp8.make(request(), tmp_path / "first.mp4").read_bytes()
