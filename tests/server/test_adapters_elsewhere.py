# SPDX-License-Identifier: Apache-2.0
"""Turbo beside INT8, and FlashGen where AdaLN is resident, through the real server."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.server.adapter_kit import TURBO, Adapters, lora, made
from tests.server.conftest import Servers


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
