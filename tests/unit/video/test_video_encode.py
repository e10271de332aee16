# SPDX-License-Identifier: Apache-2.0
"""Encoding while frames arrive: what the file is, and what becomes of faults and of clips that nobody wants."""

from __future__ import annotations

import struct
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from vllm_h3_plugin.errors import BackendError, ClipError
from vllm_h3_plugin.video.encode import ClipEncoder, ClipFormat, Planes, Sound, Stopped
from vllm_h3_plugin.video.encoders import HARDWARE, SOFTWARE, Encoder, choose, fault, software
from vllm_h3_plugin.video.verdict import Expectation
from vllm_h3_plugin.video.verify import verify

WIDTH, HEIGHT, FRAMES, RATE = 96, 64, 124, 32000


def sound(frames: int = FRAMES) -> Sound:
    ticks = np.arange(round(RATE * frames / 24)) / RATE
    tone = 0.3 * np.sin(2 * np.pi * 440 * ticks)
    return Sound(np.stack([tone, tone]).astype(np.float32), RATE)


def planes(first: int, count: int) -> Planes:
    """A bright bar that moves over grey."""
    frames = np.full((count, HEIGHT * 3 // 2, WIDTH), 128, np.uint8)
    for number in range(count):
        left = (first + number) * 2 % (WIDTH - 8)
        frames[number, :HEIGHT, left : left + 8] = 220
    return frames


def encode(frames: int = FRAMES, encoder: Encoder | None = None, heard: Sound | None = None, chunk: int = 17) -> bytes:
    clip = ClipFormat(WIDTH, HEIGHT, 24, frames, heard)
    with ClipEncoder(clip, encoder or software("ultrafast")) as running:
        for first in range(0, frames, chunk):
            piece = planes(first, min(chunk, frames - first))
            running.push(partial(np.asarray, piece))
        return running.finish()


def boxes(data: bytes) -> list[str]:
    """Types of the boxes at the top of an MP4 file."""
    found, place = [], 0
    while place < len(data):
        size, kind = struct.unpack(">I4s", data[place : place + 8])
        found.append(kind.decode())
        place += size
    assert place == len(data)
    return found


def encoder_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "clip-encoder"]


@pytest.mark.parametrize("preset", ["ultrafast", "veryfast"])
def test_a_clip_is_what_was_asked_and_starts_before_it_is_whole(tmp_path: Path, preset: str) -> None:
    data = encode(encoder=software(preset), heard=sound())
    found = boxes(data)
    assert found.index("moov") < found.index("mdat")
    path = tmp_path / "clip.mp4"
    path.write_bytes(data)
    verdict = verify(path, Expectation(frames=FRAMES, width=WIDTH, height=HEIGHT), strict=True)
    assert verdict.ok, [check for check in verdict.checks if check.status != "ok"]


@pytest.mark.parametrize("frames", [1, 22, 362])
def test_there_is_room_for_the_index_of_any_length(frames: int) -> None:
    found = boxes(encode(frames, heard=sound(frames=frames)))
    assert found.index("moov") < found.index("mdat")


def test_a_clip_without_sound_is_a_clip(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(encode(22))
    assert boxes(path.read_bytes())[1] == "moov"


def test_a_chunk_is_waited_for_in_the_encoders_thread() -> None:
    seen: list[str] = []

    def late() -> Planes:
        seen.append(threading.current_thread().name)
        return planes(0, 5)

    with ClipEncoder(ClipFormat(WIDTH, HEIGHT, 24, 5), software("ultrafast")) as running:
        running.push(late)
        assert running.finish()
    assert seen == ["clip-encoder"]


def test_a_codec_that_does_not_open_is_named_and_ends_nothing_else() -> None:
    with pytest.raises(ClipError, match=r"could not be encoded with h264_none.*H3_ENCODER=software"):
        encode(encoder=Encoder("h264_none"))
    assert not encoder_threads()
    assert encode(22)


def test_a_fault_on_the_way_is_told_at_the_end_and_takes_no_more_frames() -> None:
    with ClipEncoder(ClipFormat(WIDTH, HEIGHT, 24, 100), software("ultrafast"), pending=1) as running:

        def broken() -> Planes:
            raise OSError(28, "No space left on device")

        running.push(broken)
        for first in range(0, 85, 17):
            running.push(partial(planes, first, 17))
        assert running.failed
        with pytest.raises(ClipError, match="No space left on device"):
            running.finish()
    assert not encoder_threads()


def test_no_frames_are_no_clip() -> None:
    running = ClipEncoder(ClipFormat(WIDTH, HEIGHT, 24, 5), software("ultrafast"))
    with running, pytest.raises(ClipError, match="its decoder gave no frames"):
        running.finish()


def test_a_stop_is_heard_between_two_frames() -> None:
    wanted = threading.Event()
    encoded: list[int] = []

    def one(number: int) -> Planes:
        encoded.append(number)
        if number == 3:
            wanted.set()
        return planes(number, 1)

    with ClipEncoder(ClipFormat(WIDTH, HEIGHT, 24, 50), software("ultrafast"), stopped=wanted.is_set) as running:
        for number in range(50):
            running.push(partial(one, number))
        with pytest.raises(Stopped):
            running.finish()
    assert max(encoded) <= 4
    assert not encoder_threads()


def test_a_decoder_that_fails_leaves_no_thread_behind() -> None:
    with pytest.raises(KeyError), ClipEncoder(ClipFormat(WIDTH, HEIGHT, 24, 50), software("ultrafast")) as running:
        running.push(lambda: planes(0, 17))
        raise KeyError
    assert not encoder_threads()


def test_a_card_that_encodes_is_used() -> None:
    tried: list[str] = []

    def works(encoder: Encoder) -> None:
        tried.append(encoder.codec)

    assert choose("auto", "ultrafast", works).codec == HARDWARE
    assert choose("nvenc", "ultrafast", works).codec == HARDWARE
    assert tried == [HARDWARE, HARDWARE]


def test_a_card_that_does_not_encode_is_told_with_its_reason() -> None:
    found = choose("auto", "superfast", lambda encoder: "no capable devices found")
    assert (found.codec, found.options["preset"], found.options["crf"]) == (SOFTWARE, "superfast", "18")
    assert "no capable devices found" in found.reason


def test_nvenc_that_was_asked_for_and_is_not_there_stops_the_start() -> None:
    with pytest.raises(BackendError, match=r"H3_ENCODER=nvenc.*no capable devices found.*H3_ENCODER=auto"):
        choose("nvenc", "ultrafast", lambda encoder: "no capable devices found")


def test_software_is_not_held_against_a_card() -> None:
    def never(encoder: Encoder) -> str | None:
        raise AssertionError

    assert choose("software", "ultrafast", never).codec == SOFTWARE


def test_the_trial_encodes_frames() -> None:
    assert fault(software("ultrafast")) is None
    assert "h264_none" in (fault(Encoder("h264_none")) or "")
    assert fault(Encoder(SOFTWARE, {"preset": "no-such-preset"}))
