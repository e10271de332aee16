# SPDX-License-Identifier: Apache-2.0
"""What a clip's container says about it, before any frame is decoded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from av.container import InputContainer
from av.stream import Stream
from av.video.stream import VideoStream

from vllm_h3_plugin.video.sniff import check_file, fault, read_layout

# Codecs of cover pictures, which containers list as video streams of one frame.
_STILL_CODECS = frozenset({"mjpeg", "png", "bmp", "gif"})

_UNKNOWN = "unknown codec"


@dataclass(frozen=True)
class ClipFacts:
    """What the container and its headers claim; nothing here has been decoded.

    Attributes:
        container: the demuxer's name, ``mp4``.
        video_index: number of the video stream in the file, from 0.
        boxes: distinct types of the MP4 file's top-level boxes, in file order.
        trailing_bytes: bytes after the last whole box; 0 in a healthy file.
        width, height: pixels.
        fps: frames a second, as the demuxer guesses from index and stream (the average is wrong in fragmented MP4).
        frames: number of video samples in the container's index; 0 if it has none (fragmented MP4).
        duration: seconds of the video stream.
        audio_codec: None if there is no sound stream, then the sound's numbers are 0; or `unknown codec`.
        sample_rate: samples a second and channel.
        audio_duration: seconds of the sound stream.
        size: bytes of the file.
        sha256: hexadecimal digest of the file.
    """

    path: Path
    container: str
    boxes: tuple[str, ...]
    trailing_bytes: int
    video_index: int
    video_codec: str
    pixel_format: str
    width: int
    height: int
    fps: Fraction
    frames: int
    duration: float
    audio_codec: str | None
    sample_rate: int
    channels: int
    audio_duration: float
    size: int
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable form; ``fps`` is a string such as ``24`` or ``24000/1001``."""
        return {**vars(self), "path": str(self.path), "boxes": list(self.boxes), "fps": str(self.fps)}


def probe(path: Path) -> ClipFacts:
    """Read a clip's facts from its container.

    Raises:
        ClipError: the file is missing, empty, a folder, not MP4 (and says what it is instead), truncated, or holds no
            video stream. ``details["fault"]`` names which.
    """
    path = Path(path)
    check_file(path)
    layout = read_layout(path)
    with open_clip(path) as container:
        video = video_stream(container)
        # Streams without their own duration (fragmented MP4) get the container's.
        whole = (container.duration or 0) / av.time_base
        audio = container.streams.audio[0] if container.streams.audio else None
        sound = audio.codec_context if audio else None
        return ClipFacts(
            path=path,
            container="mp4",
            boxes=layout.types,
            trailing_bytes=layout.trailing,
            video_index=video.index,
            video_codec=video.codec_context.name,
            pixel_format=video.codec_context.pix_fmt or "unknown",
            width=video.codec_context.width,
            height=video.codec_context.height,
            fps=Fraction(video.guessed_rate or video.average_rate or 0),
            frames=video.frames,
            duration=_seconds(video.duration, video.time_base, whole),
            audio_codec=_codec(audio) if audio else None,
            sample_rate=sound.sample_rate if sound else 0,
            channels=sound.layout.nb_channels if sound else 0,
            audio_duration=_seconds(audio.duration, audio.time_base, whole) if audio else 0.0,
            size=path.stat().st_size,
            sha256=sha256_of(path),
        )


# Undecodable metadata is no fault of the picture. PyAV 19 no longer has the argument and always replaces.
_TOLERANT: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}


@contextmanager
def open_clip(path: Path) -> Iterator[InputContainer]:
    """Open a file as MP4, and as nothing else: FFmpeg must not guess a playlist or a script from its content.

    The file is opened here and handed over, since FFmpeg reads a name such as ``a:b.mp4`` as a protocol.

    Raises:
        ClipError: the demuxer refuses it (``fault`` unreadable).
    """
    with path.open("rb") as file:
        try:
            container = av.open(file, mode="r", format="mp4", **_TOLERANT)
        except av.FFmpegError as exc:
            raise fault(
                "unreadable",
                f"{path} cannot be opened as MP4",
                why=f"the demuxer says: {exc.strerror or exc}",
                fix="Make or download the clip again; its index is damaged.",
                check="container",
            ) from exc
        with container:
            yield container


def video_stream(container: InputContainer) -> VideoStream:
    """The first video stream that can be decoded and is not a cover picture.

    Raises:
        ClipError: there is none (``fault`` no_video).
    """
    for stream in container.streams.video:
        if _codec(stream) not in _STILL_CODECS | {_UNKNOWN}:
            return stream
    held = ", ".join(f"{stream.type} ({_codec(stream)})" for stream in container.streams) or "no stream"
    raise fault(
        "no_video",
        f"{container.name} has no video stream",
        why=f"it holds: {held}",
        fix="Check that the encoder was given frames, and that this is the clip and not its sound alone.",
        check="video stream",
    )


def _codec(stream: Stream) -> str:
    # A stream that no decoder knows has no codec context.
    return stream.codec_context.name if stream.codec_context is not None else _UNKNOWN


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seconds(duration: int | None, time_base: Fraction | None, otherwise: float) -> float:
    return float(duration * time_base) if duration is not None and time_base is not None else otherwise
