# SPDX-License-Identifier: Apache-2.0
"""The API server's half of the memory guard: a request that does not fit gets 503 before anything is queued.

An ASGI middleware that the endpoint plugin adds to the app. Both hosts attach endpoint plugins before they add their
own middleware (0.30: vllm/entrypoints/launchers/app.py:51-54; 0.28: vllm/entrypoints/openai/api_server.py:271-290), and
what is added first is innermost: authentication stands in front of this, so a caller without a key gets 401 as ever.

What the workers know (is the guard on, what is resident, what can be reused) comes through their files in
``H3_RUN_DIR``; the model's shapes come from the checkpoint's headers. Without a run folder requests pass untouched.
"""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.logger import init_logger

from vllm_h3_plugin import settings
from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.errors import BusyError, H3Error
from vllm_h3_plugin.host import run_state
from vllm_h3_plugin.host.asked import Asked, Model, read, table_room
from vllm_h3_plugin.host.video_body import BadBody, bounded
from vllm_h3_plugin.memory.guard import Refuse, Thresholds, decide
from vllm_h3_plugin.memory.system import AVAILABLE_HOOK, mem_available
from vllm_h3_plugin.memory.weights import shapes_of
from vllm_h3_plugin.serving.rules.fault import HTTP_STATUS, error_body

logger = init_logger(__name__)

PATHS = frozenset({"/v1/videos", "/v1/videos/sync", "/v1/chat/completions"})
"""Routes whose POST runs the model. Image routes do too, but end in no clip; the watch in the worker holds for them."""

GUARD_PATTERN = "guard-*.json"
"""What the workers' :class:`~vllm_h3_plugin.host.memory_watch.MemoryWatch` leave in ``H3_RUN_DIR``."""

FACTS = ("checkpoint", "task", "quantized", "streaming", "unified", "tables", "vision_fp32")
"""Of them, what :func:`model_of` is given, in its order."""

_SPOOL_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 20


@dataclass
class Refusals:
    """What this API server refused since it started."""

    count: int = 0
    reason: str | None = None
    time: float = 0.0


REFUSALS = Refusals()


class Admission:
    """The middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 503. The handler behind gets the body whole."""
        if scope["type"] != "http" or scope["method"] != "POST" or _path(scope) not in PATHS:
            return await self.app(scope, receive, send)
        guards = [guard for guard in read_guards() if guard["active"]]
        if not guards:
            return await self.app(scope, receive, send)
        try:
            within = bounded(Request(scope, receive))
        except BadBody as exc:
            return await refused(exc)(scope, receive, send)
        with Body(within) as body:
            try:
                asked = await read_request(Request(scope, body.receive))
            except BadBody as exc:
                return await refused(exc)(scope, receive, send)
            error = await run_in_threadpool(refusal, asked, guards) if asked is not None else None
            if error is None:
                return await self.app(scope, body.replay(), send)
        REFUSALS.count += 1
        REFUSALS.reason, REFUSALS.time = str(error), time.time()
        logger.warning("%s %s answered with 503: %s", scope["method"], _path(scope), error)
        return await answer(error)(scope, receive, send)


class Body:
    """A request's body, kept while it is read so that it can be read again. Large ones go to a temporary file."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._file = tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES)  # noqa: SIM115  # closed by __exit__
        self._complete = False
        self._other: list[Message] = []

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    async def receive(self) -> Message:
        """The next message from the client, kept."""
        message = await self._receive()
        if message["type"] == "http.request":
            self._file.write(message.get("body", b""))
            self._complete = not message.get("more_body", False)
        else:
            self._other.append(message)
        return message

    def replay(self) -> Receive:
        """All of it again, then whatever still comes from the client."""
        self._file.seek(0)
        told = False

        async def receive() -> Message:
            nonlocal told
            chunk = b"" if told else self._file.read(_CHUNK_BYTES)
            if chunk or (self._complete and not told):
                told = len(chunk) < _CHUNK_BYTES
                return {"type": "http.request", "body": chunk, "more_body": not (told and self._complete)}
            told = True
            return self._other.pop(0) if self._other else await self._receive()

        return receive


async def read_request(request: Request) -> Asked | None:
    """What a request asks for, from multipart, urlencoded or JSON; None if it cannot be read: the host will say why."""
    fields: dict[str, Any] = {}
    files: dict[str, list[str]] = {}
    try:
        if request.headers.get("content-type", "").startswith("application/json"):
            fields = json.loads(await request.body())
            return read(fields, files) if isinstance(fields, dict) else None
        async with request.form() as form:
            for name, value in form.multi_items():
                if isinstance(value, UploadFile):
                    files.setdefault(name, []).append(value.content_type or "")
                else:
                    fields[name] = value
    except (ValueError, LookupError, RecursionError, HTTPException, ClientDisconnect, MultiPartException) as exc:
        logger.debug("a request could not be read for its size: %s", exc)
        return None
    return read(fields, files)


def read_guards() -> list[dict[str, Any]]:
    """What every worker's watch last wrote, by rank."""
    folder = run_state.run_dir()
    if folder is None:
        return []
    return [guard for path in sorted(folder.glob(GUARD_PATTERN)) if (guard := run_state.read(path.name)) is not None]


