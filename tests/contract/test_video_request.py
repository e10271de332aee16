# SPDX-License-Identifier: Apache-2.0
"""The rules of requests are the host's: it makes exactly the clip that was accepted, and refuses what they refuse."""

from __future__ import annotations

import inspect
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from vllm_omni.diffusion.models.minimax_h3 import time_request
from vllm_omni.entrypoints.openai.protocol.videos import VideoGenerationRequest
from vllm_omni.entrypoints.openai.utils import parse_lora_request
from vllm_omni.errors import OmniClientError
from vllm_omni.model_executor.models.minimax_h3 import preprocessing

from vllm_h3_plugin.host.video_request import (
    generation_request,
    host_references,
    request_fields,
    server_limits,
    usable_shift,
)
from vllm_h3_plugin.pins import installed_host
from vllm_h3_plugin.serving.references.media import Loaded, Media
from vllm_h3_plugin.serving.rules.accepted import Accepted, Lora, ReferenceFacts
from vllm_h3_plugin.serving.rules.canvas import canvas
from vllm_h3_plugin.serving.rules.check import check
from vllm_h3_plugin.serving.rules.limits import Limits
from vllm_h3_plugin.serving.rules.ratios import RATIOS
from vllm_h3_plugin.serving.rules.read import read

SHIFTS = [round(0.01 * step, 2) for step in range(1, 10001)]
LIMITS = Limits(tasks=("t2va", "fl2va", "ref2va"))
IMAGE = ReferenceFacts("input_reference", "image", 1, "png", 1000, 700)
OLD = installed_host().vllm_omni == "0.28.0"


def _accepted(references: tuple[ReferenceFacts, ...] = (), **fields: Any) -> Accepted | list[Any]:
    sent = [("input_references", "data:,") for _ in references]
    ask, faults = read([("prompt", "a kite"), *sent, *fields.items()])
    return check(ask, LIMITS, references, faults)


def _hosts_shape(accepted: Accepted, **changed: Any) -> tuple[int, int, int]:
    """(width, height, frames) that the host makes of what it is sent, by the way of its server and its worker."""
    request = VideoGenerationRequest(**{**request_fields(accepted), **changed})
    asked = request.resolve_video_params()
    extra = {"aspect_ratio": request.aspect_ratio, **(request.extra_params or {})}
    sampling = SimpleNamespace(
        fps=None, num_frames=asked.num_frames, width=asked.width, height=asked.height, extra_args=extra
    )
    image = Image.new("RGB", (IMAGE.width, IMAGE.height)) if accepted.task == "fl2va" else None
    if OLD:
        from vllm_omni.diffusion.models.minimax_h3.pipeline_minimax_h3 import MiniMaxH3Pipeline

        made = MiniMaxH3Pipeline._resolve_shape(SimpleNamespace(), accepted.task, sampling, image)
    else:
        from vllm_omni.model_executor.models.minimax_h3.encoder_processing import resolve_minimax_h3_shape

        made = resolve_minimax_h3_shape(accepted.task, sampling, image)
    return made[1], made[0], made[2]


@pytest.mark.parametrize("references", [(), (IMAGE,)])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"size": "1280x720", "seconds": "4"},
        {"size": "1792x1024", "seconds": 8},
        {"aspect_ratio": "21:9", "num_frames": 96},
        {"aspect_ratio": "9:16", "seconds": 15},
        {"num_frames": 362, "size": "64x64"},
        {"seconds": 15.05, "size": "32x128"},
    ],
)
def test_the_host_makes_the_clip_that_was_accepted(
    fields: dict[str, Any], references: tuple[ReferenceFacts, ...]
) -> None:
    accepted = _accepted(references, **fields)
    assert isinstance(accepted, Accepted), accepted
    assert _hosts_shape(accepted) == (accepted.width, accepted.height, accepted.frames)


