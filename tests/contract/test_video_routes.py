# SPDX-License-Identifier: Apache-2.0
"""The video API over the host's own form parser and router, with a handler that is made up."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

CLIP = bytes(range(256)) * 40
FORM = {"prompt": "a red kite", "size": "64x64", "aspect_ratio": "1:1", "num_frames": "96", "seed": "1"}
KEY = "a-key"


class Handler:
    """The part of the host's ``OmniOpenAIServingVideo`` that parsing and making need."""

    model_name = "h3"
    stage_configs: list[Any] = []  # noqa: RUF012
    supports_mixed_reference_inputs = True
    supports_latent_mask_editing = False
    supported_control_upload_types: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.made: list[str] = []
        self.error: Exception | None = None
        self.video: Any = CLIP
        self.gate = asyncio.Event()
        self.gate.set()

    def set_stage_configs_if_missing(self, stage_configs: Any) -> None:
        """Nothing."""

    async def _run_and_extract(self, request: Any, reference_id: str, **references: Any) -> Any:
        """A clip that the worker has encoded, once the gate is open."""
        self.made.append(reference_id)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return SimpleNamespace(
            videos=[self.video],
            audios=[None],
            actions=[None],
            audio_sample_rate=32000,
            output_fps=24,
            stage_durations={"denoise": 1.5},
            peak_memory_mb=12.0,
            metrics=None,
        )


@asynccontextmanager
async def video_app(folder: Path, key: str | None = None) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient, Handler]]:
    """The app as the host builds it: the plugin's routes, the host's after them, authentication last."""
    from vllm_omni.entrypoints.openai import api_server

    from vllm_h3_plugin.host.endpoints import H3Endpoints

    app = FastAPI()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_OMNI_SERVER_STORAGE__PATH", str(folder))
        H3Endpoints().attach_router(app)
        app.include_router(api_server.router)
        if key is not None:
            app.add_middleware(authentication(), tokens=[key])
        app.state.openai_serving_video = handler = Handler()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://h3") as client,
        ):
            yield app, client, handler


def authentication() -> Any:
    """The host's own middleware, from where each version has it."""
    try:
        from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
    except ImportError:
        from vllm.entrypoints.serve.utils.server_utils import AuthenticationMiddleware
    return AuthenticationMiddleware


