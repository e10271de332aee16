# SPDX-License-Identifier: Apache-2.0
"""Is a running server well? One that works on a long clip is; one whose clip has stopped moving is not."""

from __future__ import annotations

from typing import Any

import httpx

from vllm_h3_plugin.errors import BusyError, ServerError


def check_health(http: httpx.Client, *, stuck_after_s: float, now: float) -> str:
    """Ask a server how it is.

    ``/health`` knows a dead engine but not a stuck one. The plugin writes the time of each denoise step and of each
    change of phase, so a long generation keeps moving and a stuck one does not.

    Args:
        http: client whose base URL is the server's, with its key if it has one.
        stuck_after_s: seconds without a step or a change of phase, within a request, that mean stuck.
        now: seconds since 1970, by the same clock as the server's.

    Returns:
        What it is doing, in a line.

    Raises:
        ServerError: it does not answer, its engine is dead, or its request is stuck.
    """
    health = _get(http, "/health")
    if health.status_code != 200:
        raise ServerError(
            f"{http.base_url}: GET /health gave {health.status_code}",
            why="the engine is dead or still starting",
            fix="See the server's log.",
        )
    info = _get(http, "/v1/h3/info")
    if info.status_code != 200:
        key = "it asks for a key" if info.status_code == 401 else "the plugin is not active in it"
        raise ServerError(
            f"{http.base_url}: GET /v1/h3/info gave {info.status_code}",
            why=key,
            fix="Set H3_API_KEY_FILE to the server's key, and start it with `vllm-h3 serve`.",
        )
    return describe_progress(info.json().get("progress"), stuck_after_s=stuck_after_s, now=now)


def describe_progress(progress: dict[str, Any] | None, *, stuck_after_s: float, now: float) -> str:
    """A line about ``progress`` of ``/v1/h3/info``.

    Raises:
        ServerError: a request has not moved for ``stuck_after_s`` seconds.
    """
    if not progress or progress["phase"] == "idle":
        return "idle"
    where = str(progress["phase"])
    if progress.get("steps"):
        where += f", step {progress['step']} of {progress['steps']}"
    still = now - float(progress["time"])
    if still > stuck_after_s:
        raise ServerError(
            f"stuck in {where}",
            why=f"nothing has moved for {still:.0f} s; {stuck_after_s:.0f} s are allowed",
            fix="See the server's log, then restart it. Raise --stuck-after if single steps take that long here.",
            phase=progress["phase"],
            still_s=round(still, 1),
        )
    return f"{where}, {still:.0f} s ago"


def _get(http: httpx.Client, path: str) -> httpx.Response:
    try:
        return http.get(path)
    except httpx.TimeoutException as exc:
        raise BusyError(
            f"{http.base_url}: no answer to GET {path}",
            why="the server accepts connections but does not answer in time",
            fix="Moving and encoding frames can hold it for a minute; if it lasts, see the server's log.",
        ) from exc
    except httpx.TransportError as exc:
        raise ServerError(
            f"{http.base_url}: cannot connect", why=str(exc), fix="Start it with `vllm-h3 serve`; see its log."
        ) from exc