def test_every_length_that_is_accepted_is_made() -> None:
    for frames in range(96, 363):
        accepted = _accepted(num_frames=frames, size="64x64")
        assert isinstance(accepted, Accepted)
        assert _hosts_shape(accepted)[2] == accepted.frames


@pytest.mark.parametrize(
    "changed", [{"num_frames": 95}, {"num_frames": 361}, {"width": 31}, {"width": 512, "height": 64}]
)
def test_what_the_rules_refuse_the_host_refuses_too(changed: dict[str, int]) -> None:
    accepted = _accepted()
    assert isinstance(accepted, Accepted)
    with pytest.raises(OmniClientError):
        _hosts_shape(accepted, **changed)


def test_ratios_and_their_canvases_are_the_hosts() -> None:
    assert preprocessing.MINIMAX_H3_SUPPORTED_ASPECT_RATIOS == RATIOS
    for ratio in (*RATIOS.values(), *(step / 40 for step in range(16, 101))):
        height, width = preprocessing.resolve_minimax_h3_output_canvas(ratio, 768)
        assert canvas(ratio) == (width, height), ratio


def test_every_field_arrives_under_a_name_that_the_host_has() -> None:
    accepted = Accepted(
        "a kite",
        "fl2va",
        768,
        448,
        124,
        8,
        5,
        outputs=2,
        flow_shift=7.0,
        audio_flow_shift=3.0,
        frame_indices=(0, -1),
        quality="high",
        lora=Lora("turbo", "/loras/turbo", 0.5),
        user="me",
        start_time_seconds=1.0,
        return_stage_metrics=True,
    )
    fields = request_fields(accepted, output=1)
    assert fields.keys() <= VideoGenerationRequest.model_fields.keys()
    request = generation_request(accepted, output=1)
    assert (request.seed, request.num_outputs_per_prompt, request.num_inference_steps) == (6, 1, 9 if OLD else 8)
    pinned = replace(accepted, steps_pinned=True, lora=Lora("turbo", "/loras/turbo", 0.5, 77))
    assert generation_request(pinned).num_inference_steps == 8, "0.28 counts a pinned schedule by its intervals too"
    assert parse_lora_request(generation_request(pinned).lora)[0].lora_int_id == 77
    in_the_worker = {} if OLD else {"preencode_mp4": True}
    assert request.extra_params == {
        "task": "fl2va",
        "audio_flow_shift": 3.0,
        "frame_indices": [0, -1],
        **in_the_worker,
    }
    assert request.lora == {"name": "turbo", "path": "/loras/turbo", "scale": 0.5}
    # What was not given must not look as if it were: the host asks for `model_fields_set`.
    assert not {"fps", "seconds", "guidance_scale", "negative_prompt"} & request.model_fields_set


def test_every_field_of_the_hosts_form_is_known() -> None:
    from vllm_h3_plugin.host.video_request import _is_028

    if _is_028():
        from vllm_omni.entrypoints.openai.api_server import _parse_video_form
    else:
        from vllm_omni.entrypoints.openai.video.generation.helpers import _parse_video_form
    names = [name for name in inspect.signature(_parse_video_form).parameters if name != "raw_request"]
    assert len(names) > 30
    _, faults = read([(name, "x") for name in names])
    assert [fault.field for fault in faults if fault.code == "unknown_parameter"] == []


def test_references_arrive_as_the_host_keeps_them(tmp_path: Path) -> None:
    def media(*kinds: str) -> Media:
        return Media(
            tuple(
                Loaded(ReferenceFacts("x", kind, 1, "png"), Image.new("RGB", (256, 256)))  # type: ignore[arg-type]
                if kind == "image"
                else Loaded(ReferenceFacts("x", kind, 1, "mp4"), path=tmp_path / f"{n}.mp4")  # type: ignore[arg-type]
                for n, kind in enumerate(kinds)
            )
        )

    assert host_references(Media()) == {"reference_image": None, "reference_video": None, "reference_audio": None}
    one = host_references(media("image", "audio"))
    assert one["reference_image"].data.size == (256, 256) and one["reference_audio"].path == str(tmp_path / "1.mp4")
    many = host_references(media("image", "image", "video", "audio", "audio"))
    assert len(many["reference_image"].data) == 2 and many["reference_video"].data == [str(tmp_path / "2.mp4")]
    assert len(many["reference_audio"].path) == 2


