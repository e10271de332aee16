# SPDX-License-Identifier: Apache-2.0
"""The ``mp`` executor: worker in a process of its own, on the same platform and with the same clip."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.conftest import Running, Servers, request


@pytest.fixture(scope="module")
def both(servers: Servers, fl2va: Path) -> tuple[Running, Running]:
    one = servers.launch(servers.profile(fl2va, recipe="fp8", executor="uni"))
    many = servers.launch(servers.profile(fl2va, recipe="fp8", executor="mp"))
    return servers.ready(one), servers.ready(many)


def test_mp_worker_is_another_process_and_reports_itself(both: tuple[Running, Running]) -> None:
    one, many = both
    assert one.info["workers"][0]["pid"] == one.server.pid
    assert many.info["workers"][0]["pid"] != many.server.pid


def test_mp_and_uni_make_the_same_clip(both: tuple[Running, Running], tmp_path: Path) -> None:
    one, many = both
    asked = request()
    assert one.make(asked, tmp_path / "uni.mp4").read_bytes() == many.make(asked, tmp_path / "mp.mp4").read_bytes()


def test_bf16_works_with_mp(servers: Servers, fl2va: Path, tmp_path: Path) -> None:
    running = servers.start(fl2va, recipe="bf16", executor="mp")
    assert running.info["workers"][0]["backend"] is None
    running.make(request(), tmp_path / "bf16.mp4")
