# SPDX-License-Identifier: Apache-2.0
"""Pictures, films and sounds that the tests make for themselves, small and each different in one way."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from vllm_h3_plugin.serving.references.load import ReferencePolicy, load
from vllm_h3_plugin.serving.references.media import Loaded
from vllm_h3_plugin.serving.rules.ask import Reference
from vllm_h3_plugin.serving.rules.fault import Fault


def picture(width: int = 320, height: int = 256) -> Image.Image:
    """Red above, blue below, green at the left edge: turned or mirrored, it looks different."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, :, 0] = 255
    pixels[height // 2 :, :, 2] = 255
    pixels[:, : width // 4] = (0, 255, 0)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, format_: str = "PNG", **options: Any) -> bytes:
    """A picture as a file's bytes."""
    file = io.BytesIO()
    image.save(file, format_, **options)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that says how large it is and has one row of data: a decompression bomb's head."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def film(
    path: Path,
    *,
    seconds: float = 2.5,
    size: tuple[int, int] = (256, 256),
    rate: int = 24,
    codec: str = "h264",
    sound: str | None = "aac",
    format_: str = "mp4",
) -> bytes:
    """A film's bytes."""
    with av.open(path, "w", format=format_) as container:
        video = container.add_stream(codec, rate=rate)
        video.width, video.height, video.pix_fmt = *size, "yuv420p"
        if codec == "h264":
            video.options = {"preset": "ultrafast"}
        audio = container.add_stream(sound, rate=48_000, layout="mono") if sound else None
        picture_ = np.zeros((size[1], size[0], 3), np.uint8)
        for number in range(round(seconds * rate)):
            picture_[:] = number * 3 % 256
            picture_[number % size[1], :, 1] = 255
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture_, format="rgb24")))
        container.mux(video.encode(None))
        if audio is not None:
            _sing(container, audio, seconds, 48_000)
    return path.read_bytes()


def sound(
    path: Path, *, seconds: float = 2.5, codec: str = "pcm_s16le", format_: str = "wav", rate: int = 16_000
) -> bytes:
    """A sound's bytes."""
    with av.open(path, "w", format=format_) as container:
        _sing(container, container.add_stream(codec, rate=rate, layout="mono"), seconds, rate)
    return path.read_bytes()


def _sing(container: Any, stream: Any, seconds: float, rate: int) -> None:
    wave = np.sin(np.arange(round(seconds * rate)) / rate * 2 * np.pi * 440)
    frame = av.AudioFrame.from_ndarray((wave * 20_000).astype(np.int16)[None], format="s16", layout="mono")
    frame.sample_rate = rate
    frame.pts = 0
    for part in av.AudioResampler(stream.format, "mono", rate, frame_size=1024).resample(frame):
        container.mux(stream.encode(part))
    container.mux(stream.encode(None))


def loaded(
    data: bytes | str, tmp_path: Path, kind: Any = None, policy: ReferencePolicy | None = None
) -> Loaded | Fault:
    """One reference through the whole way: bytes are uploaded, text is a URL."""
    given = {"url": data} if isinstance(data, str) else {"file": io.BytesIO(data), "filename": "holiday.jpg"}
    media, faults = load([Reference("input_reference", kind, **given)], policy or ReferencePolicy(folder=tmp_path))
    assert len(media.items) + len(faults) == 1
    return media.items[0] if media.items else faults[0]


def taken(data: bytes | str, tmp_path: Path, kind: Any = None, policy: ReferencePolicy | None = None) -> Loaded:
    """One reference that must be taken."""
    found = loaded(data, tmp_path, kind, policy)
    assert isinstance(found, Loaded), found
    return found


def refused(data: bytes | str, tmp_path: Path, kind: Any = None, policy: ReferencePolicy | None = None) -> Fault:
    """One reference that must be refused; nothing of it may stay behind."""
    found = loaded(data, tmp_path, kind, policy)
    assert isinstance(found, Fault), found.facts
    assert found.code == "invalid_reference" and found.field == "input_reference"
    assert not list(tmp_path.glob("h3-reference-*")), "a temporary file was left behind"
    return found
