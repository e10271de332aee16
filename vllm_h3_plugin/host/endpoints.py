# SPDX-License-Identifier: Apache-2.0
"""The plugin's own HTTP routes, attached through the host's endpoint-plugin group."""

from __future__ import annotations

import time
from argparse import Namespace
from functools import cache
from importlib.metadata import version
from typing import Any, ClassVar

import psutil
from fastapi import FastAPI
from starlette.datastructures import State
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_h3_plugin import __version__, settings
from vllm_h3_plugin.host import admission, run_state
from vllm_h3_plugin.serving import provenance


class H3Endpoints:
    """``GET /v1/h3/info``: which plugin, host, recipe and kernels this server really runs. And the memory guard."""

    name = "h3"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; called once by the host while it builds the app (vllm/plugins/endpoint_plugins)."""
        _provenance()  # now, and not while a request waits for the event loop
        app.add_api_route("/v1/h3/info", _info, methods=["GET"], summary="Plugin, host, recipe and kernels in use")
        # Before the host adds authentication, and therefore behind it.
        app.add_middleware(admission.Admission)
        app.add_middleware(InFlight)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Nothing to set up; 0.30's Omni server does not call it at all."""


class InFlight:
    """Counts requests until their answer is sent: what ``/v1/videos/sync`` encodes is no job, and no phase either.

    A job's own request ends when the job is queued; jobs are listed under ``/v1/videos``.
    """

    count: ClassVar[int] = 0

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and count it meanwhile."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in admission.PATHS:
            return await self.app(scope, receive, send)
        # All of them run in one event loop: nothing can come between reading and writing.
        InFlight.count += 1
        try:
            await self.app(scope, receive, send)
        finally:
            InFlight.count -= 1


def _info() -> dict[str, Any]:
    return {
        "plugin": __version__,
        "host": {name: version(name) for name in ("vllm", "vllm-omni", "torch")},
        "workers": run_state.read_workers(),
        "progress": run_state.read(run_state.PROGRESS),
        "server": _server(),
        "requests": {"in_flight": InFlight.count},
        "guard": admission.describe(),
        "provenance": _provenance(),
    }


def _server() -> dict[str, float]:
    started = psutil.Process().create_time()
    return {"started_at": started, "uptime_s": round(max(0.0, time.time() - started), 1)}


@cache
def _provenance() -> dict[str, Any]:
    """What ``vllm-h3 provenance`` prints; it cannot change while the server runs."""
    return provenance.collect(settings.load().recipe)