async def ended(client: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    """The job once it has ended."""
    for _ in range(500):
        job = (await client.get(f"/v1/videos/{job_id}")).json()
        if job["status"] in ("completed", "failed"):
            return job
        await asyncio.sleep(0.01)
    raise AssertionError(f"the job did not end: {job}")


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


@pytest.fixture(autouse=True)
def _no_run_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("H3_RUN_DIR", raising=False)


def test_create_poll_download_in_ranges_and_delete(tmp_path: Path) -> None:
    async def test() -> None:
        async with video_app(tmp_path) as (_, client, _):
            created = await client.post("/v1/videos", data=FORM)
            assert created.status_code == 200, created.text
            job = await ended(client, created.json()["id"])
            assert (job["object"], job["progress"], job["size"], job["seed"]) == ("video", 100, "64x64", 1)
            assert (job["num_frames"], job["snapped"][0]["field"]) == (107, "num_frames")
            assert (job["stage_durations"], job["peak_memory_mb"]) == ({"denoise": 1.5}, 12.0)
            content = f"/v1/videos/{job['id']}/content"
            whole = await client.get(content)
            assert (whole.content, whole.headers["content-type"]) == (CLIP, "video/mp4")
            assert whole.headers["accept-ranges"] == "bytes"
            tag = whole.headers["etag"]
            assert tag == f'"{job["sha256"]}"'
            part = await client.get(content, headers={"Range": "bytes=100-", "If-Range": tag})
            assert (part.status_code, part.content) == (206, CLIP[100:])
            other = await client.get(content, headers={"Range": "bytes=100-", "If-Range": '"another"'})
            assert (other.status_code, other.content) == (200, CLIP)
            assert (await client.get(content, headers={"Range": "bytes=99999-"})).status_code == 416
            for known in (tag, f'"another", {tag}', f"W/{tag}"):
                assert (await client.get(content, headers={"If-None-Match": known})).status_code == 304
            assert (await client.get(content, headers={"If-None-Match": '"another"'})).status_code == 200
            head = await client.head(content)
            assert (head.headers["content-length"], head.content) == (str(len(CLIP)), b"")
            assert (await client.get(content, params={"variant": "thumbnail"})).status_code == 400
            gone = await client.delete(f"/v1/videos/{job['id']}")
            assert gone.json() == {"id": job["id"], "object": "video.deleted", "deleted": True}
            for method, path in (("GET", f"/v1/videos/{job['id']}"), ("GET", content), ("DELETE", content[:-8])):
                answer = await client.request(method, path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")

    run(test)


def test_a_failed_job_is_an_answer_and_no_error_of_its_get(tmp_path: Path) -> None:
    async def test() -> None:
        async with video_app(tmp_path) as (_, client, handler):
            handler.error = ValueError("the worker said no")
            created = await client.post("/v1/videos", data=FORM)
            job = await ended(client, created.json()["id"])
            assert job["error"] == {"code": "generation_failed", "message": "the worker said no"}
            assert (await client.get(f"/v1/videos/{job['id']}/content")).status_code == 422

    run(test)


def test_list_goes_in_pages_and_finds_a_key(tmp_path: Path) -> None:
    async def test() -> None:
        async with video_app(tmp_path) as (_, client, _):
            ids = []
            for number in range(3):
                headers = {"Idempotency-Key": f"key {number}"}
                created = await client.post("/v1/videos", data=FORM, headers=headers)
                ids.append((await ended(client, created.json()["id"]))["id"])
            first = (await client.get("/v1/videos", params={"limit": 2})).json()
            assert ([job["id"] for job in first["data"]], first["has_more"]) == (ids[:0:-1], True)
            rest = (await client.get("/v1/videos", params={"limit": 2, "after": first["last_id"]})).json()
            assert ([job["id"] for job in rest["data"]], rest["has_more"]) == (ids[:1], False)
            assert [
                job["id"] for job in (await client.get("/v1/videos", params={"order": "asc"})).json()["data"]
            ] == ids
            found = (await client.get("/v1/videos", params={"idempotency_key": "key 1"})).json()["data"]
            assert [job["id"] for job in found] == [ids[1]]
            assert (await client.get("/v1/videos", params={"idempotency_key": "no"})).json()["data"] == []

    run(test)


def test_a_key_joins_equal_requests_only(tmp_path: Path) -> None:
    async def test() -> None:
        async with video_app(tmp_path) as (_, client, handler):
            key = {"Idempotency-Key": "k"}
            first = (await client.post("/v1/videos", data=FORM, headers=key)).json()
            again = await client.post("/v1/videos/sync", data=FORM, headers=key)
            assert (again.content, again.headers["x-request-id"]) == (CLIP, first["id"])
            assert handler.made == [first["id"]]
            for changed in ({**FORM, "seed": "2"}, {**FORM, "prompt": "a blue kite"}):
                answer = await client.post("/v1/videos", headers=key, data=changed)
                assert answer.status_code == 422
                assert "was used for another request" in answer.json()["error"]["message"]
            long = await client.post("/v1/videos", data=FORM, headers={"Idempotency-Key": "k" * 256})
            assert (long.status_code, "1 to 255 printable" in long.json()["faults"][0]["allowed"]) == (400, True)

    run(test)


def test_sync_answers_with_the_clip_or_with_the_reason(tmp_path: Path) -> None:
    async def test() -> None:
        async with video_app(tmp_path) as (_, client, handler):
            answer = await client.post("/v1/videos/sync", data=FORM)
            assert (answer.status_code, answer.content) == (200, CLIP)
            assert json.loads(answer.headers["x-stage-durations"]) == {"denoise": 1.5}
            assert {"x-model", "x-inference-time-s", "x-peak-memory-mb"} <= set(answer.headers)
            from fastapi import HTTPException

            handler.error = HTTPException(400, "no such shift")
            answer = await client.post("/v1/videos/sync", data=FORM)
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no such shift")

    run(test)


@pytest.mark.parametrize(("key", "status"), [(None, "failed"), (b"mine", "in_progress")])
def test_a_client_that_leaves_cancels_what_only_it_could_get(tmp_path: Path, key: bytes | None, status: str) -> None:
    async def test() -> None:
        async with video_app(tmp_path) as (app, client, handler):
            handler.gate.clear()
            body = b"&".join(f"{name}={value}".encode() for name, value in FORM.items())
            headers = [(b"content-type", b"application/x-www-form-urlencoded"), (b"content-length", b"%d" % len(body))]
            messages = [{"type": "http.request", "body": body, "more_body": False}]
            sent: list[Any] = []

            async def receive() -> Any:
                if messages:
                    return messages.pop(0)
                while not handler.made:
                    await asyncio.sleep(0.01)
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                sent.append(message)

            scope = {
                "type": "http", "method": "POST", "path": "/v1/videos/sync", "raw_path": b"/v1/videos/sync",
                "query_string": b"", "root_path": "", "scheme": "http", "server": ("h3", 80), "client": ("c", 1),
                "http_version": "1.1", "asgi": {"version": "3.0"},
                "headers": headers + ([(b"idempotency-key", key)] if key else []),
            }  # fmt: skip
            await app(scope, receive, send)
            assert [message.get("status") for message in sent if message["type"].endswith("start")] == [499]
            for _ in range(100):
                job = (await client.get("/v1/videos")).json()["data"][0]
                if job["status"] == status:
                    break
                await asyncio.sleep(0.01)
            assert job["status"] == status
            handler.gate.set()

    run(test)


def test_a_full_line_is_429_with_when_to_ask_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H3_MAX_QUEUE", "1")

    async def test() -> None:
        async with video_app(tmp_path) as (_, client, handler):
            assert (await client.get("/ready")).status_code == 200
            handler.gate.clear()
            await client.post("/v1/videos", data=FORM)
            while not handler.made:
                await asyncio.sleep(0.01)
            waiting = (await client.post("/v1/videos", data=FORM)).json()
            assert (waiting["phase"], waiting["queue_position"]) == ("queued", 1)
            refused = await client.post("/v1/videos", data=FORM)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) == refused.json()["error"]["retry_after_s"]
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()["reason"]) == (503, "as many clips wait as may")
            handler.gate.set()
            await ended(client, waiting["id"])
            assert (await client.get("/ready")).json() == {
                "ready": True, "reason": None, "queue": {"length": 0, "max": 1, "running": None},
            }  # fmt: skip

    run(test)


