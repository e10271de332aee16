# SPDX-License-Identifier: Apache-2.0
"""The ``mp`` executor: worker in a process of its own, on the same platform and with the same clip."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.conftest import Running, Servers, request


@pytest.fixture(scope="module")
def mp(servers: Servers, fl2va: Path) -> Running:
    """FP8 with the ``mp`` executor; BF16 with it is the plugin's side of test_parity.py."""
    return servers.start(fl2va, recipe="fp8", executor="mp")


def test_mp_worker_is_another_process_and_reports_itself(fp8: Running, mp: Running) -> None:
    assert fp8.info["workers"][0]["pid"] == fp8.server.pid
    assert mp.info["workers"][0]["pid"] != mp.server.pid


def test_mp_and_uni_make_the_same_clip(fp8: Running, mp: Running, tmp_path: Path) -> None:
    asked = request()
    one = fp8.make(asked, tmp_path / "uni.mp4").read_bytes()
    assert one == mp.make(asked, tmp_path / "mp.mp4").read_bytes()
