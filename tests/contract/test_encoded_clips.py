# SPDX-License-Identifier: Apache-2.0
"""Frames to clips inside the pipeline of either host: colours, quality against the host's encoder, faults, a stop."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_h3_plugin.errors import ClipError
from vllm_h3_plugin.pins import installed_host
from vllm_h3_plugin.settings import Settings
from vllm_h3_plugin.video.encoders import Encoder, software

torch = pytest.importorskip("torch")

HEIGHT, WIDTH, FRAMES = 96, 128, 39


def picture(frames: int = FRAMES) -> Any:
    """``[1, 3, T, H, W]`` in [0, 1]: coloured clouds that move."""
    shape = (1, 3, 3, HEIGHT // 16, WIDTH // 16)
    coarse = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    return torch.nn.functional.interpolate(coarse, (frames, HEIGHT, WIDTH), mode="trilinear").clamp(0, 1)


def sound() -> Any:
    """``[1, 2, N]``."""
    ticks = torch.arange(32000 * FRAMES // 24, dtype=torch.float32) / 32000
    return (0.3 * torch.sin(2 * torch.pi * 440 * ticks)).expand(1, 2, -1).clone()


def shown(clip: bytes) -> np.ndarray:
    """Its frames in RGB, ``[T, H, W, 3]``."""
    import av

    with av.open(io.BytesIO(clip), "r") as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def heard(clip: bytes) -> bytes:
    import av

    with av.open(io.BytesIO(clip), "r") as container:
        return b"".join(bytes(packet) for packet in container.demux(audio=0))


def decibels(clip: bytes, original: Any) -> float:
    """PSNR in RGB."""
    want = (original[0].permute(1, 2, 3, 0) * 255).numpy()
    return float(10 * np.log10(255**2 / np.mean((shown(clip).astype(np.float64) - want) ** 2)))


class HostPipeline:
    """What the mixin asks of the host's pipeline."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.video_vae = SimpleNamespace(
            model=SimpleNamespace(), decoder_component=None, decode_latent=lambda latent: picture()
        )
        self.audio_vae = SimpleNamespace(decode_latent=lambda latent: sound())

    def _component_on_device(self, component: Any) -> Any:
        return nullcontext()

    def _release_stage_cache(self) -> None:
        """Nothing."""

    def decode(self, video_latent: Any, audio_latent: Any, *, height: int, width: int) -> Any:
        return picture(), sound()

    def forward(self, fault: bool = False) -> Any:
        video, audio = self.decode(None, None, height=HEIGHT, width=WIDTH)  # type: ignore[misc]
        return SimpleNamespace(output=(video, audio), post_process_func=None)


class Cancel:
    """A cancellation that is asked for or not."""

    def __init__(self, *, asked: bool = False) -> None:
        self.checks = 0
        self.asked = lambda: asked

    def check(self) -> None:
        self.checks += 1
        if self.asked():
            raise InterruptedError


def pipeline(*, encoder: Encoder | None = None, setting: str = "auto", cancelled: bool = False) -> Any:
    """The mixin over a made-up host."""
    from vllm_h3_plugin.host.clips import EncodesClips

    class Pipeline(EncodesClips, HostPipeline):
        pass

    made: Any = Pipeline()
    made._settings = Settings.model_validate({"encoder": setting})
    made._encoder = encoder or software("ultrafast")
    made._progress = SimpleNamespace(phase=lambda name: None)
    made._cancel = Cancel(asked=cancelled)
    return made


