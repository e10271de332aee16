# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 serve`` and ``vllm-h3 demo`` as a person runs them: ready, clips, a key, Ctrl-C, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.ports import own_port
from tests.server.conftest import HANGS_S, READY_S
from vllm_h3_plugin.video.verdict import Expectation
from vllm_h3_plugin.video.verify import verify

COMMAND = [str(Path(sys.executable).parent / "vllm-h3")]


def _start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts background jobs with SIGINT ignored, and children inherit that; a person's Ctrl-C is not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _until(process: subprocess.Popen[str], words: str) -> str:
    """Read stderr up to the line with these words."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if words in line:
            return line
    raise AssertionError(f"{words!r} never came:\n{''.join(seen[-40:])}")


def _family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def _assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=HANGS_S)
    assert alive == []


@pytest.fixture(scope="module")
def guarded(fl2va: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``vllm-h3 serve`` behind an API key."""
    port = str(own_port())
    process = _start("serve", "reference", "-c", str(fl2va), "--port", port, "--", "--api-key", "open-sesame")
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_serve_proves_itself_behind_a_key_and_ends_cleanly(guarded: tuple[subprocess.Popen[str], str]) -> None:
    process, url = guarded
    line = _until(process, "vllm_h3_plugin.host.launch serve")
    assert "open-sesame" not in line
    ready = _until(process, "ready after")
    assert re.search(r"ready after [\d.]+ s: http://127\.0\.0\.1:\d+", ready) and "recipe fp8" in ready
    assert httpx.get(f"{url}/v1/h3/info").status_code == 401
    headers = {"Authorization": "Bearer open-sesame"}
    assert httpx.get(f"{url}/v1/h3/info", headers=headers).json()["workers"][0]["recipe"] == "fp8"
    family = _family(process.pid)
    assert family
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=HANGS_S)
    assert process.returncode != 0, "a server that was stopped did not end by itself"
    _assert_gone(family)


def test_demo_makes_two_verified_clips(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    started = time.monotonic()
    done = subprocess.run([*COMMAND, "demo", "--out", str(tmp_path), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert [clip["name"] for clip in answer["clips"]] == ["t2va", "fl2va"]
    for clip in answer["clips"]:
        verify(Path(clip["path"]), Expectation(width=256, height=256, frames=96)).raise_if_failed()
        assert Path(clip["sheet"]).read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.rglob("*.part"))
    record_property("demo", {"demo_s": answer["demo_s"], "ready_s": answer["ready_s"]})
    assert time.monotonic() - started < 2 * READY_S


def test_ctrl_c_during_the_demo_leaves_no_process_and_no_half_written_clip(tmp_path: Path) -> None:
    process = _start("demo", "--out", str(tmp_path))
    _until(process, "vllm_h3_plugin.host.launch serve")
    deadline = time.monotonic() + HANGS_S
    while not (family := [child for child in _family(process.pid) if "launch" in " ".join(child.cmdline())]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANGS_S)
    assert process.returncode not in (0, None)
    _assert_gone(family)
    assert [path for path in tmp_path.rglob("*") if path.suffix in (".mp4", ".part")] == []
