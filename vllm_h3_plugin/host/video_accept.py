# SPDX-License-Identifier: Apache-2.0
"""From an HTTP request to an order for the runner, or to everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_h3_plugin.errors import HostError
from vllm_h3_plugin.host.video_body import BadBody, body_fields
from vllm_h3_plugin.host.video_order import VideoOrder, host_video_module
from vllm_h3_plugin.host.video_request import generation_request, host_references, server_limits
from vllm_h3_plugin.serving.jobs.made import Asked, Order
from vllm_h3_plugin.serving.references.load import ReferencePolicy, load
from vllm_h3_plugin.serving.references.media import Media
from vllm_h3_plugin.serving.rules.accepted import Accepted
from vllm_h3_plugin.serving.rules.check import check
from vllm_h3_plugin.serving.rules.fault import HTTP_STATUS, Fault, error_body
from vllm_h3_plugin.serving.rules.fault import shown as shown_value
from vllm_h3_plugin.serving.rules.fingerprint import fingerprint
from vllm_h3_plugin.serving.rules.limits import Limits
from vllm_h3_plugin.serving.rules.read import read

KEY_HEADER = "Idempotency-Key"
_KEY_LENGTH = 255
QUEUE_HEADER = "X-H3-Max-Queue"
_LONGEST_QUEUE = 1_000_000
QUEUE_LIMITS = {"type": "integer", "minimum": 0, "maximum": _LONGEST_QUEUE}
KEY_LIMITS = {"minLength": 1, "maxLength": _KEY_LENGTH, "pattern": r"\S"}
"""In the terms of JSON schema."""

Accept = Callable[[Request], Awaitable["tuple[Order, Asked] | Response"]]
"""An order and what its job keeps, from a request; or the answer to one that is refused."""


@dataclass(frozen=True)
class _Read:
    """A request that was read, loaded and checked."""

    accepted: Accepted
    media: Media
    fingerprint: str | None


def accepting(policy: ReferencePolicy) -> Accept:
    """What turns requests into orders.

    Args:
        policy: how references are taken.
    """

    async def accept(request: Request) -> tuple[Order, Asked] | Response:
        handler = getattr(request.app.state, "openai_serving_video", None)
        if handler is None:
            raise HostError("this server makes no clips", why="the host has set up no handler for the video API")
        served, stage_configs = host_video_module()._resolve_video_runtime_context(request)
        handler.set_stage_configs_if_missing(stage_configs)
        model = handler.model_name or served
        try:
            key, most_waiting = idempotency_key(request), queue_limit(request)
            async with body_fields(request) as fields:
                # Pictures are decoded and films probed: not on the event loop.
                found = await run_in_threadpool(_read, fields, policy, server_limits(model), key is not None)
        except BadBody as exc:
            found = [exc.fault]
        if isinstance(found, list):
            return JSONResponse(error_body(found), HTTP_STATUS)
        accepted, media = found.accepted, found.media
        try:
            order = VideoOrder(handler, generation_request(accepted), host_references(media), media.close)
        except BaseException:
            media.close()
            raise
        asked = Asked(model or "unknown", accepted.prompt, shown(accepted), key, found.fingerprint)
        return order, replace(asked, most_waiting=most_waiting)

    return accept


def shown(accepted: Accepted) -> dict[str, Any]:
    """Fields of the job's wire format that are known beforehand."""
    told = accepted.told()
    return {**told, "duration_s": accepted.seconds, "quality": accepted.quality or "default"}


def idempotency_key(request: Request) -> str | None:
    """What the caller named its request; None: nothing.

    Raises:
        BadBody: it cannot be a key.
    """
    key = request.headers.get(KEY_HEADER)
    if key is None or (key.strip() and len(key) <= _KEY_LENGTH and key.isprintable()):
        return key
    allowed = f"1 to {_KEY_LENGTH} printable characters, such as a UUID"
    raise BadBody(Fault(KEY_HEADER, shown_value(key), "it cannot be a key", allowed))


def queue_limit(request: Request) -> int | None:
    """Behind how many the caller would wait at most: 0 means only where nobody waits and nothing runs; None: any.

    Raises:
        BadBody: it is no such number.
    """
    text = request.headers.get(QUEUE_HEADER)
    if text is None:
        return None
    if text.isascii() and text.isdigit() and int(text) <= _LONGEST_QUEUE:
        return int(text)
    allowed = f"a whole number from 0 to {_LONGEST_QUEUE}"
    raise BadBody(Fault(QUEUE_HEADER, shown_value(text), "it is no length of a line", allowed))


def _read(
    fields: list[tuple[str, Any]], policy: ReferencePolicy, limits: Limits, with_fingerprint: bool
) -> _Read | list[Fault]:
    digest = fingerprint(fields) if with_fingerprint else None
    ask, faults = read(fields)
    media, unfit = load(ask.references, policy)
    try:
        found = check(ask, limits, media.facts, [*faults, *unfit])
    except BaseException:
        media.close()
        raise
    if isinstance(found, list):
        media.close()
        return found
    return _Read(found, media, digest)