def test_a_server_accepts_what_its_worker_can_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H3_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("H3_MAX_PIXELS", str(768 * 448))
    (tmp_path / "worker-0.json").write_text('{"rank": 0, "supported_tasks": ["ref2va"]}')
    limits = server_limits("MiniMax-H3", outputs=2)
    assert (limits.tasks, limits.model, limits.outputs, limits.max_pixels) == (("ref2va",), "MiniMax-H3", 2, 768 * 448)
    assert limits.misfit is not None and ("preencode_mp4" in limits.extra) is not OLD


def test_the_budget_refuses_what_can_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_h3_plugin.host import admission, video_request

    class Model:
        """Needs a byte for each pixel of the clip."""

        def forecast(self, asked: Any) -> dict[str, int]:
            return {"denoise": asked.size.pixels}

        def what_fits(self, asked: Any, room: int) -> str:
            return f"something of {room} bytes fits"

    guard = {"active": True, "floor_bytes": 1000, "hard_floor_bytes": 500, "retry_after_s": 30, "unified": True}
    guard |= {"checkpoint": "x", "task": None, "quantized": True, "streaming": True, "tables": False}
    guard |= {"vision_fp32": False, "total_bytes": 1000 + 5000 + 64 * 64 * 130}
    monkeypatch.setattr(admission, "read_guards", lambda: [guard])
    monkeypatch.setattr(admission, "model_of", lambda *facts: Model())
    monkeypatch.setattr(
        video_request.run_state, "read_workers", lambda: [{"rank": 0, "memory": {"parts": {"dit": 5000}}}]
    )
    fits = video_request.budget()
    made = _accepted(size="64x64", num_frames=124)
    assert isinstance(made, Accepted) and fits(made) is None
    made = _accepted(size="64x64", num_frames=209)
    assert isinstance(made, Accepted)
    misfit = fits(made)
    assert misfit is not None and misfit.frames == 124 and "fits" in misfit.fits


def test_attention_in_few_bits_refuses_what_it_was_not_measured_on_before_anything_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("H3_RUN_DIR", str(tmp_path))

    def verdict(**fields: Any) -> Any:
        ask, faults = read([("prompt", "a kite"), *fields.items()])
        return check(ask, server_limits(None), (), faults)

    (tmp_path / "worker-0.json").write_text('{"rank": 0, "most_tokens": null}')
    assert isinstance(verdict(size="1344x768", seconds=15), Accepted), "exact attention has no largest size"
    (tmp_path / "worker-0.json").write_text('{"rank": 0, "most_tokens": 38000}')
    assert isinstance(verdict(size="768x448", seconds=15), Accepted)
    (fault,) = verdict(size="1344x768", seconds=8)
    assert (fault.field, fault.code) == ("seconds", "invalid_value") and "38000 at most" in fault.why
    assert fault.allowed == "1344x768 with up to 107 frames (4.5 s)"
    nearest = verdict(size="1344x768", seconds=fault.nearest)
    assert isinstance(nearest, Accepted) and nearest.frames == 107
    (fault,) = verdict(size="1920x1088", seconds=4)
    assert (fault.field, fault.nearest) == ("size", None) and fault.allowed.startswith("768x448 with up to 362 frames")


def _body(request: Any) -> list[Any]:
    import anyio

    from vllm_h3_plugin.host.video_body import body_fields

    async def run() -> list[Any]:
        async with body_fields(request) as fields:
            return [(name, value.file.read() if hasattr(value, "file") else value) for name, value in fields]

    return anyio.run(run)


