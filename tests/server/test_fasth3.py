# SPDX-License-Identifier: Apache-2.0
"""FastH3 through the real server: fused before the weights are quantized and before the AdaLN table is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.adapter_kit import Adapters, faults, lora, made
from tests.server.conftest import Running, Servers
from vllm_h3_plugin.checkpoint.adapter_layout import FASTH3_STEPS


@pytest.fixture(scope="module")
def students(servers: Servers, fl2va: Path, adapters: Adapters) -> dict[str, Running]:
    """FastH3 fused into three recipes."""
    path = adapters("fasth3")
    launched = {recipe: servers.launch(servers.profile(fl2va, recipe=recipe, lora=path)) for recipe in ("bf16", "fp8")}
    launched["bf16-table"] = servers.launch(servers.profile(fl2va, recipe="bf16-table", lora=path))
    return {recipe: servers.ready(server) for recipe, server in launched.items()}


def student(running: Running, **fields: str) -> tuple[dict[str, Any], bytes]:
    with httpx.Client(base_url=running.url, timeout=120) as http:
        return made(http, **fields)


def test_fasth3_is_in_the_weights_and_makes_its_four_steps(students: dict[str, Running], fp8: Running) -> None:
    job, clip = student(students["fp8"])
    assert (job["num_inference_steps"], len(job["ledger"]["steps_s"])) == (FASTH3_STEPS, FASTH3_STEPS)
    assert job["adapter"] == "adapter_model.safetensors"
    assert clip != student(fp8, num_inference_steps="4")[1]


def test_the_table_is_made_after_the_fusion(students: dict[str, Running]) -> None:
    """Resident AdaLN is fused and projected by the host's own classes; a table of the base's would differ."""
    assert student(students["bf16-table"])[1] == student(students["bf16"])[1]
    assert students["bf16-table"].info["workers"][0]["adaln"] == "table"


def test_nothing_goes_on_top_of_fasth3(students: dict[str, Running], adapters: Adapters) -> None:
    with httpx.Client(base_url=students["fp8"].url, timeout=120) as http:
        told = faults(http, lora=lora(adapters("turbo")), num_inference_steps="8")
        assert "fused" in told["lora.path"]["why"]
        assert faults(http, task="fl2va", num_inference_steps="8").keys() >= {"num_inference_steps"}


def test_the_next_start_reads_the_students_snapshot_and_no_other(
    own_servers: Servers, students: dict[str, Running], fl2va: Path, adapters: Adapters
) -> None:
    first = students["fp8"]
    cache = first.cache
    again = own_servers.start(fl2va, cache=cache, recipe="fp8", lora=adapters("fasth3"))
    assert again.info["workers"][0]["load"]["origin"] == "snapshot"
    assert student(again)[1] == student(first)[1]
    again.server.stop(3)
    base = own_servers.start(fl2va, cache=cache, recipe="fp8")
    assert base.info["workers"][0]["load"]["origin"] == "checkpoint"
