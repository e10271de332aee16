# SPDX-License-Identifier: Apache-2.0
"""``/health`` that knows a stuck worker, ``/ready``, and the end of a server that cannot recover by itself."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_h3_plugin.host import run_state
from vllm_h3_plugin.host.cluster.state import told
from vllm_h3_plugin.serving.jobs.liveness import move, stuck

logger = init_logger(__name__)

EXIT_CODE = 7
"""That of ``ServerError``: the server did not stay."""

_LOOK_S = 2.0
_GRACE_S = 20.0


class Liveness:
    """What is known of the worker's life. One for each app."""

    def __init__(
        self,
        *,
        factor: float,
        phase_s: float,
        leave: bool,
        end: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            factor, phase_s: see :func:`~vllm_h3_plugin.serving.jobs.liveness.stuck`.
            leave: end the process once the worker is stuck or gone.
            end: how.
            clock: seconds that nobody sets.
        """
        self._clock = clock
        self._last: tuple[Any, ...] = ()
        self._last_at = clock()
        self.fault: str | None = None
        self._leaving = False
        self._factor = factor
        self._phase_s = phase_s
        self._leave = leave
        self._end = end or end_process

    async def watch(self, engine: Callable[[], Any], leaving: Callable[[], Any] | None = None) -> None:
        """Look every two seconds until the fault is there, or for ever.

        Args:
            leaving: a coroutine function, run in this loop once the engine is told to end.
        """
        self._expect_the_end(engine(), asyncio.get_running_loop(), leaving)
        while self.fault is None:
            await asyncio.sleep(_LOOK_S)
            try:
                fault = await self.look(engine())
            except Exception:
                # One look that fails must not be the last one.
                logger.exception("event=look_failed")
                continue
            if self._leaving:
                return
            self.fault = fault
        logger.error("event=unhealthy reason=%r exit=%s", self.fault, self._leave)
        if self._leave:
            self._end()

    def _expect_the_end(self, engine: Any, loop: asyncio.AbstractEventLoop, leaving: Callable[[], Any] | None) -> None:
        """An engine that is told to end is no fault. The host does that before it tells the app (launcher.py)."""
        shutdown = getattr(engine, "shutdown", None)
        if shutdown is None:
            return

        def told(*args: Any, **kwargs: Any) -> Any:
            self._leaving = True
            if leaving is not None and not loop.is_closed():
                # The host calls this in a thread of its own.
                asyncio.run_coroutine_threadsafe(leaving(), loop)
            return shutdown(*args, **kwargs)

        engine.shutdown = told

    async def look(self, engine: Any) -> str | None:
        """Why the server is not healthy; None: it is."""
        if engine is not None:
            try:
                await engine.check_health()
            except EngineDeadError as exc:
                return f"the worker is gone: {exc or 'the engine is dead'}"
        worker = await asyncio.to_thread(run_state.read, run_state.PROGRESS)
        seen, now = move(worker), self._clock()
        if seen != self._last:
            self._last, self._last_at = seen, now
        return stuck(worker, now - self._last_at, factor=self._factor, phase_s=self._phase_s)


class HealthRoute:
    """Answers ``/health`` with 503 while there is a fault; the host's route answers otherwise.

    A middleware, because 0.30 removes every other route of that path while it builds its app.
    """

    def __init__(self, app: ASGIApp, liveness: Liveness) -> None:
        self.app = app
        self._liveness = liveness

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything else on."""
        if scope["type"] != "http" or scope["path"] != "/health":
            return await self.app(scope, receive, send)
        fault = self._liveness.fault or await asyncio.to_thread(told)
        if fault is None:
            return await self.app(scope, receive, send)
        return await JSONResponse({"status": "unhealthy", "reason": fault}, 503)(scope, receive, send)


def end_process() -> None:
    """Ask this server to end, and insist. Its app's last act is :func:`leave`."""
    thread = threading.Timer(_GRACE_S, leave)
    thread.daemon = True
    thread.start()
    os.kill(os.getpid(), signal.SIGTERM)


def leave() -> None:
    """End at once with a code that a supervisor sees, which the host's own end has not.

    Takes along the workers that this process started: a stuck one would keep the device.
    """
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(EXIT_CODE)
