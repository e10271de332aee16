# SPDX-License-Identifier: Apache-2.0
"""Films and sounds: what is in the file, by PyAV, before the host's own decoders see it.

The demuxer is named and not guessed, so that a playlist or a script in disguise is no instruction to read other files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_h3_plugin.errors import ClipError
from vllm_h3_plugin.serving.references.limits import ReferenceLimits
from vllm_h3_plugin.serving.references.sniff import FILMS, SOUNDS
from vllm_h3_plugin.serving.references.unfit import Unfit
from vllm_h3_plugin.serving.rules.accepted import ReferenceFacts
from vllm_h3_plugin.video.sniff import read_layout

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.stream import Stream
    from av.video.stream import VideoStream

# Sniffed format -> name of FFmpeg's demuxer.
_DEMUXERS = {"mp4": "mov", "mov": "mov", "wav": "wav", "mp3": "mp3"}
_FILM_CODECS = frozenset({"h264", "hevc"})
_FILM_SOUND_CODECS = frozenset({"aac", "mp3", "mp3float"})
_SOUND_CODECS = frozenset({"mp3", "mp3float", "aac"})
_MISSING = 0.02
"""Share of a recording that may be missing at its end before it counts as truncated; containers round."""
_PADDING = 8
"""Bytes that a WAV file's length may be wrong by: writers disagree on padding."""


def probe_film(path: Path, format_: str, field: str, limits: ReferenceLimits) -> ReferenceFacts:
    """Facts of a film.

    Its packets are read to the end, and its first frame is decoded: a header may say anything.

    Raises:
        Unfit: not what H3 takes, out of range, truncated or broken.
    """
    _check_boxes(path)
    with _opened(path, format_) as container:
        _check_streams(container, limits)
        pictures = [stream for stream in container.streams.video if not _is_cover(stream)]
        if not pictures:
            raise Unfit("it has no moving picture" + (", only sound" if container.streams.audio else ""), FILMS)
        if len(pictures) > 1:
            raise Unfit(f"it has {len(pictures)} moving pictures", "one")
        film = pictures[0]
        codec = _codec(film)
        if codec not in _FILM_CODECS:
            raise Unfit(f"its pictures are coded as {codec}", FILMS)
        for sound in container.streams.audio:
            if _codec(sound) not in _FILM_SOUND_CODECS:
                raise Unfit(f"its sound is coded as {_codec(sound)}", "AAC or MP3 sound, or none")
        _check_film_size(film.codec_context.width, film.codec_context.height, limits)
        rate = float(film.base_rate or film.average_rate or 0)
        if not limits.slowest_fps - 1e-3 <= rate <= limits.fastest_fps + 1e-3:
            allowed = f"{limits.slowest_fps:g} to {limits.fastest_fps:g} frames a second"
            raise Unfit(f"it has {rate:.3f} frames a second", allowed)
        seconds = _seconds(film, container)
        _check_seconds(seconds, limits)
        _check_whole(container, film, seconds)
        _check_first_frame(container, film, limits)
        width, height = film.codec_context.width, film.codec_context.height
    return ReferenceFacts(field, "video", path.stat().st_size, format_, width, height, round(seconds, 3))


def probe_sound(path: Path, format_: str, field: str, limits: ReferenceLimits) -> ReferenceFacts:
    """Facts of a sound, which is decoded once.

    Raises:
        Unfit: not what H3 takes, out of range, truncated or broken.
    """
    if format_ == "wav":
        _check_riff(path)
    with _opened(path, format_) as container:
        _check_streams(container, limits)
        if not container.streams.audio:
            raise Unfit("it has no sound", SOUNDS)
        sound = container.streams.audio[0]
        codec = _codec(sound)
        if codec not in _SOUND_CODECS and not codec.startswith("pcm_"):
            raise Unfit(f"it is coded as {codec}", SOUNDS)
        if not 1 <= sound.codec_context.channels <= limits.channels:
            raise Unfit(f"it has {sound.codec_context.channels} channels", f"1 to {limits.channels} channels")
        seconds = _seconds(sound, container)
        _check_seconds(seconds, limits)
        heard = 0.0
        for frame in container.decode(sound):
            heard += frame.samples / frame.sample_rate
            if heard > limits.longest_s + 1:
                # A header that says less than there is would pass a long file through.
                raise Unfit(f"it is longer than the {seconds:.2f} s that its header says", f"{limits.longest_s:g} s")
        _check_length(heard, seconds)
    return ReferenceFacts(field, "audio", path.stat().st_size, format_, seconds=round(seconds, 3))


