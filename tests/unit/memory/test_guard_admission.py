# SPDX-License-Identifier: Apache-2.0
"""The 503 of the memory guard, in front of a small app that stands in for the host's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_h3_plugin.host.asked import Model
from vllm_h3_plugin.memory.system import AVAILABLE_HOOK, GIB
from vllm_h3_plugin.memory.weights import ModelShapes

pytestmark = pytest.mark.host

FORM = {"prompt": "x", "size": "768x448", "num_frames": "124"}
GUARD = {
    "mode": "on",
    "active": True,
    "unified": True,
    "reference": True,
    "total_bytes": 119 * GIB,
    "available_bytes": 0,
    "reusable_bytes": 0,
    "floor_bytes": 6 * GIB,
    "hard_floor_bytes": 3 * GIB,
    "retry_after_s": 7,
    "refused": 0,
    "cancelled": 0,
    "last_reason": None,
    "last_reason_time": 0.0,
    "checkpoint": "somewhere",
    "task": None,
    "quantized": True,
    "streaming": True,
    "vision_fp32": False,
    "tables": False,
}


class Site:
    """A client of the app and what its handler got."""

    def __init__(self, folder: Path) -> None:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse
        from starlette.testclient import TestClient

        from vllm_h3_plugin.host.admission import Admission

        self.folder = folder
        self.got: list[bytes] = []
        app = Starlette()
        app.add_middleware(Admission)

        async def handler(request: Request) -> PlainTextResponse:
            self.got.append(await request.body())
            return PlainTextResponse("made")

        for path in ("/v1/videos", "/v1/videos/sync", "/v1/chat/completions", "/v1/other"):
            app.add_route(path, handler, methods=["POST"])
        self.http = TestClient(app)

    def set(self, available: int, **guard: Any) -> None:
        (self.folder / AVAILABLE_HOOK).write_text(str(available))
        (self.folder / "guard-0.json").write_text(json.dumps({**GUARD, **guard}))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    from vllm_h3_plugin.host import admission

    monkeypatch.setenv("H3_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(admission, "REFUSALS", admission.Refusals())
    model = Model(ModelShapes(), quantized=True, streaming_decode=True, unified=True)
    monkeypatch.setattr(admission, "model_of", lambda *args: model)
    yield Site(tmp_path)


PICTURES = [("input_references", (f"{n}.png", bytes([n]) * (5 << 20), "image/png")) for n in range(3)]


@pytest.mark.parametrize(
    "body",
    [
        {"data": FORM},
        {"data": FORM, "files": PICTURES},
        {"json": {**FORM, "num_frames": 124}},
        {"content": b""},
        {"content": b"\xff" * (1 << 20), "headers": {"content-type": "multipart/form-data; boundary=b"}},
        {"content": b"[" * 100_000, "headers": {"content-type": "application/json"}},
    ],
    ids=["urlencoded", "multipart", "json", "empty", "malformed", "nested"],
)
def test_admitted_request_reaches_the_handler_byte_for_byte(site: Site, body: dict[str, Any]) -> None:
    site.set(100 * GIB, active=False)
    site.http.post("/v1/videos", **body)
    untouched = site.got.pop()
    site.set(100 * GIB)
    answer = site.http.post("/v1/videos", **body)
    assert answer.status_code == 200
    # A multipart body has a new random boundary each time.
    assert len(site.got[0]) == len(untouched)
    assert "files" in body or site.got[0] == untouched


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=b"])
@pytest.mark.parametrize("told", [True, False])
def test_a_body_without_end_is_refused_before_it_fills_memory_or_disk(
    site: Site, monkeypatch: pytest.MonkeyPatch, kind: str, told: bool
) -> None:
    from vllm_h3_plugin.host import video_body

    for name in ("MAX_TEXT_BYTES", "MAX_BODY_BYTES"):
        monkeypatch.setattr(video_body, name, 10_000)
    site.set(100 * GIB)
    head = b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n'
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        yield head
        for _ in range(1000):
            sent += 1000
            yield b"x" * 1000

    body = head + b"x" * 20_000 if told else chunks()
    answer = site.http.post("/v1/videos", content=body, headers={"content-type": kind})
    assert (answer.status_code, answer.json()["faults"][0]["why"]) == (400, "it is too large")
    assert site.got == []


@pytest.mark.parametrize("path", ["/v1/videos", "/v1/videos/sync", "/v1/chat/completions"])
@pytest.mark.parametrize("kind", ["data", "json", "files"])
def test_refused_request_never_reaches_the_handler(site: Site, path: str, kind: str) -> None:
    site.set(7 * GIB)
    body = {"data": FORM, "files": PICTURES} if kind == "files" else {kind: FORM}
    answer = site.http.post(path, **body)
    assert answer.status_code == 503 and site.got == []
    assert answer.headers["Retry-After"] == "7"
    error = answer.json()["error"]
    assert error["available_bytes"] == 7 * GIB and error["predicted_bytes"] > GIB


def test_refusal_offers_what_would_fit(site: Site) -> None:
    site.set(14 * GIB)
    answer = site.http.post("/v1/videos", data={**FORM, "size": "1344x768", "num_frames": "362"})
    assert "ask for less: " in answer.json()["error"]["message"]
    assert " frames (" in answer.json()["error"]["message"]


def test_memory_that_the_allocator_keeps_can_be_used_again(site: Site) -> None:
    site.set(7 * GIB, reusable_bytes=50 * GIB)
    assert site.http.post("/v1/videos", data=FORM).status_code == 200


def test_request_that_never_fits_is_not_told_to_come_again(site: Site) -> None:
    site.set(100 * GIB)
    answer = site.http.post("/v1/videos", data={**FORM, "size": "100000x100000"})
    assert answer.status_code == 503 and "Retry-After" not in answer.headers


@pytest.mark.parametrize("guard", [{"active": False}, None], ids=["off", "no worker yet"])
def test_everything_passes_while_the_guard_is_off(site: Site, guard: dict[str, Any] | None) -> None:
    if guard is not None:
        site.set(0, **guard)
    assert site.http.post("/v1/videos", data=FORM).status_code == 200


def test_other_routes_are_not_looked_at(site: Site) -> None:
    site.set(0)
    assert site.http.post("/v1/other", data=FORM).status_code == 200


def test_request_that_cannot_be_read_is_left_to_the_handler(site: Site) -> None:
    site.set(0)
    assert site.http.post("/v1/videos", data={**FORM, "size": "abc"}).status_code == 200


def test_a_checkpoint_that_can_no_longer_be_read_refuses_nobody(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_h3_plugin.host import admission

    monkeypatch.setattr(admission, "model_of", lambda *args: None)
    site.set(0)
    assert site.http.post("/v1/videos", data=FORM).status_code == 200


def test_info_counts_refusals_of_api_server_and_worker_and_shows_the_last_reason(site: Site) -> None:
    from vllm_h3_plugin.host import admission

    site.set(7 * GIB, refused=2, cancelled=3, last_reason="older", last_reason_time=1.0)
    assert admission.describe()["last_reason"] == "older"
    message = site.http.post("/v1/videos", data=FORM).json()["error"]["message"]
    assert admission.describe() == {
        "mode": "on",
        "active": True,
        "available_bytes": 7 * GIB,
        "floor_bytes": 6 * GIB,
        "hard_floor_bytes": 3 * GIB,
        "refused": 3,
        "cancelled": 3,
        "last_reason": message,
    }


def test_available_memory_of_a_discrete_device_is_what_its_worker_saw(site: Site) -> None:
    site.set(0, unified=False, available_bytes=100 * GIB)
    assert site.http.post("/v1/videos", data=FORM).status_code == 200
