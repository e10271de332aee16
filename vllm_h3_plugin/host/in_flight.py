# SPDX-License-Identifier: Apache-2.0
"""Requests for clips that are under way and that no list of jobs tells of: read and checked, or of the chat API."""

from __future__ import annotations

from typing import Any, ClassVar

from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_h3_plugin.host import admission

_LEAVE = "h3_is_a_job"


class InFlight:
    """Counts them: each until its answer is sent, or until it is a job."""

    count: ClassVar[int] = 0

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and count it meanwhile."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in admission.PATHS:
            return await self.app(scope, receive, send)
        counted = True

        def leave() -> None:
            nonlocal counted
            # All of them run in one event loop: nothing can come between reading and writing.
            InFlight.count -= counted
            counted = False

        InFlight.count += 1
        try:
            await self.app({**scope, _LEAVE: leave}, receive, send)
        finally:
            leave()


def is_a_job(scope: Scope) -> None:
    """The request became a job, and is told of as one from now on."""
    leave: Any = scope.get(_LEAVE)
    if leave is not None:
        leave()
