# SPDX-License-Identifier: Apache-2.0
"""The page's files over HTTP: there for everybody, under a policy that lets nothing in from elsewhere, and whole."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from urllib.parse import urljoin

import pytest

from tests.contract.test_video_routes import KEY, video_app
from vllm_h3_plugin.host.page_routes import FOLDER, MEDIA_TYPES

FILES = sorted(path for path in FOLDER.iterdir() if path.suffix.removeprefix(".") in MEDIA_TYPES)
_LINKED = re.compile(r"""(?:href|src)="([^"#]+)"|from "([^"]+)\"""")


@pytest.fixture(autouse=True)
def _no_run_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("H3_RUN_DIR", raising=False)


def test_the_page_is_given_without_a_key_and_whole(tmp_path: Path) -> None:
    async def test() -> None:
        async with video_app(tmp_path, KEY) as (_, client, _):
            reached, pending = set(), ["/h3"]
            while pending:
                path = pending.pop()
                if path in reached:
                    continue
                reached.add(path)
                answer = await client.get(path)
                assert (answer.status_code, answer.headers["x-content-type-options"]) == (200, "nosniff"), path
                policy = answer.headers["content-security-policy"]
                assert policy.startswith("default-src 'self';") and "unsafe" not in policy and "//" not in policy
                pending += [urljoin(path, "".join(link)) for link in _LINKED.findall(answer.text)]
            assert reached == {"/h3", *(f"/h3/{path.name}" for path in FILES if path.name != "index.html")}
            assert (await client.get("/v1/h3/info")).status_code == 401
            assert (await client.get("/h3/__init__.py")).status_code == 404

    asyncio.run(test())


def test_a_browser_that_has_the_page_is_told_so(tmp_path: Path) -> None:
    async def test() -> None:
        async with video_app(tmp_path) as (_, client, _):
            first = await client.get("/h3")
            assert first.headers["cache-control"] == "no-cache"
            again = await client.get("/h3", headers={"If-None-Match": first.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            head = await client.head("/h3")
            assert (head.status_code, head.content) == (200, b"")
            moved = await client.get("/h3/")
            assert (moved.status_code, moved.headers["location"]) == (307, "http://h3/h3")

    asyncio.run(test())


def test_the_page_needs_nothing_from_elsewhere_and_nothing_inline() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text) == [], path.name
        if path.suffix == ".html":
            assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text) == []


def test_the_limits_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H3_MAX_PIXELS", str(512 * 512))

    async def test() -> None:
        async with video_app(tmp_path) as (_, client, _):
            limits = (await client.get("/v1/h3/info")).json()["limits"]
            assert limits["size"]["max_pixels"] == 512 * 512
            assert (limits["seconds"], limits["num_inference_steps"]["default"]) == ({"min": 4, "max": 15}, 50)
            assert limits["num_frames"]["default"] == {"t2va": 209, "fl2va": 209, "ref2va": 124}
            assert limits["size"]["canvases"]["16:9"] == "1344x768"
            for wrong, field, name in (
                ({"size": "1024x512"}, "size", "max_pixels"),
                ({"seconds": str(limits["seconds"]["max"] + 1)}, "seconds", "max"),
                ({"num_inference_steps": str(limits["num_inference_steps"]["max"] + 1)}, "num_inference_steps", "max"),
            ):
                refused = await client.post("/v1/videos", data={"prompt": "a kite", "size": "64x64", **wrong})
                (fault,) = refused.json()["faults"]
                assert (refused.status_code, fault["field"]) == (400, field)
                assert str(limits[field][name]) in fault["allowed"]

    asyncio.run(test())