def _request(body: bytes, kind: str, *, length: str | None = None, parts: int = 1) -> Any:
    from starlette.requests import Request

    stream = io.BytesIO(body)
    size = -(-len(body) // parts)
    sent = 0

    async def receive() -> dict[str, Any]:
        nonlocal sent
        sent += 1
        return {"type": "http.request", "body": stream.read(size), "more_body": sent < parts}

    headers = [(b"content-type", kind.encode()), *([] if length is None else [(b"content-length", length.encode())])]
    return Request({"type": "http", "method": "POST", "headers": headers, "path": "/v1/videos"}, receive)


def test_forms_and_json_become_the_same_fields() -> None:
    form = (
        b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na kite\r\n'
        b'--x\r\nContent-Disposition: form-data; name="input_reference"; filename="a.png"\r\n'
        b"Content-Type: image/png\r\n\r\nPNG\r\n--x--\r\n"
    )
    assert _body(_request(form, "multipart/form-data; boundary=x", parts=3)) == [
        ("prompt", "a kite"),
        ("input_reference", b"PNG"),
    ]
    assert _body(_request(b"prompt=a+kite&seed=5", "application/x-www-form-urlencoded")) == [
        ("prompt", "a kite"),
        ("seed", "5"),
    ]
    assert _body(_request(b'{"prompt": "a kite", "seed": 5}', "application/json")) == [
        ("prompt", "a kite"),
        ("seed", 5),
    ]


@pytest.mark.parametrize(
    ("body", "kind", "length", "said"),
    [
        (b"{", "application/json", None, "no valid JSON"),
        (b"[" * 100_000, "application/json", None, "no valid JSON"),
        (b"[1]", "application/json", None, "no JSON object"),
        (b"\xff", "application/json; charset=utf-8", None, "no valid JSON"),
        (b"hello", "text/plain", None, "neither a form nor JSON"),
        (b"hello", "", None, "neither a form nor JSON"),
        (b"hello", "multipart/form-data", None, "form cannot be read"),
        (b"hello", "multipart/form-data; boundary=x", None, "form cannot be read"),
        (b"{}", "application/json", "99999999999999999999", "too large"),
        (b"prompt=x", "application/x-www-form-urlencoded", "1000000000", "too large"),
    ],
)
def test_a_body_without_fields_is_a_fault(body: bytes, kind: str, length: str | None, said: str) -> None:
    from vllm_h3_plugin.host.video_body import BadBody

    with pytest.raises(BadBody, match=said):
        _body(_request(body, kind, length=length))


def test_a_body_of_unknown_length_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_h3_plugin.host import video_body

    monkeypatch.setattr(video_body, "MAX_TEXT_BYTES", 1000)
    with pytest.raises(video_body.BadBody, match="too large"):
        _body(_request(b'{"prompt": "' + b"x" * 2000 + b'"}', "application/json", parts=5))


def test_no_shift_starts_above_pure_noise() -> None:
    """The host's own rounding takes one shift in a hundred above 1, and then its scheduler raises in the worker."""

    def first(shift: float) -> float:
        return float(time_request.minimax_h3_time_shift_sigmas(num_steps=1, shift_scale=shift)[0])

    moved = [shift for shift in SHIFTS if usable_shift(shift) != shift]
    assert moved == [shift for shift in SHIFTS if first(shift) > 1] and 4.03 in moved
    assert all(first(usable_shift(shift)) <= 1 for shift in moved)
    assert all(0 < abs(shift - usable_shift(shift)) < 1e-6 * max(1, shift) for shift in moved)
    accepted = Accepted("p", "t2va", 64, 64, 107, 1, 1, flow_shift=4.03, audio_flow_shift=1.32)
    fields = request_fields(accepted)
    assert fields["flow_shift"] == usable_shift(4.03)
    assert fields["extra_params"]["audio_flow_shift"] == usable_shift(1.32)
