# SPDX-License-Identifier: Apache-2.0
"""Clips that the tests make for themselves with PyAV: 64x64, 56 frames, a few kilobytes each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import pytest

FPS = 24
RATE = 32_000
FRAMES = 56  # 17 * 3 + 5

PICTURES: dict[str, Callable[[int, np.ndarray, np.ndarray], np.ndarray]] = {
    "moving": lambda n, x, y: np.stack([x * 3 + n * 5, y * 3 + n * 2, x + y + n * 7], -1) % 256,
    "drifting": lambda n, x, y: np.full((*x.shape, 3), 60 + n),
    "frozen": lambda n, x, y: np.stack([x * 3, y * 3, x + y], -1),
    "black": lambda n, x, y: np.zeros((*x.shape, 3)),
}


@dataclass(frozen=True)
class ClipMaker:
    """Call it to write one clip; every argument is one way to be different from a good one."""

    folder: Path

    def __call__(
        self,
        name: str,
        *,
        frames: int = FRAMES,
        size: tuple[int, int] = (64, 64),
        rate: int = FPS,
        picture: str | None = "moving",
        sound: float | None = 0.3,
        sound_seconds: float | None = None,
        sample_rate: int = RATE,
        layout: str = "stereo",
        video_codec: str = "h264",
        movflags: str = "",
        late_frame: bool = False,
    ) -> Path:
        path = self.folder / name
        with av.open(path, "w", format="mp4", options={"movflags": movflags} if movflags else {}) as container:
            video = container.add_stream(video_codec, rate=rate) if picture else None
            audio = container.add_stream("aac", rate=sample_rate) if sound is not None else None
            if audio is not None:
                audio.layout = layout
            if video is not None:
                video.width, video.height = size
                video.pix_fmt = "rgb24" if video_codec == "png" else "yuv420p"
                # Without B-frames the host's fragmented files have no reordering either. At 64 pixels x264's mbtree
                # reads memory that nobody has written, and equal clips come out unequal.
                steady = {"crf": "18", "x264-params": "mbtree=0"} if "264" in video_codec else {}
                video.options = {**steady, **({"bf": "0"} if movflags else {})}
                x, y = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
                for n in range(frames):
                    frame = av.VideoFrame.from_ndarray(PICTURES[picture](n, x, y).astype(np.uint8), format="rgb24")
                    if late_frame:
                        frame.pts = n + (n > frames // 2)
                    container.mux(video.encode(frame))
                container.mux(video.encode(None))
            if audio is not None:
                seconds = frames / rate if sound_seconds is None else sound_seconds
                t = np.arange(round(seconds * sample_rate)) / sample_rate
                wave = [sound * np.sin(2 * np.pi * pitch * t) for pitch in (440, 550)[: 1 + (layout == "stereo")]]
                chunk = av.AudioFrame.from_ndarray(np.array(wave, np.float32), format="fltp", layout=layout)
                chunk.sample_rate = sample_rate
                container.mux(audio.encode(chunk))
                container.mux(audio.encode(None))
        return path


@pytest.fixture(scope="session")
def make_clip(tmp_path_factory: pytest.TempPathFactory) -> ClipMaker:
    return ClipMaker(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="session")
def good_clip(make_clip: ClipMaker) -> Path:
    """Read-only by agreement: take ``good`` for a copy of your own."""
    return make_clip("good.mp4")


@pytest.fixture
def good(good_clip: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(good_clip, tmp_path / "clip.mp4"))


@pytest.fixture
def h3_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment without an ``H3_FFMPEG`` of the developer's."""
    monkeypatch.delenv("H3_FFMPEG", raising=False)
    return monkeypatch


@pytest.fixture
def no_ffmpeg(h3_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing on PATH, and imageio-ffmpeg as if it were not installed."""
    h3_environment.setenv("PATH", str(tmp_path))
    h3_environment.setitem(__import__("sys").modules, "imageio_ffmpeg", None)


def packet_offset(path: Path, kind: str, number: int) -> int:
    """File offset of the ``number``-th packet of the first ``kind`` ("video", "audio") stream."""
    with av.open(path) as container:
        packets = [p.pos for p in container.demux(**{kind: 0}) if p.size]
    return packets[number]


@pytest.fixture
def damage() -> Callable[..., Path]:
    """Flip every bit of ``length`` bytes that lie ``skip`` bytes into a packet."""

    def flip(path: Path, kind: str, number: int, *, skip: int = 0, length: int = 1) -> Path:
        data = bytearray(path.read_bytes())
        start = packet_offset(path, kind, number) + skip
        data[start : start + length] = bytes(byte ^ 0xFF for byte in data[start : start + length])
        path.write_bytes(data)
        return path

    return flip
