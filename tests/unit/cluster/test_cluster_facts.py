# SPDX-License-Identifier: Apache-2.0
"""What machines must have in common, which variables they get, and the network that they meet on. No Ray."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_h3_plugin.checkpoint.synthetic.spec import SynthSpec
from vllm_h3_plugin.checkpoint.synthetic.writer import write_checkpoint
from vllm_h3_plugin.data import data_path
from vllm_h3_plugin.errors import CheckpointError, HostError, RecipeError, ServerError, SettingsError
from vllm_h3_plugin.host.cluster import network
from vllm_h3_plugin.host.cluster.environment import handed_over, take
from vllm_h3_plugin.host.cluster.facts import (
    NodeFacts,
    checkpoint_digests,
    recipe_facts,
    require_same,
    require_same_weights,
)

ONE = NodeFacts("192.0.2.1", {"ray": "2.60.0", "vllm-h3-plugin": "1"}, "rules", {"FL2VA/transformer": "ab"}, "/models")


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (
            {"versions": {**ONE.versions, "ray": "2.50.0"}},
            HostError,
            "node 192.0.2.2 runs ray 2.50.0: node 192.0.2.1 runs",
        ),
        ({"recipe": "others"}, RecipeError, "the recipe on node 192.0.2.2"),
        ({"checkpoint": {"FL2VA/transformer": "cd"}}, CheckpointError, "FL2VA/transformer: files in /models there"),
        ({"checkpoint": {}}, CheckpointError, "the checkpoint on node 192.0.2.2"),
        ({"checksums": "ef"}, CheckpointError, "the checksums on node 192.0.2.2"),
    ],
    ids=["version", "recipe", "bytes", "no part", "checksums"],
)
def test_a_machine_that_differs_is_named(change: dict, error: type[Exception], said: str) -> None:
    require_same([ONE, replace(ONE, node="192.0.2.2", path="/models")])
    with pytest.raises(error, match=said):
        require_same([ONE, replace(ONE, node="192.0.2.2", **change)])


def test_weights_that_were_loaded_are_compared_part_by_part() -> None:
    require_same_weights({"192.0.2.1": {"transformer": "ab"}, "192.0.2.2": {"transformer": "ab"}})
    require_same_weights({"192.0.2.1": {}, "192.0.2.2": {}})
    with pytest.raises(CheckpointError, match=r"the weights on node 192\.0\.2\.2 are not those .* transformer"):
        require_same_weights({"192.0.2.1": {"transformer": "ab"}, "192.0.2.2": {"transformer": "cd"}})


def test_a_copy_is_the_same_checkpoint_until_a_byte_of_it_changes(tmp_path: Path) -> None:
    original = write_checkpoint(tmp_path / "a", SynthSpec(partition="fl2va")).partitions[0]
    copy = shutil.copytree(original, tmp_path / "b" / original.name, copy_function=shutil.copy)
    found = checkpoint_digests(original, None)
    assert checkpoint_digests(copy, None) == found
    for part in ("transformer", "video_vae"):
        shard = sorted((copy / part).rglob("*.safetensors"))[-1]
        data = bytearray(shard.read_bytes())
        data[-100] ^= 1
        shard.write_bytes(data)
    other = checkpoint_digests(copy, None)
    assert sorted(name.rpartition("/")[2] for name in found if found[name] != other[name]) == [
        "transformer",
        "video_vae",
    ]


def test_recipes_are_told_apart_by_what_they_say() -> None:
    assert recipe_facts("fp8") == recipe_facts("fp8") != recipe_facts("bf16")
    assert recipe_facts("fp8") != recipe_facts("fp8-vision-fp32")


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"name": "ours", "description": "The same."}, True),
        ({"attention": "fp8"}, False),
        ({"adaln": "resident"}, False),
        ({"method": None, "rules": [{"match": "**", "precision": "bf16", "why": "All of it."}]}, False),
    ],
)
def test_a_recipe_is_what_it_decides_and_not_what_it_is_called(
    tmp_path: Path, change: dict[str, Any], same: bool
) -> None:
    packaged = json.loads((data_path("quant") / "fp8.json").read_text())
    for rule in packaged["rules"]:
        rule["why"] += " Or so."
    (tmp_path / "ours.json").write_text(json.dumps(packaged | change))
    assert (recipe_facts(str(tmp_path / "ours.json")) == recipe_facts("fp8")) is same


def test_secrets_and_paths_of_one_machine_stay_there() -> None:
    given = handed_over(
        {
            "H3_API_KEY_FILE": "/run/key",
            "VLLM_API_KEY": "secret",
            "H3_RUN_DIR": "/tmp/run",
            "H3_RECIPE": "fp8",
            "H3_CACHE_DIR": "/cache",
            "NCCL_DEBUG": "INFO",
            "HOME": "/root",
        }
    )
    assert given == {"H3_RECIPE": "fp8", "H3_CACHE_DIR": "/cache", "NCCL_DEBUG": "INFO"}
    environ = {"H3_CACHE_DIR": "/disk", "H3_RECIPE": "of an earlier server", "H3_MAX_QUEUE": "1", "HOME": "/home/ray"}
    take(given, environ)
    assert environ == {"H3_CACHE_DIR": "/disk", "H3_RECIPE": "fp8", "NCCL_DEBUG": "INFO", "HOME": "/home/ray"}


def test_an_interface_gives_its_address_to_gloo_and_nccl() -> None:
    loopback = network.interface_of("127.0.0.1")
    assert loopback is not None
    environ = {"H3_CLUSTER_INTERFACE": loopback, "H3_CLUSTER_HCA": "rocep1s0f0"}
    assert network.choose(environ, "192.0.2.1") == (loopback, "127.0.0.1")
    assert environ["GLOO_SOCKET_IFNAME"] == loopback and environ["NCCL_SOCKET_IFNAME"] == f"={loopback}"
    assert environ["NCCL_IB_HCA"] == "rocep1s0f0" and environ["VLLM_HOST_IP"] == "127.0.0.1"
    # Without a name: whatever carries the machine's address in Ray.
    assert network.choose({}, "127.0.0.9") == (loopback, "127.0.0.9")


def test_an_interface_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(
        SettingsError, match=r"H3_CLUSTER_INTERFACE=nosuch0: this machine has no such interface.*127\.0"
    ):
        network.interface_address("nosuch0")


def test_a_rank_that_is_not_reached_is_named_with_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "GLOO_SOCKET_IFNAME", "fabric0")
    listener = network.Listener("127.0.0.1")
    network.reach("127.0.0.1", {1: (listener.address, listener.port)}, 5)
    listener.close()
    with pytest.raises(
        ServerError, match=rf"rank 1 at 127\.0\.0\.1:{listener.port} is not reached from 127\.0\.0\.1 \(fabric0\)"
    ):
        network.reach("127.0.0.1", {1: (listener.address, listener.port)}, 5)
    # From an address that is no way there.
    with pytest.raises(ServerError, match="rank 3 at"):
        network.reach("192.0.2.77", {3: ("127.0.0.1", listener.port)}, 5)