def refusal(asked: Asked, guards: list[dict[str, Any]]) -> BusyError | None:
    """Why a request may not run now; None if it may. Every worker must have room for it."""
    for guard in guards:
        model = model_of(*(guard[name] for name in FACTS))
        if model is None:
            return None
        thresholds = Thresholds(guard["floor_bytes"], guard["hard_floor_bytes"], guard["retry_after_s"])
        room = available(guard) + guard["reusable_bytes"]
        fits = functools.partial(model.what_fits, asked)
        verdict = decide(room, model.forecast(asked), thresholds, fits=fits, total=guard["total_bytes"])
        if isinstance(verdict, Refuse):
            return verdict.error()
    return None


def available(guard: Mapping[str, Any]) -> int:
    """Bytes that can be taken now: read here where memory is the machine's, else as the worker last saw its device."""
    if not guard["unified"]:
        return int(guard["available_bytes"])
    folder = run_state.run_dir()
    return mem_available(folder / AVAILABLE_HOOK if guard["reference"] and folder is not None else None)


@functools.cache
def model_of(
    checkpoint: str,
    task: str | None,
    quantized: bool,
    streaming: bool,
    unified: bool,
    tables: bool,
    vision_fp32: bool,
) -> Model | None:
    """The model that the workers serve; None, said once, if its headers can no longer be read."""
    try:
        shapes = shapes_of(take_inventory(Path(checkpoint), task))
    except H3Error as exc:
        logger.error("requests are not held against the memory any more: %s", exc)
        return None
    room = table_room(shapes, settings.load()) if tables else None
    return Model(shapes, quantized, streaming, unified, room, vision_fp32)


def refused(error: BadBody) -> JSONResponse:
    """The answer to a body that is too large: it is read here first, and must fill neither memory nor disk."""
    return JSONResponse(error_body([error.fault]), HTTP_STATUS)


def answer(error: BusyError) -> JSONResponse:
    """The refusal in the shape of OpenAI's errors, with its numbers beside the message."""
    retry = error.details.get("retry_after_s")
    return JSONResponse(
        {"error": {"message": str(error), "type": "insufficient_memory", "code": error.http_status, **error.details}},
        status_code=error.http_status,
        headers={} if retry is None else {"Retry-After": str(retry)},
    )


def describe() -> dict[str, Any] | None:
    """The guard as ``/v1/h3/info`` shows it; None before a worker has said anything."""
    guards = read_guards()
    if not guards:
        return None
    reasons = [(guard["last_reason_time"], guard["last_reason"]) for guard in guards]
    first = guards[0]
    return {
        "mode": first["mode"],
        "active": first["active"],
        "available_bytes": min(available(guard) for guard in guards),
        "floor_bytes": first["floor_bytes"],
        "hard_floor_bytes": first["hard_floor_bytes"],
        "refused": REFUSALS.count + max(guard["refused"] for guard in guards),
        "cancelled": max(guard["cancelled"] for guard in guards),
        "last_reason": max([*reasons, (REFUSALS.time, REFUSALS.reason)], key=lambda reason: reason[0])[1],
    }


def _path(scope: Scope) -> str:
    path = str(scope["path"])
    return path.removeprefix(str(scope.get("root_path", "")))
