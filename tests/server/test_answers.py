# SPDX-License-Identifier: Apache-2.0
"""What a request gets over HTTP where the host alone answers with 500, or with a clip that nobody asked for.

Beside these: clients that leave, cancels, the line and kills are in test_jobs.py, dead workers in
test_jobs_executors.py, a key on every path in tests/contract/test_video_routes.py.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.server.conftest import Running, request
from tests.server.soak import BAD, listed
from vllm_h3_plugin.pins import HostPin

FORM = request(steps=2).form()


def picture(side: int) -> str:
    """A picture as a ``data:`` URI."""
    data = io.BytesIO()
    Image.new("RGB", (side, side), (200, 40, 40)).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


FAULTS: dict[str, dict[str, str]] = {
    **BAD,
    "fps 0": {"fps": "0"},
    "steps 0": {"num_inference_steps": "0"},
    "picture of one pixel": {"image_reference": f'{{"image_url": "{picture(1)}"}}'},
    "picture that is none": {"image_reference": '{"image_url": "data:image/png;base64,bm8gcGljdHVyZQ=="}'},
    "url": {"image_reference": '{"image_url": "http://127.0.0.1/first.png"}'},
    "broken JSON in a field": {"extra_params": '{"duration": '},
}


@pytest.fixture(scope="module")
def http(fp8: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fp8.url, timeout=120) as client:
        yield client


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_made_is_400_at_once_and_no_job(http: httpx.Client, name: str) -> None:
    before = {job["id"] for job in listed(http)}
    for path in ("/v1/videos", "/v1/videos/sync"):
        answer = http.post(path, data={**FORM, **FAULTS[name]})
        assert answer.status_code == 400, answer.text
        error, faults = answer.json()["error"], answer.json()["faults"]
        field = next(iter(FAULTS[name]))
        assert any(fault["field"].startswith(field) for fault in faults), faults
        assert error["param"] == faults[0]["field"] and error["type"] == "invalid_request_error"
        assert all(fault["why"] for fault in faults)
    assert {job["id"] for job in listed(http)} == before


def test_a_body_that_is_no_json_is_400(http: httpx.Client) -> None:
    for body in (b"{", b"[]", b"\xff"):
        answer = http.post("/v1/videos", content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["faults"][0]["field"]) == (400, "body")


def test_every_fault_is_told_in_one_answer_with_the_nearest_value(http: httpx.Client) -> None:
    answer = http.post("/v1/videos", data={**FORM, "size": "16x16", "num_inference_steps": "10000", "fps": "25"})
    told = {fault["field"]: fault["nearest"] for fault in answer.json()["faults"]}
    assert told.pop("num_inference_steps") in (199, 200)
    assert told == {"size": "32x32", "fps": 24}


def test_a_missing_ratio_follows_from_the_size_and_a_snapped_value_is_told(http: httpx.Client) -> None:
    form = {name: value for name, value in FORM.items() if name not in ("aspect_ratio", "seed")}
    job = http.post("/v1/videos", data={**form, "size": "100x70"}).json()
    assert (job["size"], job["num_frames"]) == ("96x64", 107)
    assert {snap["field"]: (snap["asked"], snap["made"]) for snap in job["snapped"]} == {
        "size": ("100x70", "96x64"),
        "num_frames": (96, 107),
    }
    assert job["seed_chosen"] is True and 0 <= job["seed"] < 2**53
    strict = http.post("/v1/videos", data={**form, "size": "100x70", "strict": "true"})
    assert strict.status_code == 400
    assert {fault["field"] for fault in strict.json()["faults"]} == {"size", "num_frames"}
    made = _ended(http, job["id"])
    again = http.post("/v1/videos/sync", data={**form, "size": "96x64", "seed": str(job["seed"])})
    assert again.content == http.get(f"/v1/videos/{made['id']}/content").content


def test_two_clips_are_refused_with_the_number_that_is_delivered(http: httpx.Client) -> None:
    for name in ("n", "num_outputs_per_prompt"):
        (fault,) = http.post("/v1/videos", data={**FORM, name: "2"}).json()["faults"]
        assert (fault["field"], fault["allowed"], fault["nearest"]) == (name, "1", 1)


def test_a_job_that_is_not_there_is_404_everywhere(http: httpx.Client) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content"), ("GET", "/events")):
        answer = http.request(method, f"/v1/videos/video_gen_none{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_one_step_is_made_and_so_are_as_many_as_are_allowed(http: httpx.Client, host_pin: HostPin) -> None:
    answer = http.post("/v1/videos/sync", data={**FORM, "num_inference_steps": "1"})
    assert answer.status_code == 200, answer.text
    # 0.28 is told one step more than it makes, and takes as many as 0.30.
    most = 199 if host_pin.vllm_omni == "0.28.0" else 200
    (fault,) = http.post("/v1/videos", data={**FORM, "num_inference_steps": "201"}).json()["faults"]
    assert fault["nearest"] == most


@pytest.mark.parametrize("shift", ["1.32", "4.03", "0.01"])
def test_a_shift_that_the_host_rounds_above_pure_noise_makes_a_clip(http: httpx.Client, shift: str) -> None:
    answer = http.post("/v1/videos/sync", data={**FORM, "flow_shift": shift, "audio_flow_shift": shift})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "video/mp4"), answer.text


def test_health_is_answered_while_a_clip_is_encoded(http: httpx.Client) -> None:
    """The stock host answers nothing from the first frame that it encodes to the last."""
    form = {**request(steps=2).form(), "size": "1024x576", "num_frames": "124"}
    job = http.post("/v1/videos", data=form).json()
    answers, phase = 0, job["phase"]
    while job["status"] not in ("completed", "failed"):
        assert http.get("/health").status_code == 200
        job = http.get(f"/v1/videos/{job['id']}").json()
        encoding = {phase, job["phase"]} <= {"decoding and encoding", "encoding video"}
        answers, phase = answers + encoding, job["phase"]
    assert job["status"] == "completed" and answers >= 3


def _ended(http: httpx.Client, job_id: str) -> dict[str, Any]:
    with http.stream("GET", f"/v1/videos/{job_id}/events") as answer:
        assert answer.read()
    job: dict[str, Any] = http.get(f"/v1/videos/{job_id}").json()
    assert job["status"] == "completed"
    return job