def encoded(made: Any) -> bytes:
    latent = torch.zeros(1, 24, 12, HEIGHT // 16, WIDTH // 16)
    return made.decode_to_mp4(latent, None, height=HEIGHT, width=WIDTH)


def test_luma_and_chroma_are_those_of_the_definition_on_a_cpu_and_on_a_device() -> None:
    from vllm_h3_plugin.host import planes

    frames = picture(3)[0]
    red, green, blue = frames.double().numpy()
    luma = 16 + 65.481 * red + 128.553 * green + 24.966 * blue
    found = planes.yuv420p(frames)
    other = torch.empty_like(found)
    for number, plane in enumerate(other):
        planes._by_frame(frames[:, number], plane[:HEIGHT], plane[HEIGHT:].view(2, HEIGHT // 2, WIDTH // 2))
    assert np.abs(found[:, :HEIGHT].numpy() - luma).max() < 0.51
    assert (found.int() - other.int()).abs().max() <= 1
    in_bytes = planes.yuv420p((frames * 255).round().to(torch.uint8))
    assert (found.int() - in_bytes.int()).abs().max() <= 1


def test_a_machine_that_cannot_load_opencv_makes_the_same_planes(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenCV's wheel wants libGL, which a bare machine and a small image lack."""
    from vllm_h3_plugin.host import planes

    frames = picture(3)[0]
    with_it = planes.yuv420p(frames)
    monkeypatch.setitem(sys.modules, "cv2", None)
    planes._opencv.cache_clear()
    try:
        assert planes._opencv() is None
        assert (planes.yuv420p(frames).int() - with_it.int()).abs().max() <= 1
    finally:
        planes._opencv.cache_clear()


def test_the_picture_is_no_worse_than_the_hosts_and_the_sound_the_same() -> None:
    from vllm_omni.entrypoints.openai.video_api_utils import _encode_video_bytes

    ours = encoded(pipeline())
    frames = (picture()[0].permute(1, 2, 3, 0) * 255).round().to(torch.uint8).contiguous().numpy()
    options = {"preset": "ultrafast", "threads": "0"}
    theirs = _encode_video_bytes(
        frames, fps=24, audio=sound().numpy(), audio_sample_rate=32000, video_codec_options=options
    )
    assert decibels(ours, picture()) >= decibels(theirs, picture()) - 0.05
    assert len(ours) < 1.05 * len(theirs) + 8192
    assert heard(ours) == heard(theirs)


def test_pieces_make_the_same_clip_as_the_whole() -> None:
    whole, made = encoded(pipeline()), pipeline()

    def decode_with_chunks(latent: Any, *, on_chunk: Callable[[Any], None]) -> None:
        for piece in picture().split((17, 5, 17), dim=2):
            on_chunk(piece)

    made.video_vae.model._adaptive_decode = lambda latent: None
    made.video_vae.decode_with_chunks = decode_with_chunks
    assert np.array_equal(shown(encoded(made)), shown(whole))


def test_the_file_takes_the_place_of_frames_on_a_host_that_knows_only_frames() -> None:
    output = pipeline().forward()
    if installed_host().vllm_omni != "0.28.0":
        assert torch.equal(output.output[0], picture()), "0.30 asks for files itself"
        return
    (clip,), audio = output.output
    assert shown(clip).shape == (FRAMES, HEIGHT, WIDTH, 3) and audio is None
    assert output.post_process_func(output.output)["video"] == [clip]


def test_the_hosts_own_encoder_gets_all_frames() -> None:
    output = pipeline(setting="host").forward()
    assert torch.equal(output.output[0], picture())


def test_a_broken_encoder_fails_the_request_after_every_rank_has_come_by() -> None:
    made = pipeline(encoder=Encoder("h264_none"))
    with pytest.raises(ClipError, match="could not be encoded with h264_none"):
        encoded(made)
    assert made._cancel.checks == 1
    made._encoder = software("ultrafast")
    assert encoded(made)


def test_a_request_that_is_stopped_is_stopped_while_it_is_encoded() -> None:
    with pytest.raises(InterruptedError):
        encoded(pipeline(cancelled=True))


def test_an_encoder_that_may_not_be_nice_encodes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sandboxes forbid it. A thread that ended there would leave the pipeline waiting without end."""

    def forbidden(*arguments: int) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr("os.setpriority", forbidden)
    assert shown(encoded(pipeline())).shape[0] == FRAMES


def test_a_rank_that_returns_nothing_encodes_nothing() -> None:
    made = pipeline()
    made._encoder = None
    assert encoded(made) == b""


def test_frames_are_encoded_off_the_event_loop() -> None:
    """The host's encoder, at work for a second, and a loop that goes on meanwhile."""
    import time

    from vllm_omni.entrypoints.openai import serving_video

    from vllm_h3_plugin.host.video_order import VideoOrder

    async def extracted(request: Any, reference_id: str) -> Any:
        return SimpleNamespace(
            videos=[np.zeros((1, 2, 2, 3), np.uint8)],
            audios=[None],
            actions=[None],
            output_fps=24,
            stage_durations={},
            peak_memory_mb=0.0,
            metrics=None,
        )

    def slow(video: Any, **options: Any) -> bytes:
        time.sleep(0.5)
        return b"clip"

    async def longest_wait() -> float:
        handler = SimpleNamespace(_run_and_extract=extracted, _video_frame_converter=None)
        making = asyncio.create_task(VideoOrder(handler, None, {}).make("job"))
        longest = 0.0
        while not making.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - before)
        assert making.result().data == b"clip"
        return longest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving_video, "_encode_video_bytes", slow)
        assert asyncio.run(longest_wait()) < 0.3
