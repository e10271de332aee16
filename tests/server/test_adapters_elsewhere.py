# SPDX-License-Identifier: Apache-2.0
"""Turbo beside INT8, on two ranks and on stages that take turns; FlashGen where AdaLN is resident."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.server.adapter_kit import TURBO, Adapters, lora, made
from tests.server.conftest import Running, Servers
from tests.server.test_ranks import MOST_PIXEL, MOST_SOUND, cut_between, differences


def test_turbo_takes_effect_beside_int8_and_goes_without_a_trace(
    own_servers: Servers, fl2va: Path, adapters: Adapters
) -> None:
    running = own_servers.start(fl2va, recipe="int8-text")
    with httpx.Client(base_url=running.url, timeout=120) as http:
        before = made(http, **TURBO)[1]
        job, clip = made(http, lora=lora(adapters("turbo")))
        assert clip != before and len(job["ledger"]["steps_s"]) == 8
        assert made(http, lora=lora(adapters("turbo"), 0.0), **TURBO)[1] == before
        assert made(http, **TURBO)[1] == before


def test_flashgen_is_served_where_adaln_is_resident(own_servers: Servers, fl2va: Path, adapters: Adapters) -> None:
    running = own_servers.start(fl2va, recipe="bf16")
    with httpx.Client(base_url=running.url, timeout=120) as http:
        before = made(http, num_inference_steps="4")[1]
        job, clip = made(http, lora=lora(adapters("flashgen")))
        assert (job["num_inference_steps"], len(job["ledger"]["steps_s"])) == (4, 4)
        assert clip != before == made(http, num_inference_steps="4")[1]


def turbo_there_and_back(running: Running, adapter: Path) -> bytes:
    """A clip with the adapter, after and before one without it that stays the same."""
    with httpx.Client(base_url=running.url, timeout=120) as http:
        before = made(http, **TURBO)[1]
        job, clip = made(http, lora=lora(adapter))
        assert clip != before and len(job["ledger"]["steps_s"]) == 8
        assert made(http, **TURBO)[1] == before
    return clip


def test_turbo_on_two_ranks_is_turbo_on_one(
    own_servers: Servers, fl2va: Path, fp8: Running, adapters: Adapters, tmp_path: Path
) -> None:
    two = own_servers.start(fl2va, recipe="fp8", executor="mp", devices=2, roles=cut_between(2))
    paths = []
    for name, running in (("one", fp8), ("two", two)):
        paths.append(tmp_path / f"{name}.mp4")
        paths[-1].write_bytes(turbo_there_and_back(running, adapters("turbo")))
    pixels, sound = differences(*paths)
    assert pixels <= MOST_PIXEL and sound <= MOST_SOUND


def test_turbo_where_stages_take_turns_makes_the_same_clip_to_the_byte(
    own_servers: Servers, fl2va: Path, fp8: Running, adapters: Adapters
) -> None:
    staged = own_servers.start(fl2va, recipe="fp8", resident="stage")
    clips = {turbo_there_and_back(running, adapters("turbo")) for running in (fp8, staged, staged)}
    assert len(clips) == 1