def test_records_that_cannot_be_used_are_503_at_every_route(tmp_path: Path) -> None:
    async def test() -> None:
        async with video_app(tmp_path) as (_, client, _):
            job = await ended(client, (await client.post("/v1/videos", data=FORM)).json()["id"])
            other = sqlite3.connect(tmp_path / "h3" / "jobs.sqlite", isolation_level=None)
            other.execute("DROP TABLE jobs")
            one = f"/v1/videos/{job['id']}"
            for method, path in (
                ("POST", "/v1/videos"), ("POST", "/v1/videos/sync"), ("GET", "/v1/videos"), ("GET", one),
                ("GET", f"{one}/content"), ("GET", f"{one}/events"), ("DELETE", one),
            ):  # fmt: skip
                answer = await client.request(method, path, data=FORM if method == "POST" else None)
                assert answer.status_code == 503, (method, path, answer.text)
                assert int(answer.headers["retry-after"]) > 0
                assert "jobs.sqlite" in answer.json()["error"]["message"]
            other.close()

    run(test)


def test_bad_forms_are_refused_before_there_is_a_job(tmp_path: Path) -> None:
    async def test() -> None:
        async with video_app(tmp_path) as (_, client, _):
            for form, field in (
                ({}, "Content-Type"),
                ({**FORM, "size": "abc"}, "size"),
                ({**FORM, "fps": "25"}, "fps"),
            ):
                for path in ("/v1/videos", "/v1/videos/sync"):
                    answer = await client.post(path, data=form)
                    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
            assert (await client.get("/v1/videos")).json()["data"] == []

    run(test)


