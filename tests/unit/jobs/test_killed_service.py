# SPDX-License-Identifier: Apache-2.0
"""kill -9 at any moment: what a caller was told stays true, and no job hangs."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path

from tests.unit.jobs.job_service import CLIP

KILLS = 4


def test_a_kill_at_any_moment_loses_no_finished_clip_and_leaves_no_job_open(tmp_path: Path) -> None:
    rng = random.Random(7)
    told: dict[str, dict[str, str]] = {}
    for life in range(KILLS + 1):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.jobs.killed_service", str(tmp_path), str(life)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert first["open"] == 0
        for job_id, job in told.items():
            assert first["found"][job_id] == [job["status"], job["status"] == "completed"]
        assert all(status == "completed" or not there for status, there in first["found"].values())
        time.sleep(rng.uniform(0.05, 0.4))
        process.kill()
        lines = process.stdout.read().splitlines()
        process.wait()
        process.stdout.close()
        told.update({job["id"]: job for job in map(json.loads, filter(_whole, lines))})
    finished = [job for job in told.values() if job["status"] == "completed"]
    assert len(finished) > KILLS
    assert {job["sha256"] for job in finished} == {hashlib.sha256(CLIP).hexdigest()}
    for job in finished:
        assert (tmp_path / "h3" / "clips" / f"{job['id']}.mp4").read_bytes() == CLIP


def _whole(line: str) -> bool:
    return line.startswith("{") and line.endswith("}")
