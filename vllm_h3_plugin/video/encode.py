# SPDX-License-Identifier: Apache-2.0
"""Frames to an MP4 file in memory, in a thread of its own, while later frames are still being decoded.

The index (``moov``) comes before the pictures: a place for it is kept at the front, so that a player can start before
it has the whole file. Nothing touches the disk.
"""

from __future__ import annotations

import io
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from vllm_h3_plugin.errors import ClipError
from vllm_h3_plugin.video.encoders import Encoder

Planes = NDArray[np.uint8]
"""``[T, 3 H / 2, W]``: frames in yuv420p; of each the luma rows, then both chroma planes, each packed."""

_AAC_FRAME = 1024
# Bytes of the index for one frame or packet: its size, place and time, and its chunk's (ISO/IEC 14496-12: stsz 4, co64
# 8, stts and ctts 8 each, stsc 12, stss 4); and for what does not grow with the clip.
_INDEX_PER_SAMPLE, _INDEX_BASE = 44, 8192
# Large writes: each one needs the interpreter's lock.
_WRITE_BYTES = 1 << 20
_POLL_S = 0.05
_NICER = 5


@dataclass(frozen=True)
class Sound:
    """A clip's sound.

    Attributes:
        samples: ``[channels, N]``, FP32 in [-1, 1]; one or two channels.
        rate: samples a second.
    """

    samples: NDArray[np.float32]
    rate: int


@dataclass(frozen=True)
class ClipFormat:
    """What is encoded.

    Attributes:
        frames: an upper bound; only the place for the index depends on it.
    """

    width: int
    height: int
    fps: int
    frames: int
    sound: Sound | None = None


class Stopped(Exception):
    """The clip is not wanted any more."""


class ClipEncoder:
    """Takes frames from one thread and encodes them in another. Use it as a context: leaving it ends the thread."""

    def __init__(
        self,
        clip: ClipFormat,
        encoder: Encoder,
        *,
        stopped: Callable[[], bool] = lambda: False,
        pending: int = 2,
    ) -> None:
        """
        Args:
            stopped: asked between frames; True ends the work with :class:`Stopped`.
            pending: chunks that wait at most; :meth:`push` waits for room then.
        """
        self._clip = clip
        self._encoder = encoder
        self._stopped = stopped
        self._chunks: queue.Queue[Callable[[], Planes] | None] = queue.Queue(pending)
        self._ended = threading.Event()
        self._fault: BaseException | None = None
        self._result = b""
        self._thread = threading.Thread(target=self._run, name="clip-encoder", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread.is_alive():
            self._stopped = lambda: True
            self._put(None)
        self._thread.join()

    @property
    def failed(self) -> bool:
        """Whether further frames are in vain; :meth:`finish` raises."""
        return self._fault is not None

    def push(self, chunk: Callable[[], Planes]) -> None:
        """Queue frames.

        Args:
            chunk: gives them, and may wait for them: it is called in the encoder's thread. The array is not used again
                by the caller.
        """
        self._put(chunk)

    def finish(self) -> bytes:
        """The file, once all is encoded.

        Raises:
            Stopped: it is not wanted any more.
            ClipError: the encoder failed, or got no frames.
        """
        self._put(None)
        self._thread.join()
        if self._fault is None:
            return self._result
        if isinstance(self._fault, Stopped | ClipError):
            raise self._fault
        raise ClipError(
            f"the clip could not be encoded with {self._encoder.codec}",
            why=" ".join(str(self._fault).split()) or type(self._fault).__name__,
            fix="Set H3_ENCODER=software for x264 on the CPU, or H3_ENCODER=host for the host's own encoder.",
        ) from self._fault

    def _put(self, chunk: Callable[[], Planes] | None) -> None:
        while not self._ended.is_set():
            try:
                self._chunks.put(chunk, timeout=_POLL_S)
                return
            except queue.Full:
                continue

    def _run(self) -> None:
        try:
            # x264's threads inherit it. What decodes the next frames, and whoever asks the server meanwhile, goes
            # first. Some sandboxes forbid it.
            with suppress(OSError):
                mine = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, mine, min(19, os.getpriority(os.PRIO_PROCESS, mine) + _NICER))
            self._result = self._file()
        except BaseException as exc:  # noqa: BLE001  # finish() tells
            self._fault = exc
        finally:
            self._ended.set()
            while not self._chunks.empty():
                self._chunks.get_nowait()

    def _file(self) -> bytes:
        import av

        clip, sound, file = self._clip, self._clip.sound, io.BytesIO()
        samples = clip.frames + (0 if sound is None else sound.samples.shape[1] // _AAC_FRAME + 4)
        index = {"moov_size": str(_INDEX_BASE + _INDEX_PER_SAMPLE * samples)}
        container: Any = av.open(file, "w", format="mp4", options=index, buffer_size=_WRITE_BYTES)
        with container:
            video = container.add_stream(
                self._encoder.codec, rate=Fraction(clip.fps), options=dict(self._encoder.options)
            )
            video.width, video.height, video.pix_fmt = clip.width, clip.height, "yuv420p"
            packets = _Interleaved(container, [] if sound is None else _sound_packets(container, sound))
            count = 0
            while (chunk := self._next()) is not None:
                for planes in chunk():
                    if self._stopped():
                        raise Stopped
                    frame = av.VideoFrame.from_numpy_buffer(planes, format="yuv420p")
                    packets.write(video.encode(frame))
                    count += 1
            if self._stopped():
                raise Stopped
            if not count:
                raise ClipError(
                    "the clip could not be encoded", why="its decoder gave no frames", fix="Ask for it again."
                )
            packets.write(video.encode())
            packets.end()
        return file.getvalue()

    def _next(self) -> Callable[[], Planes] | None:
        while True:
            try:
                return self._chunks.get(timeout=_POLL_S)
            except queue.Empty:
                if self._stopped():
                    raise Stopped from None


class _Interleaved:
    """Writes packets of the picture, each after the sound that is due before it."""

    def __init__(self, container: Any, sound: list[Any]) -> None:
        self._container = container
        self._sound = deque(sound)

    def write(self, packets: list[Any]) -> None:
        for packet in packets:
            while self._sound and _time(self._sound[0]) <= _time(packet):
                self._container.mux(self._sound.popleft())
            self._container.mux(packet)

    def end(self) -> None:
        while self._sound:
            self._container.mux(self._sound.popleft())


def _time(packet: Any) -> Fraction:
    stamp = packet.dts if packet.dts is not None else packet.pts
    return Fraction(stamp or 0) * packet.time_base


def _sound_packets(container: Any, sound: Sound) -> list[Any]:
    """The sound in AAC, as the host makes it (vllm_omni/diffusion/utils/media_utils.py)."""
    import av

    layout = "stereo" if sound.samples.shape[0] >= 2 else "mono"
    stream = container.add_stream("aac", rate=sound.rate)
    stream.layout = layout
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound.samples), format="fltp", layout=layout)
    frame.sample_rate = sound.rate
    # The encoder's delay is told to players by timestamps that count from here.
    frame.pts = 0
    frame.time_base = Fraction(1, sound.rate)
    return [*stream.encode(frame), *stream.encode()]
