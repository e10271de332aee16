# SPDX-License-Identifier: Apache-2.0
"""The server's OpenAPI description tells of the routes that answer, where the host has routes of the same paths."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_video_routes import video_app
from vllm_h3_plugin.host import video_routes
from vllm_h3_plugin.host.video_request import server_limits
from vllm_h3_plugin.serving.rules.openapi import request_body

PATHS = ("/v1/videos", "/v1/videos/sync")


async def described(folder: Path) -> dict[str, Any]:
    async with video_app(folder) as (app, client, _):
        answer = await client.get("/openapi.json")
        assert answer.status_code == 200
        places = [(route.path, method) for route in app.routes for method in getattr(route, "methods", None) or ()]
        described: dict[str, Any] = answer.json()
        return {**described, "twice": {place for place in places if places.count(place) > 1}}


@pytest.fixture(autouse=True)
def _no_run_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("H3_RUN_DIR", raising=False)


def test_it_tells_what_this_server_takes_and_not_what_the_host_would(tmp_path: Path) -> None:
    found = asyncio.run(described(tmp_path))
    for path in PATHS:
        assert found["paths"][path]["post"]["requestBody"] == request_body(server_limits(None))
        assert {"200", "400", "422", "429", "503"} <= found["paths"][path]["post"]["responses"].keys()
    assert {name["name"] for name in found["paths"][PATHS[0]]["post"]["parameters"]} == {
        "Idempotency-Key",
        "X-H3-Max-Queue",
    }
    ours = {path: set(entry) for path, entry in found["paths"].items() if path.startswith("/v1/videos")}
    assert ours["/v1/videos"] == {"get", "post"} and ours["/v1/videos/{video_id}"] == {"get", "delete"}
    assert not {path for path, _ in found["twice"]} & {*PATHS, "/v1/videos/{video_id}"}


def test_the_host_would_have_told_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_h3_plugin.host.endpoints.forget_shadowed", lambda app: None)
    found = asyncio.run(described(tmp_path))
    assert found["paths"]["/v1/videos"]["post"]["requestBody"] != request_body(server_limits(None))
    assert ("/v1/videos", "POST") in found["twice"]


def test_a_route_of_the_host_that_something_may_reach_stays() -> None:
    from fastapi import FastAPI

    def hosts() -> None:
        """Stands for one of the host's."""

    app = FastAPI()
    app.include_router(video_routes.video_router(lambda: None, None, {}))  # type: ignore[arg-type, return-value]
    for path, methods in (("/v1/videos", ["POST"]), ("/v1/videos/{id}", ["GET", "PATCH"]), ("/v1/models", ["GET"])):
        app.add_api_route(path, hosts, methods=methods)
    video_routes.forget_shadowed(app)
    left = {(route.path, *sorted(route.methods)) for route in app.routes if getattr(route, "endpoint", None) is hosts}
    assert left == {("/v1/videos/{id}", "GET", "PATCH"), ("/v1/models", "GET")}
