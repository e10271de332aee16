# SPDX-License-Identifier: Apache-2.0
"""What a decoded clip is held to: two decoders, what was asked, sound and picture, checksum."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from vllm_h3_plugin.errors import ClipError, ToolMissingError, UsageError
from vllm_h3_plugin.video import decode
from vllm_h3_plugin.video.checks import PADDING_SAMPLES
from vllm_h3_plugin.video.checksum import write_checksum
from vllm_h3_plugin.video.probe import probe
from vllm_h3_plugin.video.tools import find_ffmpeg
from vllm_h3_plugin.video.verdict import Check, Expectation, Verdict
from vllm_h3_plugin.video.verify import verify


def found(verdict: Verdict, name: str) -> Check:
    return next(check for check in verdict.checks if check.name == name)


def only_failure(verdict: Verdict) -> Check:
    assert [check.status for check in verdict.checks].count("fail") == 1, verdict.failures
    return verdict.failures[0]


# --- a good clip


def test_a_good_clip_passes_every_check_strictly(good_clip: Path) -> None:
    verdict = verify(good_clip, Expectation(width=64, height=64, frames=50, seconds=2.1), strict=True)
    assert {check.status for check in verdict.checks} == {"ok"}
    assert len(verdict.checks) == 15
    assert verdict.sha256 == hashlib.sha256(good_clip.read_bytes()).hexdigest()
    verdict.raise_if_failed()


def test_facts_are_what_the_clip_was_made_with(good_clip: Path) -> None:
    facts = probe(good_clip)
    assert (facts.container, facts.video_codec, facts.width, facts.height) == ("mp4", "h264", 64, 64)
    assert (facts.fps, facts.frames, round(facts.duration, 3)) == (Fraction(24), 56, 2.333)
    assert (facts.audio_codec, facts.sample_rate, facts.channels) == ("aac", 32_000, 2)
    assert abs(facts.audio_duration - 2.333) < 0.07
    assert facts.size == good_clip.stat().st_size


def test_a_fragmented_clip_passes(make_clip) -> None:
    # What the host streams: one fragment a frame, no B-frames, no sound; its index lists no frame.
    path = make_clip("fragments.mp4", movflags="+frag_every_frame+empty_moov+default_base_moof", sound=None)
    assert probe(path).frames == 0
    assert verify(path, Expectation(frames=56, audio_required=False), strict=True).error() is None


def test_a_verdict_is_one_json_object(good_clip: Path, make_clip) -> None:
    for path in (good_clip, make_clip("silent-json.mp4", sound=0.0), good_clip.with_name("absent.mp4")):
        text = json.dumps(verify(path).as_dict(), allow_nan=False)
        assert json.loads(text)["path"] == str(path)


def test_progress_counts_each_decoders_frames(good_clip: Path) -> None:
    seen: dict[str, list[int]] = {"PyAV": [], "ffmpeg": []}
    verify(good_clip, progress=lambda decoder, done, total: seen[decoder].append(done * 100 + total))
    assert seen["PyAV"] == seen["ffmpeg"] == [n * 100 + 56 for n in range(1, 57)]


def test_no_torch_is_imported(good_clip: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from vllm_h3_plugin.video.verify import verify;"
        "import vllm_h3_plugin.video.sheet, vllm_h3_plugin.cli.verify;"
        "assert verify(Path(sys.argv[1])).ok; print(sorted({'torch', 'vllm', 'vllm_omni'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(good_clip)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- two decoders


def test_two_decoders_agree_on_every_picture(good_clip: Path) -> None:
    facts = probe(good_clip)
    ours, theirs = decode.decode_with_pyav(facts), decode.decode_with_ffmpeg(facts, find_ffmpeg())
    assert ours.errors == theirs.errors == ()
    assert ours.frames == theirs.frames == 56
    assert ours.sizes == theirs.sizes == ((64, 64),)
    assert ours.digests == theirs.digests and len(set(ours.digests)) == 56
    assert ours.samples > 0 and abs(ours.samples - theirs.samples) <= PADDING_SAMPLES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: {"frames": r.frames - 1, "digests": r.digests[:-1]}, "56 and 55 frames"),
        (lambda r: {"sizes": ((64, 32),)}, "sizes 64x64 and 64x32"),
        (lambda r: {"samples": r.samples - 3 * PADDING_SAMPLES}, r"\d+ and \d+ samples"),
        (lambda r: {"digests": (*r.digests[:7], b"other", *r.digests[8:])}, "picture 7 differs"),
    ],
)
def test_decoders_that_disagree_fail_the_clip(
    good_clip: Path, monkeypatch: pytest.MonkeyPatch, change: Callable, message: str
) -> None:
    honest = decode.decode_with_ffmpeg

    def lying(*arguments) -> decode.DecodeReport:
        report = honest(*arguments)
        return replace(report, **change(report))

    monkeypatch.setattr(decode, "decode_with_ffmpeg", lying)
    verdict = verify(good_clip)
    assert only_failure(verdict).name == "decoders agree"
    with pytest.raises(ClipError, match=rf"decoders agree: {message}.*read different clips.*H3_FFMPEG"):
        verdict.raise_if_failed()


def test_samples_may_differ_by_the_encoders_padding(good_clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = decode.decode_with_ffmpeg

    def padded(*arguments) -> decode.DecodeReport:
        return replace(honest(*arguments), samples=decode.decode_with_pyav(arguments[0]).samples - PADDING_SAMPLES)

    monkeypatch.setattr(decode, "decode_with_ffmpeg", padded)
    assert verify(good_clip).ok


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_a_damaged_byte_in_the_middle_breaks_both_decoders(good: Path, damage, kind: str) -> None:
    verdict = verify(damage(good, kind, 20))
    assert [check.name for check in verdict.failures] == ["decode by PyAV", "decode by ffmpeg"]
    with pytest.raises(ClipError, match=r"clip\.mp4: decode by PyAV: \d+ frames.*was damaged.*Download it again"):
        verdict.raise_if_failed()


def test_damage_inside_a_picture_is_concealed_by_neither_decoder(good: Path, damage) -> None:
    # Most such damage makes a player show blocks and go on; some of it decodes to another picture without a fault.
    whole, told = good.read_bytes(), []
    for skip in range(200, 1400, 150):
        good.write_bytes(whole)
        facts = probe(damage(good, "video", 0, skip=skip, length=4))
        ours, theirs = decode.decode_with_pyav(facts), decode.decode_with_ffmpeg(facts, find_ffmpeg())
        assert bool(ours.errors) == bool(theirs.errors), (skip, ours.errors, theirs.errors)
        told.append(bool(ours.errors))
    assert any(told)


def test_any_damaged_byte_is_told_by_the_checksum(good: Path) -> None:
    write_checksum(good, verify(good).sha256)
    data = bytearray(good.read_bytes())
    data[data.index(b"free")] ^= 1  # a byte that no decoder looks at
    good.write_bytes(data)
    check = only_failure(verify(good))
    assert check.name == "checksum" and "clip.mp4.sha256" in check.wanted and "Download the clip again" in check.fix


@pytest.mark.usefixtures("no_ffmpeg")
def test_without_ffmpeg_no_clip_is_called_good(good_clip: Path) -> None:
    with pytest.raises(ToolMissingError, match=r"ffmpeg.*imageio-ffmpeg"):
        verify(good_clip)


def test_an_ffmpeg_that_does_not_start_is_named(good_clip: Path, h3_environment, tmp_path: Path) -> None:
    broken = tmp_path / "ffmpeg"
    broken.write_bytes(b"\x7fELF no program")
    broken.chmod(0o755)
    h3_environment.setenv("H3_FFMPEG", str(broken))
    with pytest.raises(ToolMissingError, match=rf"{broken} cannot be run.*H3_FFMPEG"):
        verify(good_clip)


def test_an_ffmpeg_that_fails_in_silence_fails_the_clip(good_clip: Path, h3_environment, tmp_path: Path) -> None:
    mute = tmp_path / "ffmpeg"
    mute.write_text("#!/bin/sh\nexit 3\n")
    mute.chmod(0o755)
    h3_environment.setenv("H3_FFMPEG", str(mute))
    check = only_failure(verify(good_clip))
    assert check.name == "decode by ffmpeg" and "status 3" in check.seen


def test_an_interrupted_decode_leaves_no_ffmpeg_behind(good_clip: Path, h3_environment, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    endless = tmp_path / "ffmpeg"
    endless.write_text(f"#!/bin/sh\necho $$ > '{pid}'\necho '0, 0, 0, 1, 6144, 00'\nexec sleep 60\n")
    endless.chmod(0o755)

    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode.decode_with_ffmpeg(probe(good_clip), endless, interrupt)
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


# --- what was asked


@pytest.mark.parametrize(
    ("asked", "check", "message"),
    [
        ({"frames": 57}, "frame count", r"frame count: 56, wanted 73 \(57 frames asked\).*17n\+5"),
        ({"frames": 39}, "frame count", r"56, wanted 39 \(39 frames asked\)"),
        ({"seconds": 5.0}, "frame count", r"56, wanted 124 \(5 s asked\).*which request"),
        ({"width": 96, "height": 64}, "frame size", r"frame size: 64x64, wanted 96x64.*size field"),
        ({"width": 130, "height": 64}, "frame size", r"wanted 128x64 \(130x64 asked, floored to multiples of 32\)"),
    ],
)
def test_a_clip_of_another_length_or_size_fails(good_clip: Path, asked: dict, check: str, message: str) -> None:
    verdict = verify(good_clip, Expectation(**asked))
    assert only_failure(verdict).name == check
    with pytest.raises(ClipError, match=message):
        verdict.raise_if_failed()


def test_another_frame_rate_than_24_fails(make_clip) -> None:
    verdict = verify(make_clip("25.mp4", rate=25))
    with pytest.raises(ClipError, match=r"frame rate: 25, wanted 24, constant.*24 frames a second"):
        verdict.raise_if_failed()
    assert verify(make_clip("25.mp4", rate=25), Expectation(fps=25)).ok


def test_a_frame_that_comes_late_fails(make_clip) -> None:
    check = found(verify(make_clip("late.mp4", late_frame=True)), "frame rate")
    assert check.status == "fail" and "not constant (steps of 41.7 to 83.3 ms)" in check.seen


def test_a_cut_clip_warns_unless_its_length_was_asked(make_clip) -> None:
    path = make_clip("cut.mp4", frames=50)
    assert [(c.name, c.seen, c.wanted) for c in verify(path).warnings] == [("frame count", "50", "17n+5, such as 56")]
    assert only_failure(verify(path, Expectation(frames=50))).wanted == "56 (50 frames asked)"


def test_frames_that_the_index_lists_and_nobody_decodes_fail(good_clip: Path, monkeypatch) -> None:
    monkeypatch.setattr("vllm_h3_plugin.video.verify.probe", lambda path: replace(probe(path), frames=60))
    check = only_failure(verify(good_clip, Expectation(frames=56)))
    assert (check.name, check.wanted) == ("frame count", "60, as the index lists")


def test_another_video_codec_warns(make_clip) -> None:
    assert [check.name for check in verify(make_clip("part2.mp4", video_codec="mpeg4")).warnings] == ["video stream"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"width": 64}, "both, for example 768x448"),
        ({"width": 64, "height": 8}, "at least 32 pixels"),
        ({"frames": 0}, "at least one frame"),
        ({"seconds": -1.0}, "shorter than one frame"),
        ({"fps": 0}, "fps=0"),
        ({"frames": 96, "seconds": 5.0}, "contradict each other: they make 107 and 124 frames"),
    ],
)
def test_what_cannot_be_asked_is_refused(asked: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Expectation(**asked)


# --- sound


def test_a_clip_without_sound_fails_unless_it_is_allowed(make_clip) -> None:
    path = make_clip("mute.mp4", sound=None)
    with pytest.raises(ClipError, match=r"audio stream: none, wanted aac 32000 Hz.*--allow-silent"):
        verify(path).raise_if_failed()
    assert verify(path, Expectation(audio_required=False), strict=True).error() is None


def test_silence_warns_fails_strictly_and_may_be_allowed(make_clip) -> None:
    path = make_clip("silent.mp4", sound=0.0)
    verdict = verify(path)
    assert verdict.ok and [check.name for check in verdict.warnings] == ["silence"]
    with pytest.raises(ClipError, match=r"silence: RMS -inf dBFS.*--allow-silent"):
        verify(path, strict=True).raise_if_failed()
    assert verify(path, Expectation(audio_required=False), strict=True).ok


def test_the_level_is_measured(make_clip) -> None:
    sound = verify(make_clip("quiet.mp4", sound=0.01)).sound  # a sine of amplitude 0.01 has an RMS of -43 dBFS
    assert sound is not None and sound.rms_dbfs == pytest.approx(-43.0, abs=0.5)
    assert sound.peak_dbfs == pytest.approx(-40.0, abs=1.5)


@pytest.mark.parametrize(
    ("other", "seen"),
    [({"sample_rate": 48_000}, "aac 48000 Hz, 2 channels"), ({"layout": "mono"}, "aac 32000 Hz, 1 channels")],
)
def test_another_sound_format_fails(make_clip, other: dict, seen: str) -> None:
    check = only_failure(verify(make_clip("other-sound.mp4", **other)))
    assert (check.name, check.seen) == ("audio stream", seen)


def test_sound_shorter_than_the_picture_fails(make_clip) -> None:
    check = only_failure(verify(make_clip("short-sound.mp4", sound_seconds=1.5)))
    assert check.name == "audio length" and check.seen.startswith("1.5")


# --- picture


@pytest.mark.parametrize(
    ("picture", "names"),
    [("frozen", ["frozen picture"]), ("black", ["black picture", "frozen picture"]), ("drifting", [])],
)
def test_dead_pictures_warn_and_fail_strictly(make_clip, picture: str, names: list[str]) -> None:
    path = make_clip(f"{picture}.mp4", picture=picture)
    verdict = verify(path)
    assert verdict.ok
    assert [check.name for check in verdict.warnings] == names
    assert [check.name for check in verify(path, strict=True).failures] == names
    if names:
        with pytest.raises(ClipError, match=rf"{names[0]}: .*5\d of 56 frames.*--sheet.*vllm-h3 doctor"):
            verify(path, strict=True).raise_if_failed()


# --- checksum


def test_a_checksum_is_written_as_sha256sum_writes_it(good: Path) -> None:
    verdict = verify(good)
    beside = write_checksum(good, verdict.sha256)
    assert beside.read_text() == f"{verdict.sha256}  clip.mp4\n"
    assert found(verify(good), "checksum").wanted == "equal to clip.mp4.sha256"
    assert write_checksum(good, verdict.sha256) == beside
    assert sorted(path.name for path in good.parent.iterdir()) == ["clip.mp4", "clip.mp4.sha256"]


def test_a_different_checksum_is_never_overwritten(good: Path) -> None:
    beside = good.with_name("clip.mp4.sha256")
    beside.write_text("0" * 64 + "  clip.mp4\n")
    with pytest.raises(ClipError, match=r"clip\.mp4\.sha256 exists and is not the SHA-256.*never overwritten"):
        write_checksum(good, verify(good).sha256)
    assert beside.read_text().startswith("0000")


@pytest.mark.parametrize("text", ["", "not a checksum", "abc  clip.mp4", "\0\xff", "{0}  a.mp4\n{0}  b.mp4\n"])
def test_a_checksum_file_that_says_nothing_fails(good: Path, text: str) -> None:
    good.with_name("clip.mp4.sha256").write_text(text.format("0" * 64), encoding="latin-1")
    check = only_failure(verify(good))
    assert check.name == "checksum" and "holds no SHA-256 of clip.mp4" in check.seen


@pytest.mark.parametrize(
    "form", ["{good}", "{GOOD} *clip.mp4", "{good}  before-renaming.mp4", "{bad}  a.mp4\n{good}  x/clip.mp4"]
)
def test_forms_of_a_checksum_file_that_count(good: Path, form: str) -> None:
    digest = hashlib.sha256(good.read_bytes()).hexdigest()
    text = form.format(good=digest, GOOD=digest.upper(), bad="0" * 64)
    good.with_name("clip.mp4.sha256").write_text(text)
    assert found(verify(good), "checksum").wanted == "equal to clip.mp4.sha256"
