# SPDX-License-Identifier: Apache-2.0
"""From a request as the host parses it to an order that the runner makes: the one seam between jobs and the host."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Depends, HTTPException
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.errors import OmniClientError

from vllm_h3_plugin.errors import H3Error
from vllm_h3_plugin.pins import installed_host
from vllm_h3_plugin.serving.jobs.job import Failure
from vllm_h3_plugin.serving.jobs.made import Asked, Made, Order

_REFERENCES = ("reference_image", "reference_video", "reference_audio")
_SHOWN = ("size", "seconds", "quality", "fps", "num_frames", "duration_s")
_CHUNK_BYTES = 1 << 20
_KEY_LENGTH = 255

KEY_HEADER = "Idempotency-Key"

Accept = Callable[..., Awaitable[tuple[Order, Asked]]]
"""A FastAPI dependency: an order and what its job keeps, from a request; raises ``HTTPException`` for a bad one."""


def host_video_module() -> Any:
    """The host's module with the parts of its video routes: 0.30 has moved them out of its api_server."""
    if installed_host().vllm_omni == "0.28.0":
        from vllm_omni.entrypoints.openai import api_server

        return api_server
    from vllm_omni.entrypoints.openai.video.generation import helpers

    return helpers


@dataclass
class VideoOrder:
    """A request that the host's handler can make.

    Attributes:
        handler: the host's ``OmniOpenAIServingVideo``.
        request: its ``VideoGenerationRequest``.
        references: further arguments of ``generate_video_bytes``.
        cleanup: removes the files that references were kept in.
    """

    handler: Any
    request: Any
    references: Mapping[str, Any]
    cleanup: Callable[[], None] = field(default=lambda: None)

    async def make(self, job_id: str) -> Made:
        """Run the model and encode its frames. See :class:`~vllm_h3_plugin.serving.jobs.made.Order`."""
        result = await self.handler.generate_video_bytes(self.request, job_id, **self.references)
        # 0.30 tells what it really made as a fifth value.
        data, stage_durations, peak_memory_mb, action, *rest = result
        metadata = {name: value for name, value in (rest[0] if rest else {}).items() if value is not None}
        return Made(
            data,
            {
                "stage_durations": stage_durations,
                "peak_memory_mb": float(peak_memory_mb),
                "action": None if action is None else action.model_dump(mode="json"),
                **metadata,
            },
        )

    def close(self) -> None:
        """Remove reference files."""
        cleanup, self.cleanup = self.cleanup, lambda: None
        cleanup()


def order_of(parsed: Sequence[Any]) -> tuple[VideoOrder, Asked]:
    """What the host's ``_parse_video_form`` returned, as an order and what a job keeps of it.

    Args:
        parsed: request, handler, model name and three references; on 0.30 also a control upload's path, which is in
            the request as well, and an edit's inputs.
    """
    request, handler, model, *rest = parsed
    host = host_video_module()
    references = dict(zip(_REFERENCES, rest[:3], strict=True))
    more = rest[3:]
    if more:
        references["latent_edit_input"] = more[1]

    def cleanup() -> None:
        host._cleanup_video_references(rest[1], rest[2], *more)

    response = host.video_response_from_request(model, request)
    shown = {**{name: getattr(response, name, None) for name in _SHOWN}, "seed": request.seed}
    return VideoOrder(handler, request, references, cleanup), Asked(model, request.prompt, shown)


def host_form() -> Accept:
    """The dependency that reads a request with the host's own form parser."""
    parse = Depends(host_video_module()._parse_video_form)

    async def accept(request: Request, parsed: Any = parse) -> tuple[VideoOrder, Asked]:
        order, asked = order_of(parsed)
        try:
            key = idempotency_key(request)
            digest = None if key is None else await fingerprint(await request.form())
        except BaseException:
            order.close()
            raise
        return order, replace(asked, key=key, fingerprint=digest)

    return accept


def idempotency_key(request: Request) -> str | None:
    """What the caller named its request; None: nothing.

    Raises:
        HTTPException: 400, it cannot be a key.
    """
    key = request.headers.get(KEY_HEADER)
    if key is None or (key.strip() and len(key) <= _KEY_LENGTH and key.isprintable()):
        return key
    raise HTTPException(
        400, f"{KEY_HEADER} has {len(key)} characters: 1 to {_KEY_LENGTH} printable ones are allowed. Send a UUID."
    )


async def fingerprint(form: FormData) -> str:
    """SHA-256 of a form's fields and files, the same for the same form whatever the order of its parts."""
    parts = []
    for name, value in form.multi_items():
        digest = hashlib.sha256(name.encode() + b"\0")
        if isinstance(value, UploadFile):
            await value.seek(0)
            while chunk := await value.read(_CHUNK_BYTES):
                digest.update(chunk)
            await value.seek(0)
        else:
            digest.update(value.encode())
        parts.append(digest.digest())
    return hashlib.sha256(b"".join(sorted(parts))).hexdigest()


def explain(error: Exception) -> Failure:
    """What an error of the host's handler means to the caller."""
    if isinstance(error, H3Error):
        code = "insufficient_memory" if error.http_status == 503 else "generation_failed"
        return Failure(code, str(error), error.http_status)
    if isinstance(error, EngineDeadError):
        return Failure("engine_dead", "The engine died; the server is about to end.", 503)
    status, message = 500, str(error) or type(error).__name__
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, OmniClientError):
        status, message = error.status_code, error.message
    code = "invalid_request" if 400 <= status < 500 else "generation_failed"
    # What a worker raises reaches the API process as text. These words are memory/guard.py's.
    if "not enough memory" in message or "H3_MEMORY_HARD_FLOOR_GIB" in message:
        code, status = "insufficient_memory", 503
    return Failure(code, message, status)
