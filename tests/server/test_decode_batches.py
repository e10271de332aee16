# SPDX-License-Identifier: Apache-2.0
"""Clips of the released VAE's network, narrow, through the real server: batches told, and the clip of one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.server.conftest import Running, Servers, request
from tests.server.test_ranks import cut_between, decoded
from vllm_h3_plugin.checkpoint.synthetic import tiny_vit
from vllm_h3_plugin.memory.system import AVAILABLE_HOOK, GIB

ASKED = request(size=160, frames=96, seed=3)
TILES, CLIPS = 9, 6


@pytest.fixture(scope="module")
def checkpoint(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of(partition="fl2va", video_vae=tiny_vit(tile=64, overlap=16))


@pytest.fixture(scope="module")
def one(servers: Servers, checkpoint: Path) -> Running:
    return servers.start(checkpoint, recipe="fp8")


def made(running: Running, path: Path) -> tuple[bytes, dict]:
    """A clip, and the ledger of its job."""
    running.make(ASKED, path)
    newest = httpx.get(f"{running.url}/v1/videos", params={"limit": 1, "order": "desc"}).json()["data"][0]["id"]
    return path.read_bytes(), httpx.get(f"{running.url}/v1/videos/{newest}").json()["ledger"]


def test_tiles_are_decoded_at_once_and_the_job_and_the_server_say_so(one: Running, tmp_path: Path) -> None:
    before = httpx.get(f"{one.url}/v1/h3/info").json()["workers"][0]["decode"]
    assert before["most"] == "auto" and before["reason"] is None
    _, ledger = made(one, tmp_path / "clip.mp4")
    assert ledger["decode"] == {
        "tiles": TILES,
        "batch": TILES,
        "calls": CLIPS,
        "tiles_done": TILES * CLIPS,
        "reduced": 0,
    }
    assert httpx.get(f"{one.url}/v1/h3/info").json()["workers"][0]["decode"]["last"] == ledger["decode"]


def test_with_no_memory_to_spare_it_is_one_tile_at_a_time_and_the_same_clip(one: Running, tmp_path: Path) -> None:
    made(one, tmp_path / "batched.mp4")
    hook = Path(one.server.command.environment["H3_RUN_DIR"]) / AVAILABLE_HOOK
    hook.write_text(str(6 * GIB))
    try:
        _, ledger = made(one, tmp_path / "single.mp4")
    finally:
        hook.unlink()
    assert (ledger["decode"]["batch"], ledger["decode"]["calls"]) == (1, TILES * CLIPS)
    first, second = (decoded(tmp_path / name)[0] for name in ("batched.mp4", "single.mp4"))
    assert np.abs(first - second).mean() < 0.1


def test_ranks_that_share_the_tiles_decode_their_own_at_once(
    servers: Servers, checkpoint: Path, one: Running, tmp_path: Path
) -> None:
    two = servers.start(checkpoint, recipe="fp8", executor="mp", devices=2, roles=cut_between(2))
    _, ledger = made(two, tmp_path / "two.mp4")
    assert (ledger["decode"]["tiles"], ledger["decode"]["batch"]) == (5, 5), "the first rank has every other tile"
    one.make(ASKED, tmp_path / "one.mp4")
    first, second = (decoded(tmp_path / name)[0] for name in ("one.mp4", "two.mp4"))
    assert np.abs(first - second).mean() < 12
