# SPDX-License-Identifier: Apache-2.0
"""Turbo through the real server: it takes effect, leaves nothing behind, and what does not fit is 400 at once."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.server.adapter_kit import TURBO, Adapters, faults, lora, made
from tests.server.conftest import READY_S, Running, Servers, request
from vllm_h3_plugin.checkpoint.adapter_layout import turbo_file
from vllm_h3_plugin.checkpoint.synthetic.adapters import BREAKS
from vllm_h3_plugin.errors import ServerError
from vllm_h3_plugin.video.verdict import Expectation
from vllm_h3_plugin.video.verify import verify


@pytest.fixture(scope="module")
def turbo(servers: Servers, fl2va: Path, adapters: Adapters) -> Running:
    """FP8 with a Turbo file loaded at start."""
    return servers.start(fl2va, recipe="fp8", lora=adapters("turbo"))


@pytest.fixture(scope="module")
def http(turbo: Running) -> httpx.Client:
    return httpx.Client(base_url=turbo.url, timeout=120)


def test_the_adapter_of_the_start_is_on_a_request_that_says_nothing(http: httpx.Client, tmp_path: Path) -> None:
    """8 steps are 8 forwards of the DiT, on 0.30, which is told 8, and on 0.28, which is told 9."""
    job, clip = made(http)
    assert job["adapter"] == turbo_file(8)
    assert (job["num_inference_steps"], len(job["ledger"]["steps_s"])) == (8, 8)
    (tmp_path / "clip.mp4").write_bytes(clip)
    verify(tmp_path / "clip.mp4", Expectation(width=64, height=64, frames=96)).raise_if_failed()


def test_a_request_that_names_it_is_the_same_request(http: httpx.Client, adapters: Adapters) -> None:
    _, silent = made(http)
    assert made(http, lora=lora(adapters("turbo")), **TURBO)[1] == silent


def test_scale_0_is_a_server_without_an_adapter_bit_for_bit(
    http: httpx.Client, fp8: Running, adapters: Adapters
) -> None:
    with httpx.Client(base_url=fp8.url, timeout=120) as other:
        job, base = made(other, **TURBO)
    assert job["adapter"] is None
    job, off = made(http, lora=lora(adapters("turbo"), 0.0), **TURBO)
    assert job["adapter"] is None and off == base
    assert made(http)[1] != base, "the adapter changes nothing"


def test_switching_leaves_nothing_behind(http: httpx.Client, adapters: Adapters) -> None:
    turbo, peft = adapters("turbo"), adapters("peft")
    asked = [
        {},
        {"lora": lora(turbo, 0.5)},
        {"lora": lora(peft), **TURBO},
        {"lora": lora(turbo, 0.0), **TURBO},
    ]
    first = [made(http, **fields)[1] for fields in asked]
    assert len(set(first)) == 4
    for index in (3, 0, 2, 1, 0, 3, 2, 0):
        assert made(http, **asked[index])[1] == first[index]


def test_an_adapter_of_a_request_works_on_a_server_that_was_started_without(
    http: httpx.Client, fp8: Running, adapters: Adapters
) -> None:
    with httpx.Client(base_url=fp8.url, timeout=120) as other:
        before = made(other, **TURBO)[1]
        job, clip = made(other, lora=lora(adapters("turbo")))
        assert (job["adapter"], len(job["ledger"]["steps_s"])) == (turbo_file(8), 8)
        assert clip == made(http)[1]
        assert made(other, **TURBO)[1] == before


def test_another_file_of_the_family_has_its_own_steps(http: httpx.Client, adapters: Adapters) -> None:
    job, _ = made(http, lora=lora(adapters("turbo", steps=4, res_768p=False)))
    assert (job["num_inference_steps"], len(job["ledger"]["steps_s"])) == (4, 4)


def test_what_a_turbo_file_was_not_made_for_is_400(http: httpx.Client) -> None:
    told = faults(http, num_inference_steps="50", flow_shift="12")
    assert told["num_inference_steps"]["nearest"] == 8 and told["flow_shift"]["nearest"] == 6


@pytest.mark.parametrize("broken", BREAKS)
def test_an_adapter_that_does_not_fit_is_400_and_the_next_clip_has_the_same_bytes(
    broken: str, http: httpx.Client, adapters: Adapters
) -> None:
    _, before = made(http)
    bad = adapters("turbo", broken=broken)
    fault = faults(http, lora=lora(bad))["lora.path"]
    assert fault["value"] == str(bad) and fault["why"]
    assert made(http)[1] == before


@pytest.mark.parametrize("kind", ["flashgen", "fasth3"])
def test_kinds_that_this_server_cannot_switch_to_are_400_with_the_way_out(
    kind: str, http: httpx.Client, adapters: Adapters
) -> None:
    fault = faults(http, lora=lora(adapters(kind)))["lora.path"]
    assert ('"adaln": "resident"' if kind == "flashgen" else "--lora") in fault["why"]


def test_a_file_that_was_replaced_is_read_anew(http: httpx.Client, adapters: Adapters, tmp_path: Path) -> None:
    one, two = adapters("turbo", seed=3), adapters("turbo", seed=4)
    path = tmp_path / one.name
    clips = []
    for source in (one, two):
        path.unlink(missing_ok=True)
        path.write_bytes(source.read_bytes())
        clips.append(made(http, lora=lora(path))[1])
    assert clips[0] != clips[1] == made(http, lora=lora(two))[1]


def test_the_server_tells_what_it_has_loaded(turbo: Running, adapters: Adapters) -> None:
    info = httpx.get(f"{turbo.url}/v1/h3/info").json()
    own = info["workers"][0]["adapters"]["own"]
    assert (own["kind"], own["path"], own["steps"]) == ("turbo", str(adapters("turbo")), 8)
    assert info["limits"]["num_inference_steps"]["default"] == 8
    # Its schedule's table is made while the weights load, not from a second reading in the first request.
    built = [line for line in turbo.log.splitlines() if "rows are built from the weights on disk" in line]
    assert [line for line in built if "8 steps, text:" in line] == []


def test_a_start_with_an_adapter_that_does_not_fit_ends_with_its_name(
    own_servers: Servers, fl2va: Path, adapters: Adapters
) -> None:
    bad = adapters("turbo", broken="other-width")
    server = own_servers.launch(own_servers.profile(fl2va, recipe="fp8", lora=bad))
    with pytest.raises(ServerError) as caught:
        server.wait_ready(READY_S)
    assert bad.name in str(caught.value) and "another width" in str(caught.value)


def test_first_and_last_frames_go_with_turbo(turbo: Running, tmp_path: Path, pictures: tuple[Path, Path]) -> None:
    clip = turbo.make(request(*pictures, steps=8), tmp_path / "fl2va.mp4")
    verify(clip, Expectation(width=256, height=256, frames=96)).raise_if_failed()
