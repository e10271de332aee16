# SPDX-License-Identifier: Apache-2.0
"""The contact sheet: a PNG that shows the clip, and never replaces another file unasked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vllm_h3_plugin.errors import ClipError, UsageError
from vllm_h3_plugin.video.sheet import check_output, write_sheet

WAVE_INK = (0x66, 0xCC, 0xFF)


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB"))


def wave_heights(path: Path) -> np.ndarray:
    """Rows of waveform in each column of the strip at the bottom."""
    return (pixels(path)[-100:] == WAVE_INK).all(axis=-1).sum(axis=0)[8:-8]


def test_twelve_frames_and_the_waveform_are_drawn(good_clip: Path, tmp_path: Path) -> None:
    out = write_sheet(good_clip, tmp_path / "sheet.png")
    picture = pixels(out)
    assert picture.shape[1] == 4 * 320 + 5 * 8
    tiles = [picture[28 + r * 348 : 348 + r * 348, 8 + c * 328 : 328 + c * 328] for r in range(3) for c in range(4)]
    assert all(tile.std() > 20 for tile in tiles)
    assert len({tile.tobytes() for tile in tiles}) == 12
    assert (wave_heights(out)[60:-60] > 20).all()
    assert [path.name for path in tmp_path.iterdir()] == ["sheet.png"]


def test_first_and_last_frame_are_shown(make_clip, tmp_path: Path) -> None:
    picture = pixels(write_sheet(make_clip("drift.mp4", picture="drifting"), tmp_path / "s.png", frames=2))
    first, last = picture[28:348, 8:328], picture[28:348, 336:656]
    assert last.mean() - first.mean() == pytest.approx(55, abs=4)  # one level brighter a frame, 56 frames


def test_silence_draws_a_flat_line_and_no_sound_says_so(make_clip, tmp_path: Path) -> None:
    silent = write_sheet(make_clip("flat.mp4", sound=0.0), tmp_path / "silent.png", frames=4)
    assert wave_heights(silent).max() <= 1
    mute = write_sheet(make_clip("none.mp4", sound=None), tmp_path / "mute.png", frames=4)
    assert wave_heights(mute).max() == 0


def test_a_clip_shorter_than_the_sheet_shows_each_frame_once(make_clip, tmp_path: Path) -> None:
    picture = pixels(write_sheet(make_clip("five.mp4", frames=5), tmp_path / "s.png", frames=12))
    assert picture.shape[0] == 28 + 2 * 348 + 96 + 8


def test_an_existing_file_is_kept_unless_forced(good_clip: Path, tmp_path: Path) -> None:
    out = tmp_path / "sheet.png"
    out.write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"sheet\.png already exists.*--force"):
        write_sheet(good_clip, out)
    assert out.read_bytes() == b"mine"
    write_sheet(good_clip, out, frames=1, force=True)
    assert pixels(out).size


def test_a_sheet_that_fails_leaves_nothing(good_clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Image.Image, path: Path, **_: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OSError, match="No space"):
        write_sheet(good_clip, tmp_path / "sheet.png", frames=1)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_clip_is_drawn_as_far_as_it_goes(good: Path, damage, tmp_path: Path) -> None:
    picture = pixels(write_sheet(damage(good, "video", 30), tmp_path / "s.png"))
    assert 28 + 348 < picture.shape[0] < 28 + 3 * 348


def test_a_clip_without_one_good_frame_is_refused(good: Path, damage, tmp_path: Path) -> None:
    with pytest.raises(ClipError, match=r"clip\.mp4 has no frame to draw: breaks off after 0 frames"):
        write_sheet(damage(good, "video", 0), tmp_path / "s.png")


@pytest.mark.parametrize(
    ("out", "message"), [("no/where.png", "there is no folder .*no"), (".", "is a folder"), ("s.png", "at least one")]
)
def test_outputs_that_cannot_be_are_refused(good_clip: Path, tmp_path: Path, out: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        write_sheet(good_clip, tmp_path / out, frames=0)


def test_a_sheet_never_takes_the_clips_place(good: Path) -> None:
    with pytest.raises(UsageError, match="no name of a PNG"):
        check_output(good, force=True)
