# SPDX-License-Identifier: Apache-2.0
"""Films and sounds as references without ffprobe and ffmpeg on PATH: what the host's own code makes of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_omni.errors import OmniClientError
from vllm_omni.model_executor.models.minimax_h3 import reference_video

from tests.unit.serving.reference_kit import film, sound
from vllm_h3_plugin.host import reference_media


@pytest.fixture
def without_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A PATH on which neither program is; the host's functions and PATH are put back afterwards."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    for name in ("_probe_video", "_probe_audio"):
        monkeypatch.setattr(reference_video, name, getattr(reference_video, name))
    reference_media.install(tmp_path)


def test_a_film_is_told_as_the_host_wants_it(tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    film(path, seconds=2.5, size=(320, 256), rate=30)
    told = reference_media.probe_film(str(path))
    assert told.pop("duration") == pytest.approx(2.5, abs=0.01)
    assert {"mov", "mp4"} <= set(told.pop("format_names"))
    assert told == {
        "width": 320,
        "height": 256,
        "fps": 30.0,
        "frame_count": 75,
        "video_codec": "h264",
        "audio_codecs": ("aac",),
        "file_size": path.stat().st_size,
    }


def test_frames_of_a_file_that_does_not_say_are_counted(tmp_path: Path) -> None:
    film(tmp_path / "film.mkv", seconds=3, format_="matroska")
    assert reference_media.probe_film(str(tmp_path / "film.mkv"))["frame_count"] == 72


def test_a_sound_is_told_as_the_host_wants_it(tmp_path: Path) -> None:
    path = tmp_path / "tone.wav"
    sound(path, seconds=2.5)
    told = reference_media.probe_sound(str(path))
    assert told.pop("duration") == pytest.approx(2.5, abs=0.01)
    assert told == {"format_names": ("wav",), "codec": "pcm_s16le", "file_size": path.stat().st_size}


def test_what_is_no_film_and_no_sound_is_the_callers_fault(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_bytes(b"no film at all, but some words")
    sound(tmp_path / "tone.wav")
    film(tmp_path / "silent.mp4", sound=None)
    for ask, name, said in (
        (reference_media.probe_film, "text.mp4", "cannot be read"),
        (reference_media.probe_film, "tone.wav", "no video stream"),
        (reference_media.probe_sound, "text.mp4", "cannot be read"),
        (reference_media.probe_sound, "silent.mp4", "no audio stream"),
    ):
        with pytest.raises(OmniClientError, match=said):
            ask(str(tmp_path / name))


def test_the_host_prepares_references_without_programs_on_path(without_programs: None, tmp_path: Path) -> None:
    film(tmp_path / "a.mp4", seconds=3, size=(320, 256))
    sound(tmp_path / "tone.wav")
    sound(tmp_path / "short.wav", seconds=1)
    (prepared,) = reference_video.prepare_reference_videos(
        [str(tmp_path / "a.mp4")], target_frame_count=48, workdir=str(tmp_path / "work")
    )
    assert (prepared["width"], prepared["height"], prepared["input_has_audio"]) == (960, 768, True)
    assert reference_video.load_video_frames(prepared["prepared_path"]).shape == (48, 768, 960, 3)
    waveform, rate = reference_video.load_video_audio(str(tmp_path / "a.mp4"), duration_seconds=2.0)
    assert waveform.shape[-1] == pytest.approx(2 * rate, rel=0.02)
    reference_video.validate_reference_audio_files([str(tmp_path / "tone.wav")])
    with pytest.raises(OmniClientError, match=r"\[2, 15\] seconds"):
        reference_video.validate_reference_audio_files([str(tmp_path / "short.wav")])


@pytest.mark.parametrize("old", [True, False])
def test_ffmpeg_on_path_is_used_if_it_knows_the_host_s_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: bool
) -> None:
    mine = tmp_path / "ffmpeg"
    mine.write_text("#!/bin/sh\n" + ("" if old else "echo \"Unrecognized option 'vsync'.\" >&2; exit 8\n"))
    mine.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("_probe_video", "_probe_audio"):
        monkeypatch.setattr(reference_video, name, getattr(reference_video, name))
    reference_media.install(tmp_path)
    reference_media.install(tmp_path)
    before = os.environ["PATH"].split(os.pathsep)
    assert before[-1] == str(tmp_path) and len(before) == (1 if old else 2)


def test_the_script_stays_the_same_file_for_every_process(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, shutil, sys; os.environ['PATH'] = '/nowhere'\n"
        "from vllm_h3_plugin.host import reference_media; reference_media.install(pathlib.Path(sys.argv[1]))\n"
        "print(shutil.which('ffmpeg'))"
    )
    told = set()
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
        told.add(done.stdout.splitlines()[-1])
    (script,) = told
    assert [path.name for path in Path(script).parent.iterdir()] == ["ffmpeg"]
    version = subprocess.run([script, "-vsync", "0", "-version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("ffmpeg version") and "Unrecognized" not in version.stderr


def test_a_cache_that_cannot_be_written_costs_no_start(without_programs: None, tmp_path: Path) -> None:
    before = os.environ["PATH"]
    (tmp_path / "file").write_text("")
    os.environ["PATH"] = str(tmp_path / "empty")
    try:
        reference_media.install(tmp_path / "file")
        assert os.environ["PATH"] == str(tmp_path / "empty")
    finally:
        os.environ["PATH"] = before