def test_without_the_key_every_path_that_makes_lists_or_returns_clips_is_401(tmp_path: Path) -> None:
    async def test() -> None:
        async with video_app(tmp_path, KEY) as (app, client, handler):
            paths = [
                (method, path)
                for route in _routes(app)
                for path in [route.path.replace("{video_id}", "video_gen_1")]
                if "video" in path or path.startswith(("/v1/h3", "/v1/chat"))
                for method in route.methods or ()
            ]
            wanted = {
                ("POST", "/v1/videos"), ("POST", "/v1/videos/sync"), ("GET", "/v1/videos"),
                ("GET", "/v1/videos/video_gen_1"), ("DELETE", "/v1/videos/video_gen_1"),
                ("GET", "/v1/videos/video_gen_1/content"), ("HEAD", "/v1/videos/video_gen_1/content"),
                ("GET", "/v1/videos/video_gen_1/events"), ("GET", "/v1/h3/info"),
            }  # fmt: skip
            assert wanted <= set(paths)
            for method, path in paths:
                for headers in ({}, {"Authorization": "Bearer wrong"}):
                    answer = await client.request(method, path, headers=headers)
                    assert answer.status_code == 401, (method, path)
            # The host's own lies outside of what a key guards, and leads to its chat.
            assert (await client.post("/invocations", json={"messages": []})).status_code == 404
            assert handler.made == []
            allowed = await client.get("/v1/videos", headers={"Authorization": f"Bearer {KEY}"})
            assert allowed.status_code == 200
            assert (await client.get("/ready")).status_code == 200

    run(test)


def _routes(app: FastAPI) -> list[Any]:
    """All routes with a path, those of included routers too."""
    found: list[Any] = []
    pending = list(app.router.routes)
    while pending:
        route = pending.pop()
        pending.extend(getattr(getattr(route, "original_router", route), "routes", None) or ())
        if getattr(route, "path", None) and hasattr(route, "methods"):
            found.append(route)
    return found


def test_health_is_503_once_the_worker_is_stuck_or_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    from vllm_h3_plugin.host.liveness import HealthRoute, Liveness

    class Dead:
        ended = False

        async def check_health(self) -> None:
            raise EngineDeadError("gone")

        def shutdown(self) -> None:
            self.ended = True

    async def test() -> None:
        ends: list[str] = []
        liveness = Liveness(factor=20, phase_s=60, leave=True, end=lambda: ends.append("end"))
        monkeypatch.setattr("vllm_h3_plugin.host.liveness._LOOK_S", 0.0)
        app = FastAPI()
        app.add_api_route("/health", lambda: {"status": "healthy"})
        app.add_middleware(HealthRoute, liveness=liveness)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://h3") as client:
            assert (await client.get("/health")).status_code == 200
            await liveness.watch(Dead)
            answer = await client.get("/health")
            assert (answer.status_code, "the worker is gone" in answer.json()["reason"]) == (503, True)
            assert ends == ["end"]

        told, engine = Liveness(factor=20, phase_s=60, leave=True, end=lambda: ends.append("again")), Dead()
        watch = asyncio.create_task(told.watch(lambda: engine))
        await asyncio.sleep(0)
        engine.shutdown()
        await watch
        assert (engine.ended, told.fault, ends) == (True, None, ["end"])

        monkeypatch.setenv("H3_RUN_DIR", str(tmp_path))
        state = {"phase": "denoising", "step": 3, "steps": 9, "seconds_per_step": 1.0, "time": 5.0, "busy_since": 1.0}
        (tmp_path / "progress.json").write_text(json.dumps(state))
        now = [0.0]
        told = Liveness(factor=20, phase_s=60, leave=False, clock=lambda: now[0])
        # By the time in it, as after a clock was set, it has stood there for half a century.
        assert await told.look(None) is None
        now[0] = 121.0
        assert (await told.look(None) or "").startswith("step 4 of 9 has not moved for 121 s")
        (tmp_path / "progress.json").write_text(json.dumps({**state, "step": 4}))
        assert await told.look(None) is None

    run(test)
