# SPDX-License-Identifier: Apache-2.0
"""The video API, answered from jobs. Its routes are the host's, which come after them and are never reached."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, Query
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse

from vllm_h3_plugin.errors import H3Error, UsageError
from vllm_h3_plugin.host import in_flight
from vllm_h3_plugin.host.video_accept import KEY_HEADER, KEY_LIMITS, QUEUE_HEADER, QUEUE_LIMITS, Accept
from vllm_h3_plugin.serving.jobs import openapi
from vllm_h3_plugin.serving.jobs.job import Job, Status
from vllm_h3_plugin.serving.jobs.service import JobService

_CLIENT_CLOSED = 499
_KEY = "A repeat with the same key and the same body gets the same job; a client that leaves does not stop it."
_QUEUE = "Refuse this request with 429 if it would wait behind more; 0: make it now or not at all."
_DOWNLOAD = {
    "Range": "`bytes=START-END`: a part of the clip.",
    "If-Range": "The ETag of the clip that the part belongs to; another clip is sent whole.",
    "If-None-Match": "The ETag that the client has.",
}


def video_router(service: Callable[[], JobService], accept: Accept, body: Mapping[str, Any]) -> APIRouter:
    """The routes.

    Args:
        service: the jobs, once the server has started.
        accept: reads a request.
        body: OpenAPI's ``requestBody`` of one.
    """
    router = APIRouter(tags=["video"])
    headers = [openapi.header(KEY_HEADER, _KEY, **KEY_LIMITS), openapi.header(QUEUE_HEADER, _QUEUE, **QUEUE_LIMITS)]
    described = {"requestBody": dict(body), "parameters": headers}
    refusals = openapi.errors(400, 422, 429, 503)

    @router.post(
        "/v1/videos",
        summary="Ask for a clip; answers at once with its job",
        openapi_extra=described,
        responses={200: openapi.job_response(), **refusals},
    )
    async def create(request: Request) -> Response:
        job = await _submitted(service(), accept, request, sync=False)
        return job if isinstance(job, Response) else JSONResponse(service().view.shown(job))

    @router.post(
        "/v1/videos/sync",
        summary="Ask for a clip and get it as the answer",
        openapi_extra=described,
        response_class=Response,
        responses={200: openapi.clip_response(), **refusals, **openapi.errors(409)},
    )
    async def create_sync(request: Request) -> Response:
        job = await _submitted(service(), accept, request, sync=True)
        return job if isinstance(job, Response) else await _delivered(service(), request, job)

    @router.get("/v1/videos", summary="List jobs", responses={200: openapi.list_response(), **openapi.errors()})
    async def listing(
        after: str | None = None,
        limit: int | None = Query(None, ge=0, le=100),
        order: Literal["asc", "desc"] = "desc",
        idempotency_key: str | None = None,
    ) -> Response:
        jobs = service()
        if idempotency_key is not None:
            found = await asyncio.to_thread(jobs.kept.store.by_key, idempotency_key)
            page, more = [] if found is None else [found], False
        else:
            page, more = await asyncio.to_thread(
                jobs.kept.store.listed, after=after, limit=limit, newest_first=order == "desc"
            )
        # A list may be long; where a job's time went is told by its own GET.
        shown = [{**jobs.view.shown(job), "ledger": None} for job in page]
        return JSONResponse(
            {
                "object": "list",
                "data": shown,
                "has_more": more,
                "first_id": page[0].id if page else None,
                "last_id": page[-1].id if page else None,
            }
        )

    @router.get(
        "/v1/videos/{video_id}",
        summary="A job: status, phase, percent, seconds left",
        responses={200: openapi.job_response(), **openapi.errors(404)},
    )
    async def retrieve(video_id: str) -> Response:
        job = await service().get(video_id)
        return _unknown(video_id) if job is None else JSONResponse(service().view.shown(job))

    @router.get(
        "/v1/videos/{video_id}/events",
        summary="The same as server-sent events, until the job has ended",
        response_class=Response,
        responses={200: openapi.events_response(), **openapi.errors(404)},
    )
    async def events(video_id: str) -> Response:
        if await service().get(video_id) is None:
            return _unknown(video_id)
        return StreamingResponse(
            _stream(service().view.events(video_id)),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    @router.head("/v1/videos/{video_id}/content", include_in_schema=False)
    @router.get(
        "/v1/videos/{video_id}/content",
        summary="The clip",
        openapi_extra={"parameters": [openapi.header(name, why) for name, why in _DOWNLOAD.items()]},
        response_class=Response,
        responses={
            200: openapi.clip_response(),
            206: openapi.clip_response("The part of it that was asked for"),
            304: {"description": "It is the one that the client has"},
            416: {"description": "It has no such part"},
            **openapi.errors(404, 422),
        },
    )
    async def content(video_id: str, request: Request, variant: str = "video") -> Response:
        job = await service().get(video_id)
        if job is None:
            return _unknown(video_id)
        if variant != "video":
            return problem(400, "invalid_request", f"variant={variant}: this server keeps the video alone")
        if job.failure is not None:
            return problem(422, job.failure.code, f"Job {video_id} failed: {job.failure.message}")
        if job.status is not Status.COMPLETED:
            return problem(404, "not_ready", f"Job {video_id} is {job.status.value}; its clip is not there yet.")
        return _clip(service(), job, request)

    @router.delete(
        "/v1/videos/{video_id}",
        summary="Stop a job if it runs, and remove it and its clip",
        responses={200: openapi.deleted_response(), **openapi.errors(404, 409)},
    )
    async def delete(video_id: str) -> Response:
        try:
            known = await service().delete(video_id)
        except UsageError as exc:
            return refused(exc, 409)
        if not known:
            return _unknown(video_id)
        return JSONResponse({"id": video_id, "object": "video.deleted", "deleted": True})

    @router.post("/invocations", include_in_schema=False)
    async def invocations() -> Response:
        """In the place of the host's, which hands on to its chat, that makes clips, and lies outside of ``/v1``: no key
        guards it (vllm/entrypoints/serve/sagemaker/api_router.py)."""
        return problem(404, "not_found", "This server makes clips at /v1/videos.")

    return router


def forget_shadowed(app: FastAPI) -> None:
    """Take the host's routes out that ours stand before. No request reaches them, but OpenAPI describes the last route
    of a path, and would tell of what the host takes and not of what this server does."""
    ours = {_place(route, method) for route in app.routes if _is_ours(route) for method in _methods(route)}
    app.router.routes[:] = [
        route
        for route in app.router.routes
        if _is_ours(route) or not _methods(route) or not {_place(route, method) for method in _methods(route)} <= ours
    ]


def _is_ours(route: Any) -> bool:
    return getattr(getattr(route, "endpoint", None), "__module__", None) == __name__


def _methods(route: Any) -> frozenset[str]:
    return frozenset(getattr(route, "methods", None) or ())


def _place(route: Any, method: str) -> tuple[str, str]:
    """What decides which route a request finds, whatever its parameters are called."""
    return re.sub(r"\{[^}]*\}", "{}", route.path), method


def problem(status: int, code: str, message: str, headers: dict[str, str] | None = None, **more: Any) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": code, **more}}, status, headers
    )


def refused(error: H3Error, status: int | None = None) -> JSONResponse:
    """An error of this project's as an answer."""
    retry = error.details.get("retry_after_s")
    code = {429: "queue_full", 503: "busy", 400: "invalid_request"}.get(error.http_status, "conflict")
    headers = {} if retry is None else {"Retry-After": str(retry)}
    return problem(status or error.http_status, code, str(error), headers, **error.details)


