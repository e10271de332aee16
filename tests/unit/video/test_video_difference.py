# SPDX-License-Identifier: Apache-2.0
"""Two clips held against each other, with numpy as the oracle of the figures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from av.video.frame import VideoFrame
from PIL import Image
from typer.testing import CliRunner

from tests.unit.video.conftest import FRAMES, ClipMaker
from vllm_h3_plugin.cli.main import verb_app
from vllm_h3_plugin.errors import ClipError, ToolMissingError, UsageError
from vllm_h3_plugin.serving.clip_record import Record, RecordedRequest
from vllm_h3_plugin.video.decode import decoded_frames
from vllm_h3_plugin.video.difference import Difference, compare, log_spectral_distance
from vllm_h3_plugin.video.difference_sheet import write_difference_sheet
from vllm_h3_plugin.video.tools import find_ffmpeg


@pytest.fixture(scope="module")
def moving(make_clip: ClipMaker) -> Path:
    return make_clip("moving.mp4")


@pytest.fixture(scope="module")
def frozen(make_clip: ClipMaker) -> Path:
    return make_clip("frozen-quiet-short.mp4", picture="frozen", sound=0.1, frames=39)


@pytest.fixture(scope="module")
def apart(moving: Path, frozen: Path) -> Difference:
    return compare(moving, frozen, find_ffmpeg())


def planes(clip: Path, frames: int) -> list[np.ndarray]:
    """Every frame's bytes: luma and both chroma planes of yuv420p."""
    decoded = [frame.to_ndarray() for frame in decoded_frames(clip) if isinstance(frame, VideoFrame)]
    return [frame.astype(np.float64) for frame in decoded[:frames]]


def test_psnr_is_that_of_the_decoded_frames(moving: Path, frozen: Path, apart: Difference) -> None:
    errors = [((one - other) ** 2).mean() for one, other in zip(planes(moving, 39), planes(frozen, 39), strict=True)]
    psnr = apart.metrics["psnr"]
    want = [10 * math.log10(255**2 / error) for error in errors]
    assert psnr.frames == pytest.approx(want, abs=0.05)
    assert psnr.mean == pytest.approx(10 * math.log10(255**2 / np.mean(errors)), abs=0.05)
    assert psnr.worst is not None and psnr.worst[0] == int(np.argmax(errors))


def test_a_clip_is_equal_to_itself(moving: Path) -> None:
    same = compare(moving, moving, find_ffmpeg(), vmaf=False)
    assert same.equal_files and same.compared == FRAMES and same.notes == ()
    assert same.metrics["psnr"].mean == math.inf and same.metrics["ssim"].mean == 1
    assert same.sound_db == 0
    assert same.metrics["vmaf"].reason == "not asked for"
    told = json.loads(json.dumps(same.as_dict(), allow_nan=False))
    assert told["psnr"]["identical"] is True and told["psnr"]["mean"] is None and told["ssim"]["mean"] == 1


def test_what_one_clip_lacks_is_told_and_the_rest_compared(apart: Difference) -> None:
    assert apart.compared == 39 == len(apart.metrics["ssim"].frames) == len(apart.metrics["vmaf"].frames)
    assert apart.notes == (f"{FRAMES} and 39 frames: the first 39 are compared",)
    assert 0 < apart.metrics["ssim"].mean < 1 and 0 <= apart.metrics["vmaf"].mean < 90
    assert not apart.equal_files and apart.sound_db > 0


def test_sound_ten_times_as_weak_is_twenty_decibels_apart() -> None:
    noise = np.random.default_rng(0).standard_normal(32_000).astype(np.float32) * 0.3
    assert log_spectral_distance(noise, noise / 10) == pytest.approx(20, abs=0.01)
    assert log_spectral_distance(noise, noise) == 0


def test_what_lies_below_hearing_is_no_difference() -> None:
    silence = np.zeros(4096, np.float32)
    assert log_spectral_distance(silence, silence + np.float32(1e-6)) == 0


@pytest.mark.parametrize(
    ("other", "reason"),
    [({"sound": None}, "no sound in"), ({"sample_rate": 48_000}, "32000 and 48000 samples a second")],
)
def test_sound_that_cannot_be_compared_says_why(moving: Path, make_clip: ClipMaker, other: dict, reason: str) -> None:
    against = make_clip(f"sound-{reason[:2]}.mp4", **other)
    found = compare(moving, against, find_ffmpeg(), vmaf=False)
    assert found.sound_db is None and reason in found.sound_reason


