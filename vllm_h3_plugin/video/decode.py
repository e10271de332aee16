# SPDX-License-Identifier: Apache-2.0
"""A full decode of picture and sound, twice: by PyAV in this process, and by the ffmpeg program.

Both decode every frame and keep one MD5 a frame, never the frames. H.264 decoding is defined bit for bit, so the two
must agree exactly on every picture, whatever their FFmpeg versions. AAC decoding is not, and decoders differ in how
many of the encoder's padding samples they hand out: only the number of samples is compared, with a tolerance.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import IO, Any

import av
import ffmpeg
from av.audio.frame import AudioFrame
from av.video.frame import VideoFrame

from vllm_h3_plugin.errors import ToolMissingError
from vllm_h3_plugin.video.measure import PictureFacts, PictureMeter, SoundFacts, SoundMeter, plane_rows
from vllm_h3_plugin.video.probe import ClipFacts, open_clip, video_stream

HASHED_FORMATS = frozenset({"yuv420p", "yuvj420p", "yuv422p", "yuvj422p", "yuv444p", "yuvj444p", "gray"})
"""8-bit planar pixel formats whose raw bytes are the planes one after the other, in both decoders."""

_MAX_ERRORS = 5

Progress = Callable[[int], None]
"""Called with the number of frames decoded so far."""


@dataclass(frozen=True)
class DecodeReport:
    """What one decoder made of a clip.

    Attributes:
        decoder: name and version.
        frames: video frames decoded.
        sizes: distinct (width, height) of the frames, in order of appearance.
        digests: MD5 of each frame's raw bytes; empty for pixel formats outside ``HASHED_FORMATS``.
        samples: audio samples per channel; 0 without sound.
        steps: shortest and longest distance of two frames' timestamps in seconds; None below two frames.
        picture, sound: measured by PyAV only.
        errors: what went wrong, the first few; empty for a healthy clip.
    """

    decoder: str
    frames: int
    sizes: tuple[tuple[int, int], ...]
    digests: tuple[bytes, ...]
    samples: int
    steps: tuple[Fraction, Fraction] | None = None
    picture: PictureFacts | None = None
    sound: SoundFacts | None = None
    errors: tuple[str, ...] = ()


def decode_with_pyav(facts: ClipFacts, progress: Progress | None = None) -> DecodeReport:
    """Decode the whole clip in this process, and measure picture and sound on the way.

    Decoding errors end the decode and are reported, not raised. The clip must have passed ``probe``.
    """
    picture, sound = PictureMeter(), SoundMeter()
    sizes: dict[tuple[int, int], None] = {}
    digests: list[bytes] = []
    stamps = _Stamps()
    errors: list[str] = []
    frames = 0
    try:
        for frame in decoded_frames(facts.path):
            if isinstance(frame, AudioFrame):
                sound.add(frame)
                continue
            frames += 1
            sizes.setdefault((frame.width, frame.height))
            if frame.format.name in HASHED_FORMATS:
                digests.append(_md5_of(frame))
            stamps.add(frame)
            picture.add(frame)
            if progress is not None:
                progress(frames)
    except av.FFmpegError as exc:
        errors.append(f"after {frames} frames and {sound.facts().samples} samples: {exc.strerror or exc}")
    return DecodeReport(
        decoder=f"PyAV {av.__version__}",
        frames=frames,
        sizes=tuple(sizes),
        digests=tuple(digests),
        samples=sound.facts().samples,
        steps=stamps.steps(),
        picture=picture.facts(),
        sound=sound.facts() if facts.audio_codec else None,
        errors=tuple(errors),
    )


def decode_with_ffmpeg(facts: ClipFacts, program: Path, progress: Progress | None = None) -> DecodeReport:
    """Decode the whole clip with the ffmpeg program, to one MD5 a frame (its ``framemd5`` format).

    Anything on its stderr at level ``error`` and any exit status but 0 is an error of the report.

    Raises:
        ToolMissingError: the program cannot be started.
    """
    with tempfile.TemporaryFile() as messages:
        try:
            process = subprocess.Popen(_command(facts, program), stdout=subprocess.PIPE, stderr=messages)
        except OSError as exc:
            raise ToolMissingError(
                f"{program} cannot be run", why=exc.strerror or str(exc), fix="Set H3_FFMPEG to a working ffmpeg."
            ) from exc
        with process:  # closes the pipe and reaps
            try:
                assert process.stdout is not None
                listing = _FrameListing.read(process.stdout, progress)
            except BaseException:
                process.kill()
                raise
        errors = _stderr_lines(messages, str(facts.path))
        if process.returncode != 0 and not errors:
            errors = [f"it ended with status {process.returncode} and said nothing"]
    hashed = facts.pixel_format in HASHED_FORMATS
    return DecodeReport(
        decoder=f"ffmpeg ({listing.software})",
        frames=len(listing.digests),
        sizes=listing.sizes,
        digests=tuple(listing.digests) if hashed else (),
        samples=listing.samples,
        errors=tuple(errors),
    )


def decoded_frames(path: Path) -> Iterator[VideoFrame | AudioFrame]:
    """Every frame of the first video and the first audio stream, in file order, one at a time.

    Raises:
        av.FFmpegError: the stream is damaged; damage is never concealed.
        ClipError: the file is no MP4 or holds no video.
    """
    with open_clip(path) as container:
        streams: list[Any] = [video_stream(container)]
        streams += [stream for stream in container.streams.audio[:1] if stream.codec_context is not None]
        for stream in streams:
            # Without it a damaged frame is filled with its neighbours' blocks and handed out as good.
            stream.codec_context.options = {"err_detect": "explode"}
        yield from container.decode(*streams)


def _md5_of(frame: VideoFrame) -> bytes:
    digest = hashlib.md5(usedforsecurity=False)
    for plane in frame.planes:
        digest.update(plane_rows(plane).tobytes())
    return digest.digest()


class _Stamps:
    """Shortest and longest distance between presentation times."""

    def __init__(self) -> None:
        self._last: Fraction | None = None
        self._steps: tuple[Fraction, Fraction] | None = None

    def add(self, frame: VideoFrame) -> None:
        if frame.pts is None or frame.time_base is None:
            return
        now = frame.pts * frame.time_base
        if self._last is not None:
            step = now - self._last
            low, high = self._steps or (step, step)
            self._steps = (min(low, step), max(high, step))
        self._last = now

    def steps(self) -> tuple[Fraction, Fraction] | None:
        return self._steps


def _command(facts: ClipFacts, program: Path) -> list[str]:
    source = ffmpeg.input(
        f"file:{facts.path}",
        format="mov",  # also the name of the MP4 demuxer; content must not choose another one
        protocol_whitelist="file",
        err_detect="explode",
        noautorotate=None,
    )
    streams = [source[str(facts.video_index)]]
    if facts.audio_codec is not None:
        streams.append(source["a:0"])
    output = ffmpeg.output(*streams, "pipe:1", format="framemd5")
    command: list[str] = ffmpeg.compile(
        output.global_args("-nostdin", "-hide_banner", "-xerror", "-v", "error"), cmd=str(program)
    )
    return command


@dataclass
class _FrameListing:
    """The text of ``framemd5``: ``#key stream: value`` headers, then ``stream, dts, pts, duration, size, hash``."""

    software: str
    sizes: tuple[tuple[int, int], ...]
    digests: list[bytes]
    samples: int

    @classmethod
    def read(cls, lines: IO[bytes], progress: Progress | None) -> _FrameListing:
        listing = cls("unknown", (), [], 0)
        audio_base = audio_rate = Fraction(1)
        for raw in lines:
            line = raw.decode("ascii", "replace").strip()
            key, _, value = line.partition(": ")
            if key == "#software":
                listing.software = value
            elif key == "#dimensions 0":
                width, _, height = value.partition("x")
                listing.sizes = ((int(width), int(height)),)
            elif key == "#tb 1":
                audio_base = Fraction(value)
            elif key == "#sample_rate 1":
                audio_rate = Fraction(value)
            elif not line.startswith("#") and line.count(",") >= 5:
                stream, _, _, duration, _, digest = (field.strip() for field in line.split(",")[:6])
                if stream == "1":
                    listing.samples += round(int(duration) * audio_base * audio_rate)
                    continue
                listing.digests.append(bytes.fromhex(digest))
                if progress is not None:
                    progress(len(listing.digests))
        return listing


def _stderr_lines(messages: IO[bytes], path: str) -> list[str]:
    messages.seek(0)
    text = messages.read(65_536).decode("utf-8", "replace").replace(f"file:{path}", path)
    return [line.strip() for line in text.splitlines() if line.strip()][:_MAX_ERRORS]
