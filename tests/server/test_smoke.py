# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 smoke`` against the real server: two verified clips, each with a record that makes it again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server.conftest import Running
from vllm_h3_plugin.cli.main import main

STEPS = "2"


def run(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    with pytest.raises(SystemExit) as caught:
        main([*args, "--json"])
    out, err = capsys.readouterr()
    assert caught.value.code == 0, err
    return dict(json.loads(out))


def test_smoke_makes_both_clips_and_a_record_makes_the_same_bytes_again(
    fp8: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = ("--url", fp8.url, "--out", str(tmp_path))
    made = run(capsys, "smoke", *to, "--steps", STEPS)["clips"]
    assert [clip["name"] for clip in made] == ["smoke-t2va", "smoke-first-frame"]
    assert not list(tmp_path.glob("*.part")) and not list(tmp_path.glob(".*"))
    for clip in made:
        report = run(capsys, "verify", clip["path"])["clips"][0]
        checks = {check["name"]: check for check in report["checks"]}
        assert checks["frame size"]["wanted"] == "256x256"
        assert checks["checksum"]["wanted"] == f"equal to {clip['name']}.mp4.sha256"
        again = run(capsys, "smoke", *to, "--request", clip["record"])["clips"][0]
        assert (again["name"], again["sha256"]) == (f"{clip['name']}-2", clip["sha256"])
    record = json.loads(Path(made[0]["record"]).read_text())
    assert record["server"]["recipes"] == ["fp8"] and record["server"]["host"]["vllm"]
    assert record["timings"]["generation_s"] > 0


def test_smoke_finds_what_it_has_made(fp8: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("smoke", "--url", fp8.url, "--out", str(tmp_path), "--only", "t2va", "--size", "64x64")
    first = run(capsys, *command, "--steps", STEPS)["clips"][0]
    second = run(capsys, *command, "--steps", STEPS)["clips"][0]
    assert second == {**first, "existing": True, "frames": None}