def test_two_sizes_are_refused_with_both(moving: Path, make_clip: ClipMaker) -> None:
    wide = make_clip("wide.mp4", size=(96, 64))
    with pytest.raises(UsageError) as caught:
        compare(moving, wide, find_ffmpeg())
    assert "is 96x64" in caught.value.what and "is 64x64" in caught.value.what and "one size" in caught.value.fix


def test_a_clip_that_breaks_off_is_no_difference(moving: Path, make_clip: ClipMaker, tmp_path: Path) -> None:
    whole = make_clip("whole.mp4", movflags="faststart").read_bytes()
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(whole[:-200] + bytes(200))
    with pytest.raises(ClipError) as caught:
        compare(moving, broken, find_ffmpeg(), vmaf=False)
    assert "broken.mp4" in str(caught.value) and "vllm-h3 verify" in caught.value.fix


def test_an_ffmpeg_without_vmaf_leaves_it_out_and_says_so(moving: Path, tmp_path: Path) -> None:
    """A program that is ffmpeg but for its list of filters."""
    program = tmp_path / "ffmpeg"
    program.write_text(f'#!/bin/sh\ncase "$*" in *-filters*) exit 0;; esac\nexec "{find_ffmpeg()}" "$@"\n')
    program.chmod(0o755)
    found = compare(moving, moving, program)
    assert found.metrics["vmaf"].reason == "this ffmpeg is built without libvmaf" and not found.metrics["vmaf"].frames
    assert found.metrics["psnr"].frames


def test_a_program_that_cannot_be_run_is_named(moving: Path, tmp_path: Path) -> None:
    with pytest.raises(ToolMissingError, match="no-such-program cannot be run"):
        compare(moving, moving, tmp_path / "no-such-program")


def test_the_sheet_shows_frames_of_both_and_black_where_they_are_equal(
    moving: Path, frozen: Path, apart: Difference, tmp_path: Path
) -> None:
    out = write_difference_sheet(apart, tmp_path / "apart.png", columns=3)
    same = write_difference_sheet(compare(moving, moving, find_ffmpeg()), tmp_path / "same.png", columns=3)
    third_row = (8, 8 + 2 * (20 + 240 + 8) + 20, 8 + 240, 8 + 2 * (20 + 240 + 8) + 20 + 240)
    assert np.asarray(Image.open(same).convert("RGB").crop(third_row)).max() == 0
    last = tuple(edge + (2 * 248 if index % 2 == 0 else 0) for index, edge in enumerate(third_row))
    assert np.asarray(Image.open(out).convert("RGB").crop(last)).mean() > 50
    with pytest.raises(UsageError, match="already exists"):
        write_difference_sheet(apart, out)


# The verb.


def run(*words: object) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(verb_app("compare"), [str(word) for word in words])
    return result.exit_code, result.output, result.exception


def record(clip: Path, seed: int, recipe: str) -> None:
    asked = RecordedRequest(prompt="a kite", width=64, height=64, frames=56, steps=4, seed=seed)
    Record(
        name=clip.stem, stem=clip.stem, state="finished", url="http://127.0.0.1:8000", request=asked,
        server={"recipes": [recipe]}, idempotency_key="k", created=0.0,
    ).write(clip.with_suffix(".json"))  # fmt: skip


@pytest.mark.parametrize(("seeds", "words"), [((1, 1), "recipes: ['bf16'] and ['fp8']"), ((1, 2), "the seeds differ")])
def test_records_beside_both_clips_tell_what_was_asked_differently(
    make_clip: ClipMaker, seeds: tuple[int, int], words: str
) -> None:
    clips = [make_clip(f"{name}{seeds[1]}.mp4") for name in ("one", "other")]
    for clip, seed, recipe in zip(clips, seeds, ("bf16", "fp8"), strict=True):
        record(clip, seed, recipe)
    code, output, _ = run(*clips, "--no-vmaf")
    assert code == 0 and words in output and "equal" in output
    assert ("two different clips" in output) == (seeds[0] != seeds[1])


def test_without_records_the_seeds_are_unknown_and_json_says_so(moving: Path, frozen: Path) -> None:
    code, output, _ = run(moving, frozen, "--no-vmaf", "--json")
    told = json.loads(output.splitlines()[-1])
    assert code == 0 and told["requests"] == {"known": False, "seeds": "unknown", "differing": {}}
    assert told["compared_frames"] == 39 and len(told["psnr"]["frames"]) == 39


def test_a_sheet_that_is_there_is_refused_before_the_work(moving: Path, tmp_path: Path) -> None:
    out = tmp_path / "there.png"
    out.write_bytes(b"mine")
    _, _, raised = run(moving, tmp_path / "no-such.mp4", "--sheet", out)
    assert isinstance(raised, UsageError) and "already exists" in str(raised) and out.read_bytes() == b"mine"
