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
    return dict(json.loads(out.splitlines()[-1]))


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


def test_bench_clip_measures_a_matrix_and_makes_nothing_twice(
    fp8: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "growth.png"
    to = ("bench", "clip", "--url", fp8.url, "--out", str(tmp_path / "cells"), "--frames", "107")
    first = run(capsys, *to, "--sizes", "64x64", "--steps", "3", "--repeat", "2")
    clips = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").glob("*.mp4")}
    assert len(clips) == 2 and len(first["cells"]) == 2
    more = run(capsys, *to, "--sizes", "64x64,128x96", "--steps", "3", "--repeat", "2", "--plot", str(plot))
    assert {path: path.stat().st_mtime_ns for path in clips} == clips
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [cell for cell in more["cells"] if cell["width"] == 64] == first["cells"]
    small, large = more["rows"]
    assert (small["growth"], small["flops_growth"]) == (1.0, 1.0)
    assert small["seconds"]["step"] > 0 and small["seconds"]["denoise"] > 0 and small["seconds"]["decode"] > 0
    tokens = {cell["width"]: cell["ledger"]["tokens"] for cell in more["cells"]}
    flops = more["cells"][0]["step_flops"]
    needed = {width: flops["per_token"] * rows + flops["per_pair"] * rows * rows for width, rows in tokens.items()}
    assert tokens[128] > tokens[64] and large["flops_growth"] == pytest.approx(needed[128] / needed[64])


def test_bench_clip_tells_which_clip_failed_and_goes_on(
    fp8: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "cells")
    with pytest.raises(SystemExit) as caught:
        main(["bench", "clip", "--url", fp8.url, "--out", out, "--sizes", "64x64", "--steps", "2,900", "--json"])
    shown = capsys.readouterr().out
    told = json.loads(shown.splitlines()[-1])
    assert caught.value.code == 7 and told["ok"] is False
    made = {cell["steps"]: cell["failed"] for cell in told["cells"]}
    assert made[2] is None and "num_inference_steps" in made[900]
