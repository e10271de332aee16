# SPDX-License-Identifier: Apache-2.0
"""The page at ``/h3``: files of ``serving/page/`` that hold no data. What they show they ask for under ``/v1``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import FileResponse, Response

import vllm_h3_plugin.serving.page as page

FOLDER = Path(page.__file__).parent
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    # Nothing from anywhere else, and nothing inline. Clips and first frames are blobs of the page's own.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob:; media-src 'self' blob:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    # An updated server must not be met by the page of the one before: asked each time, and mostly answered by 304.
    "Cache-Control": "no-cache",
}


def page_router() -> APIRouter:
    """The page and its files. They lie outside ``/v1``, so that a server with a key gives them to everybody."""
    router = APIRouter(include_in_schema=False)
    for path in sorted(FOLDER.iterdir()):
        kind = path.suffix.removeprefix(".")
        if kind in MEDIA_TYPES:
            address = "/h3" if path.name == "index.html" else f"/h3/{path.name}"
            router.add_api_route(address, _file(path, MEDIA_TYPES[kind]), methods=["GET", "HEAD"])
    return router


def _file(path: Path, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    stat = path.stat()
    tag = f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"'
    headers = {**HEADERS, "ETag": tag}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return FileResponse(path, media_type=media_type, headers=headers)

    return answer