@contextmanager
def _opened(path: Path, format_: str) -> Iterator[InputContainer]:
    import av

    try:
        with av.open(str(path), format=_DEMUXERS[format_]) as container:
            yield container
    except Unfit:
        raise
    except (av.FFmpegError, ValueError, OSError, EOFError) as exc:
        # FFmpeg's own words name errors by number; the path in them is this server's.
        reason = str(getattr(exc, "strerror", None) or exc).splitlines()[0][:120]
        raise Unfit(f"it is truncated or broken: {reason}") from exc


def _codec(stream: Stream) -> str:
    """The codec's name; a stream of a codec that FFmpeg does not know has no context."""
    context = stream.codec_context
    return str(context.name) if context is not None else "something unknown"


def _check_boxes(path: Path) -> None:
    """FFmpeg takes a film whose last box is cut for a whole one."""
    try:
        read_layout(path)
    except ClipError as exc:
        raise Unfit(f"it is truncated or broken: {exc.why or 'its boxes are not those of MP4'}") from exc


def _check_riff(path: Path) -> None:
    """FFmpeg takes what is there of a WAV file for all of it; its first length says more."""
    with path.open("rb") as file:
        head = file.read(8)
    promised = int.from_bytes(head[4:8], "little") + 8
    # Files that were written as a stream, and those above 4 GiB, say nothing there.
    if head[:4] == b"RIFF" and head[4:8] not in (b"\0\0\0\0", b"\xff\xff\xff\xff"):
        there = path.stat().st_size
        if there + _PADDING < promised:
            raise Unfit(f"it is truncated: {there} of {promised} bytes are there")


def _is_cover(stream: Stream) -> bool:
    return "attached_pic" in str(stream.disposition)


def _check_streams(container: InputContainer, limits: ReferenceLimits) -> None:
    if len(container.streams) > limits.streams:
        raise Unfit(f"it has {len(container.streams)} streams", f"up to {limits.streams}")


def _check_film_size(width: int, height: int, limits: ReferenceLimits) -> None:
    fault = limits.size_fault(width, height)
    if fault is not None:
        raise Unfit(*fault)


def _seconds(stream: Stream, container: InputContainer) -> float:
    """Length as the stream says, else as the container does; NaN if neither."""
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    return container.duration / 1e6 if container.duration is not None else math.nan


def _check_seconds(seconds: float, limits: ReferenceLimits) -> None:
    allowed = f"{limits.shortest_s:g} to {limits.longest_s:g} s"
    if not math.isfinite(seconds):
        raise Unfit("it does not say how long it is", allowed)
    if not limits.shortest_s - limits.tolerance_s <= seconds <= limits.longest_s + limits.tolerance_s:
        raise Unfit(f"it lasts {seconds:.2f} s", allowed)


def _check_whole(container: InputContainer, film: VideoStream, seconds: float) -> None:
    """Read every packet: what the index promises must be in the file."""
    packets, end = 0, 0.0
    for packet in container.demux(film):
        if packet.size and packet.pts is not None:
            packets += 1
            if packet.is_corrupt:
                raise Unfit(f"it is truncated or broken: its picture {packets} is cut")
            end = max(end, float((packet.pts + (packet.duration or 0)) * film.time_base))  # type: ignore[operator]
    if film.frames and packets < film.frames:
        raise Unfit(f"it is truncated: {packets} of {film.frames} pictures are there")
    start = float((film.start_time or 0) * film.time_base)  # type: ignore[operator]
    _check_length(end - start, seconds)


def _check_first_frame(container: InputContainer, film: VideoStream, limits: ReferenceLimits) -> None:
    container.seek(0, stream=film)
    film.codec_context.thread_count = 1
    frame = next(iter(container.decode(film)), None)
    if frame is None:
        raise Unfit("it is truncated or broken: no picture of it can be decoded")
    _check_film_size(frame.width, frame.height, limits)


def _check_length(there: float, promised: float) -> None:
    if there < promised * (1 - _MISSING) - 0.1:
        raise Unfit(f"it is truncated: {there:.2f} of {promised:.2f} s are there")
