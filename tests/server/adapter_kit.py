# SPDX-License-Identifier: Apache-2.0
"""Adapters for the tiny checkpoint, and requests with them, for the server tests of adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

FORM = {"prompt": "a red kite over a harbour", "size": "64x64", "num_frames": "96", "seed": "1"}
TURBO = {"num_inference_steps": "8", "flow_shift": "6"}
Adapters = Callable[..., Path]


def lora(path: Path, scale: float | None = None) -> str:
    return json.dumps({"name": path.stem, "path": str(path), **({} if scale is None else {"scale": scale})})


def made(http: httpx.Client, **fields: str) -> tuple[dict[str, Any], bytes]:
    """(the job when it is done, its clip)."""
    answer = http.post("/v1/videos", data={**FORM, **fields})
    assert answer.status_code == 200, answer.text
    with http.stream("GET", f"/v1/videos/{answer.json()['id']}/events") as events:
        assert events.read()
    job = http.get(f"/v1/videos/{answer.json()['id']}").json()
    assert job["status"] == "completed", job
    return job, http.get(f"/v1/videos/{job['id']}/content").content


def faults(http: httpx.Client, **fields: str) -> dict[str, Any]:
    jobs = len(http.get("/v1/videos").json()["data"])
    answer = http.post("/v1/videos", data={**FORM, **fields})
    assert answer.status_code == 400, answer.text
    assert len(http.get("/v1/videos").json()["data"]) == jobs, "it was queued"
    return {fault["field"]: fault for fault in answer.json()["faults"]}
