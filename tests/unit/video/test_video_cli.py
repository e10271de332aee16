# SPDX-License-Identifier: Apache-2.0
"""`vllm-h3 verify`: exit codes, the table, the one JSON line, and the files it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_h3_plugin.cli.main import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["verify", *map(str, arguments)])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def test_a_good_clip_exits_0_and_shows_each_check(run, good: Path) -> None:
    code, out, err = run(good, "--frames", 50, "--size", "64x64", "--fps", "24/1", "--strict")
    assert code == 0 and err == ""
    for word in ("decoders agree", "56 (50 frames asked)", "silence", "frozen picture", "checksum"):
        assert word in out
    assert "fail" not in out and "warn" not in out


def test_a_bad_clip_exits_8_and_says_what_why_fix(run, tmp_path: Path) -> None:
    page = tmp_path / "[red]page.mp4"
    page.write_text("<html><title>502 Bad Gateway</title></html>")
    code, out, err = run(page)
    assert code == 8
    assert "[red]page.mp4" in out and "fail" in out
    assert "error: " in err and "502 Bad Gateway" in err and "  fix: Download the clip again" in err


def test_one_bad_clip_among_good_ones_exits_8(run, good: Path, tmp_path: Path) -> None:
    code, out, err = run(good, tmp_path / "absent.mp4", good)
    assert code == 8
    assert out.count("decoders agree") == 2 and "absent.mp4 does not exist" in err


def test_json_is_one_line_with_every_clip(run, good: Path, tmp_path: Path) -> None:
    code, out, _ = run(good, tmp_path / "absent.mp4", "--json")
    assert code == 8 and out.count("\n") == 1
    answer = json.loads(out)
    assert answer["ok"] is False
    assert [clip["ok"] for clip in answer["clips"]] == [True, False]
    assert answer["clips"][0]["facts"]["frames"] == 56
    assert answer["clips"][1]["error"]["fault"] == "missing"


def test_warnings_are_printed_and_pass(run, make_clip) -> None:
    path = make_clip("cli-silent.mp4", sound=0.0)
    code, out, _ = run(path)
    assert code == 0 and "warning: silence: the sound stream holds silence" in out
    assert run(path, "--strict")[0] == 8
    assert run(path, "--strict", "--allow-silent")[0] == 0


def test_sheet_and_checksum_are_written_and_named(run, good: Path) -> None:
    code, out, _ = run(good, "--sheet", good.with_name("s.png"), "--write-checksum")
    assert code == 0 and "s.png" in out and "clip.mp4.sha256" in out
    assert good.with_name("s.png").stat().st_size > 1000
    assert good.with_name("clip.mp4.sha256").exists()


def test_a_failed_clip_gets_its_sheet_but_no_checksum(run, good: Path) -> None:
    code, out, _ = run(good, "--frames", 96, "--sheet", good.parent, "--write-checksum", "--json")
    (clip,) = json.loads(out)["clips"]
    assert code == 8 and clip["sheet"] == str(good.with_name("clip.png"))
    assert "checksum" not in clip and not good.with_name("clip.mp4.sha256").exists()


def test_an_existing_sheet_is_refused_before_the_work(run, good: Path) -> None:
    sheet = good.with_name("s.png")
    sheet.write_bytes(b"mine")
    code, out, err = run(good, "--sheet", sheet, "--json")
    assert code == 2 and "already exists" in err and "--force" in err
    assert json.loads(out)["ok"] is False
    assert sheet.read_bytes() == b"mine"
    assert run(good, "--sheet", sheet, "--force")[0] == 0


def test_one_sheet_for_many_clips_is_refused(run, good: Path, good_clip: Path) -> None:
    code, _, err = run(good, good_clip, "--sheet", good.with_name("s.png"))
    assert code == 2 and "one PNG cannot show 2 clips" in err and "folder" in err
    (good.parent / "x").mkdir()
    twin = good.parent / "x" / "clip.mp4"
    code, _, err = run(good, twin, "--sheet", good.parent)
    assert code == 2 and "two clips have the same name" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "64"], "--size 64"),
        (["--size", "64xbig"], "such as 768x448"),
        (["--fps", "fast"], "24000/1001"),
        (["--fps", "24/0"], "--fps 24/0"),
        (["--frames", "0"], "at least one frame"),
        (["--frames", "96", "--seconds", "5"], "contradict"),
    ],
)
def test_wrong_options_exit_2_and_say_so(run, good: Path, arguments: list[str], message: str) -> None:
    code, _, err = run(good, *arguments)
    assert code == 2 and message in err


@pytest.mark.usefixtures("no_ffmpeg")
def test_no_ffmpeg_exits_9_with_the_way_out(run, good: Path) -> None:
    code, out, err = run(good, "--json")
    assert code == 9 and json.loads(out)["error"]["type"] == "ToolMissingError"
    assert "apt-get install ffmpeg" in err


def test_help_teaches(run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for word in ("Examples:", "--sheet clip.png", "Exit codes:", "17n+5", "32 kHz"):
        assert word in out