async def _submitted(jobs: JobService, accept: Accept, request: Request, *, sync: bool) -> Job | Response:
    try:
        accepted = await accept(request)
        if isinstance(accepted, Response):
            return accepted
        order, asked = accepted
    except H3Error as exc:
        return refused(exc)
    try:
        job, _ = await jobs.submit(replace(asked, sync=sync), order)
        in_flight.is_a_job(request.scope)
        return job
    except UsageError as exc:
        return refused(exc, 422)
    except H3Error as exc:
        return refused(exc)


async def _delivered(jobs: JobService, request: Request, job: Job) -> Response:
    """The clip of a synchronous request. Nothing is sent before it is known what is sent."""
    waiting = asyncio.create_task(jobs.wait(job.id))
    leaving = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            # With a key the clip can be found again, so it is made to the end.
            if job.key is None:
                await jobs.cancel(job.id)
            return Response(status_code=_CLIENT_CLOSED)
        ended = waiting.result()
    finally:
        waiting.cancel()
        leaving.cancel()
    if ended is None:
        return problem(409, "cancelled", f"Job {job.id} was deleted.")
    if ended.failure is not None:
        headers = {"X-Request-Id": job.id}
        return problem(ended.failure.http_status, ended.failure.code, ended.failure.message, headers)
    return _clip(
        jobs,
        ended,
        request,
        {
            "X-Request-Id": ended.id,
            "X-Model": ended.model,
            "X-Inference-Time-S": f"{float(ended.ledger.get('run_s') or 0.0):.3f}",
            "X-Stage-Durations": json.dumps(ended.shown.get("stage_durations") or {}, separators=(",", ":")),
            "X-Peak-Memory-MB": f"{float(ended.shown.get('peak_memory_mb') or 0.0):.3f}",
        },
    )


async def _gone(request: Request) -> None:
    """Returns when the client has gone. The body was read before, so nothing else comes."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _clip(jobs: JobService, job: Job, request: Request, headers: dict[str, str] | None = None) -> Response:
    """The file, with what a download needs to go on where it broke off: length, ranges, and a digest as its tag."""
    path, tag = jobs.kept.clips.path(job.id), f'"{job.sha256}"'
    if not path.is_file():
        return problem(404, "clip_gone", f"The clip of job {job.id} is no longer on the disk.")
    if headers is None and tag in _tags(request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers={"ETag": tag})
    return FileResponse(path, media_type="video/mp4", filename=path.name, headers={"ETag": tag, **(headers or {})})


def _tags(header: str) -> set[str]:
    """Those of an ``If-None-Match``; a proxy may have called one weak (RFC 9110, 13.1.2)."""
    return {tag.strip().removeprefix("W/") for tag in header.split(",")}


async def _stream(events: AsyncIterator[dict[str, Any] | None]) -> AsyncIterator[str]:
    async for event in events:
        if event is None:
            yield ": still here\n\n"
            continue
        name = "end" if event["status"] in ("completed", "failed") else "progress"
        yield f"event: {name}\ndata: {json.dumps(event)}\n\n"


async def answer_error(request: Request, error: Exception) -> Response:
    """What a route did not catch: what the server cannot do now, as with records that are locked, is no fault of it."""
    assert isinstance(error, H3Error)
    return refused(error)


def _unknown(video_id: str) -> JSONResponse:
    return problem(404, "not_found", f"There is no job {video_id}.")
