# SPDX-License-Identifier: Apache-2.0
"""The body of a request for clips into fields: multipart or URL-encoded forms and JSON, within bounds."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.types import Message, Receive

from vllm_h3_plugin.serving.references.limits import ReferenceLimits
from vllm_h3_plugin.serving.rules.conditions import MAX_REFERENCES
from vllm_h3_plugin.serving.rules.fault import Fault
from vllm_h3_plugin.serving.rules.read import Upload

_MIB = 1 << 20
MAX_TEXT_BYTES = ReferenceLimits().most_bytes * 4 // 3 + _MIB
"""Of one text field, or of a JSON body: the largest reference as a ``data:`` URI, and room for the rest."""
MAX_BODY_BYTES = MAX_REFERENCES * ReferenceLimits().most_bytes + MAX_TEXT_BYTES
_MAX_FIELDS = 200


class BadBody(Exception):
    """A body that holds no fields, or headers that it cannot be taken with; carries the fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


@asynccontextmanager
async def body_fields(request: Request) -> AsyncIterator[list[tuple[str, Any]]]:
    """The fields of a request, as :func:`vllm_h3_plugin.serving.rules.read.read` takes them.

    The body is consumed: what else needs it takes these fields. Uploaded files are closed at the end of the block.

    Raises:
        BadBody: it is neither a form nor a JSON object, or too large.
        starlette.requests.ClientDisconnect: the client went away.
    """
    kind = _kind(request)
    request = Request(request.scope, bounded(request))
    if _is_json(kind):
        yield _object(await request.body())
        return
    if kind not in ("multipart/form-data", "application/x-www-form-urlencoded"):
        allowed = "multipart/form-data or application/json"
        raise BadBody(Fault("Content-Type", kind or None, "the body is neither a form nor JSON", allowed))
    try:
        form = await request.form(max_files=MAX_REFERENCES + 1, max_fields=_MAX_FIELDS, max_part_size=MAX_TEXT_BYTES)
    except (MultiPartException, HTTPException) as exc:
        reason = str(getattr(exc, "detail", None) or getattr(exc, "message", exc)).rstrip(".")
        raise BadBody(Fault("body", None, f"the form cannot be read: {reason}")) from exc
    try:
        yield [
            (name, Upload(value.file, value.filename) if isinstance(value, UploadFile) else value)
            for name, value in form.multi_items()
        ]
    finally:
        await form.close()


def bounded(request: Request) -> Receive:
    """The client's messages, up to as many bytes as a request may have.

    Raises:
        BadBody: it says that it has more. The messages raise it too: without a length, the body is counted as it comes.
    """
    most = MAX_TEXT_BYTES if _is_json(_kind(request)) else MAX_BODY_BYTES
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:18]) > most:
        raise _too_large(most)
    return _counted(request.receive, most)


def _kind(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _is_json(kind: str) -> bool:
    return kind == "application/json" or kind.endswith("+json")


def _object(body: bytes) -> list[tuple[str, Any]]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise BadBody(Fault("body", None, f"it is no valid JSON: {str(exc)[:120]}", "a JSON object")) from exc
    if not isinstance(content, dict):
        raise BadBody(Fault("body", None, "it is no JSON object", "a JSON object"))
    return list(content.items())


def _too_large(most: int) -> BadBody:
    return BadBody(Fault("body", None, "it is too large", f"up to {most // _MIB} MiB"))


def _counted(receive: Receive, most: int) -> Receive:
    """The client's messages, up to a number of bytes."""
    read = 0

    async def counted() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > most:
            raise _too_large(most)
        return message

    return counted
