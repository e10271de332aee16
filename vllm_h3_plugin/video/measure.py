# SPDX-License-Identifier: Apache-2.0
"""Picture and sound measured while a clip is decoded, without holding it: stillness, darkness, loudness."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from av.audio.frame import AudioFrame
from av.video.frame import VideoFrame
from av.video.plane import VideoPlane
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

GRID = 32
"""Each frame is area-averaged to GRID x GRID luma cells before it is judged."""

STILL_LEVELS = 1.5
"""Of 255. A frame is still if no cell differs by more from the first frame of the still run. Encoding one picture
again and again moves a cell by less; anchoring on the run's first frame lets a slow drift add up to a movement."""

BLACK_LUMA = 24.0
"""Of 255. Limited-range black is 16; a frame whose brightest cell is at most this is black to the eye."""

SILENCE_DBFS = -60.0
"""RMS relative to full scale. 16-bit dither is near -96, room tone in a recording near -60, speech near -25."""


@dataclass(frozen=True)
class PictureFacts:
    """Attributes: frames seen, black frames, and the longest run of frames that show one unmoving picture."""

    frames: int
    black_frames: int
    longest_still: int


@dataclass(frozen=True)
class SoundFacts:
    """Attributes: samples per channel, and RMS and peak in dBFS over all channels (-inf for digital silence)."""

    samples: int
    rms_dbfs: float
    peak_dbfs: float


class PictureMeter:
    """Feed every frame in order to :meth:`add`; :meth:`facts` may be asked at any time."""

    def __init__(self) -> None:
        self._scaler = VideoReformatter()  # keeps its tables from frame to frame, VideoFrame.reformat does not
        self._frames = 0
        self._black = 0
        self._anchor: NDArray[np.float32] | None = None
        self._run = 0
        self._longest = 0

    def add(self, frame: VideoFrame) -> None:
        """Measure one frame (any size and pixel format)."""
        # The Y plane of a small YUV frame: converting to "gray" would stretch limited to full range, or not,
        # depending on the FFmpeg version.
        small = self._scaler.reformat(frame, width=GRID, height=GRID, format="yuv420p", interpolation="AREA").planes[0]
        luma = plane_rows(small).astype(np.float32)
        self._frames += 1
        self._black += bool(luma.max() <= BLACK_LUMA)
        if self._anchor is not None and float(np.abs(luma - self._anchor).max()) <= STILL_LEVELS:
            self._run += 1
        else:
            self._anchor, self._run = luma, 1
        self._longest = max(self._longest, self._run)

    def facts(self) -> PictureFacts:
        """What was measured so far."""
        return PictureFacts(self._frames, self._black, self._longest)


class SoundMeter:
    """Feed every audio frame to :meth:`add`; :meth:`facts` may be asked at any time."""

    def __init__(self) -> None:
        self._samples = 0
        self._values = 0
        self._square_sum = 0.0
        self._peak = 0.0

    def add(self, frame: AudioFrame) -> None:
        """Measure one audio frame (any sample format)."""
        values = as_float(frame)
        self._samples += frame.samples
        self._values += values.size
        self._square_sum += float(np.square(values, dtype=np.float64).sum())
        self._peak = max(self._peak, float(np.abs(values).max(initial=0.0)))

    def facts(self) -> SoundFacts:
        """What was measured so far."""
        rms = math.sqrt(self._square_sum / self._values) if self._values else 0.0
        return SoundFacts(self._samples, _dbfs(rms), _dbfs(self._peak))


def plane_rows(plane: VideoPlane) -> NDArray[np.uint8]:
    """An 8-bit plane as uint8 (height, width), without the padding at the end of each row; not a copy."""
    rows = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)  # type: ignore[arg-type]
    return rows[: plane.height, : plane.width]


def as_float(frame: AudioFrame) -> NDArray[np.float32]:
    """An audio frame as float32 (channels, samples) with full scale 1.0."""
    values = frame.to_ndarray()
    if frame.format.is_packed:
        values = values.reshape(frame.samples, -1).T
    if values.dtype == np.uint8:
        return (values.astype(np.float32) - 128.0) / 128.0
    if values.dtype.kind == "i":
        return values.astype(np.float32) / float(2 ** (8 * values.dtype.itemsize - 1))
    return values.astype(np.float32)


def _dbfs(amplitude: float) -> float:
    return 20.0 * math.log10(amplitude) if amplitude > 0.0 else -math.inf
