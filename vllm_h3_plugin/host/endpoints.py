# SPDX-License-Identifier: Apache-2.0
"""The plugin's own HTTP routes, attached through the host's endpoint-plugin group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from fastapi import FastAPI
from starlette.datastructures import State
from starlette.responses import JSONResponse

from vllm_h3_plugin import __version__, settings
from vllm_h3_plugin.errors import H3Error, ServerError
from vllm_h3_plugin.host import admission, run_state
from vllm_h3_plugin.host.cluster.state import told
from vllm_h3_plugin.host.in_flight import InFlight
from vllm_h3_plugin.host.job_metrics import host_metrics
from vllm_h3_plugin.host.job_worker import JobWorker
from vllm_h3_plugin.host.liveness import HealthRoute, Liveness, leave
from vllm_h3_plugin.host.page_routes import page_router
from vllm_h3_plugin.host.video_accept import accepting
from vllm_h3_plugin.host.video_request import server_limits
from vllm_h3_plugin.host.video_routes import answer_error, forget_shadowed, video_router
from vllm_h3_plugin.quantization.footprint import GIB
from vllm_h3_plugin.serving import provenance
from vllm_h3_plugin.serving.jobs.retention import Retention
from vllm_h3_plugin.serving.jobs.service import JobService, Rules
from vllm_h3_plugin.serving.offered import offered
from vllm_h3_plugin.serving.references.load import ReferencePolicy
from vllm_h3_plugin.serving.rules.openapi import request_body
from vllm_h3_plugin.settings import Settings


class H3Endpoints:
    """The plugin's routes: what this server really runs, the video API answered from jobs, ``/ready``
    and the page at ``/h3``. And its guards.

    The host attaches plugins before its own router (0.30: vllm_omni/entrypoints/openai/api_server.py:334-343; 0.28:
    :522-529), so routes of one path are found here first.
    """

    name = "h3"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; called once by the host while it builds the app (vllm/plugins/endpoint_plugins)."""
        _provenance()  # now, and not while a request waits for the event loop
        values = settings.load()
        deadline_s = job_timeout_s(values)
        liveness = Liveness(factor=values.stuck_factor, phase_s=deadline_s, leave=values.exit_when_stuck)

        def service() -> JobService:
            jobs: JobService | None = getattr(app.state, "h3_jobs", None)
            if jobs is None:
                raise ServerError("the server has not started yet", fix="Ask again in a second.")
            return jobs

        app.add_api_route("/v1/h3/info", _info_of(app), methods=["GET"], summary="Plugin, host, recipe, kernels in use")
        app.add_api_route(
            "/ready",
            _ready_of(app, liveness),
            methods=["GET"],
            summary="Loaded, and takes requests",
            responses={503: {"description": "It does not, and says why", "content": {"application/json": {}}}},
        )
        body = request_body(server_limits(None))
        app.include_router(video_router(service, accepting(ReferencePolicy.of(values)), body))
        app.include_router(page_router())
        app.add_exception_handler(H3Error, answer_error)
        # Before the host adds authentication, and therefore behind it.
        app.add_middleware(admission.Admission)
        app.add_middleware(InFlight)
        app.add_middleware(HealthRoute, liveness=liveness)
        app.router.lifespan_context = _with_jobs(app.router.lifespan_context, values, deadline_s, liveness)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Nothing to set up; 0.30's Omni server does not call it at all."""


def job_timeout_s(values: Settings) -> float:
    """Longest that a job may run: ours, else what ``vllm-h3 serve`` made of the profile, else the host's default."""
    host = os.environ.get("VLLM_OMNI_VIDEO_SYNC_TIMEOUT") or 600.0
    return values.job_timeout_s if values.job_timeout_s is not None else float(host)


def _with_jobs(
    inner: Callable[..., Any], values: Settings, deadline_s: float, liveness: Liveness
) -> Callable[..., Any]:
    """The app's lifespan with jobs in it: neither host calls a plugin when it starts or ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        # Read now: the host's own values are those of the moment when it was imported.
        from vllm_omni.config.server_settings import ServerSettings

        storage = ServerSettings().storage
        ttl = values.clip_ttl_s if values.clip_ttl_s is not None else storage.file_ttl
        quota = None if values.clip_quota_gib is None else int(values.clip_quota_gib * GIB)
        rules = Rules(
            values.max_queue,
            deadline_s,
            fixed=values.job_timeout_s is not None,
            retention=Retention(ttl, quota),
            replica=values.replica or "",
        )
        jobs = JobService(Path(storage.path).resolve(), JobWorker(), rules, host_metrics())
        # Not earlier: the host adds its routes after it has attached plugins.
        forget_shadowed(app)
        await jobs.start()
        app.state.h3_jobs = jobs
        watch = asyncio.create_task(liveness.watch(lambda: getattr(app.state, "engine_client", None), jobs.leave))
        try:
            async with inner(app) as state:
                yield state
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
            await jobs.stop()
            if liveness.fault is not None and values.exit_when_stuck:
                leave()

    return lifespan


def _ready_of(app: FastAPI, liveness: Liveness) -> Callable[[], JSONResponse]:
    def ready() -> JSONResponse:
        jobs: JobService | None = getattr(app.state, "h3_jobs", None)
        loaded = run_state.run_dir() is None or bool(run_state.read_workers())
        fault = liveness.fault or told()
        if fault is not None:
            reason: str | None = fault
        elif jobs is None or not loaded:
            reason = "the model is being loaded"
        else:
            reason = None if jobs.accepting else "as many clips wait as may"
        queue = None if jobs is None else jobs.queue
        return JSONResponse({"ready": reason is None, "reason": reason, "queue": queue}, 200 if reason is None else 503)

    return ready


def _info_of(app: FastAPI) -> Callable[[], dict[str, Any]]:
    def info() -> dict[str, Any]:
        return _info(getattr(app.state, "h3_jobs", None))

    return info


def _info(jobs: JobService | None) -> dict[str, Any]:
    return {
        "plugin": __version__,
        "host": {name: version(name) for name in ("vllm", "vllm-omni", "torch")},
        "workers": run_state.read_workers(),
        "progress": run_state.read(run_state.PROGRESS),
        "server": _server(),
        "requests": {"in_flight": InFlight.count},
        "queue": None if jobs is None else jobs.queue,
        "limits": offered(server_limits(None)),
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
