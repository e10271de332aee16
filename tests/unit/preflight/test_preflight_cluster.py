# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 preflight --cluster`` on two made-up nodes in good order, of which a test breaks one thing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from vllm_h3_plugin.cli import preflight_cluster as verb
from vllm_h3_plugin.cli.main import main
from vllm_h3_plugin.errors import ServerError, ToolMissingError
from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.preflight.cluster.by_ray import RayCluster
from vllm_h3_plugin.preflight.cluster.facts import Asked, ClockReading, Exchange, Link, NodeFacts, NodeName
from vllm_h3_plugin.preflight.cluster.run import Limits, check_cluster

GIB = 2**30
A, B = NodeName("a", "192.0.2.1", "spark-a", True, 1), NodeName("b", "192.0.2.2", "spark-b", False, 1)
EXCHANGE = Exchange(38_000, 7168, 50, "124 frames at 1344x768")
ASKED = Asked("/checkpoint/FL2VA", None, "fp8", cuda=True)
LIMITS = Limits(2, 5.0, 5.0, 40.0)
FAST = Link("nccl", 136_000_000, 0.006, 0.006, 20e-6)


def devices(name: str, state: str, *known: str) -> dict[str, Any]:
    made = {"name": name, "device": name.partition(":")[0], "state": state, "rate": "200 Gb/sec (4X HDR)"}
    return {"names": name, "known": list(known), "devices": [made]}


def facts(address: str) -> NodeFacts:
    return NodeFacts(
        plugin={"version": "0.1.0", "content": "c" * 64},
        image={"revision": "r" * 40, "base": "vllm@sha256:" + "b" * 64, "image_lock_sha256": "1" * 64},
        packages={"vllm": "0.30.0", "vllm-omni": "0.30.0", "torch": "2.13.0", "ray": "2.60.0"},
        recipe={"name": "fp8", "sha256": "f" * 64},
        checkpoint={"FL2VA/transformer/1.safetensors": "11", "FL2VA/model_index.json": "22"},
        interface={
            "name": "cx7",
            "known": ["cx7", "lo"],
            "up": True,
            "addresses": [address],
            "mtu": 9000,
            "mbit": 200000,
        },
        hca=devices("rocep1s0f0", "4: ACTIVE", "rocep1s0f0"),
        available_bytes=110 * GIB,
        need_bytes=58 * GIB,
        token=True,
    )


@dataclass
class MadeCluster:
    """Answers of two nodes."""

    names: Sequence[NodeName] = (A, B)
    answers: dict[str, NodeFacts | Unknown] = field(
        default_factory=lambda: {"a": facts("192.0.2.1"), "b": facts("192.0.2.2")}
    )
    offsets: dict[str, ClockReading | Unknown] = field(
        default_factory=lambda: {"a": ClockReading(0.0, 0.001), "b": ClockReading(0.01, 0.002)}
    )
    measured: dict[str, Link | Unknown] = field(default_factory=lambda: {"a": FAST, "b": FAST})
    asked_for: list[str] = field(default_factory=list)

    def nodes(self, wanted: int, wait_s: float) -> Sequence[NodeName]:
        return self.names

    def facts(self, asked: Asked, deadline_s: float) -> Mapping[str, NodeFacts | Unknown]:
        return {name.id: self.answers[name.id] for name in self.names}

    def clocks(self, deadline_s: float) -> Mapping[str, ClockReading | Unknown]:
        return self.offsets

    def links(self, exchange: Exchange, deadline_s: float) -> Mapping[str, Link | Unknown]:
        self.asked_for.append("link")
        return self.measured

    def close(self) -> None:
        return

    def change(self, **update: Any) -> None:
        found = self.answers["b"]
        assert isinstance(found, NodeFacts)
        self.answers["b"] = replace(found, **update)


@pytest.fixture
def cluster() -> MadeCluster:
    return MadeCluster()


def faults(cluster: MadeCluster) -> dict[tuple[str, str], tuple[str, str]]:
    """(node, check) -> what was found and the way out, of every check that failed."""
    report = check_cluster(cluster, ASKED, EXCHANGE, LIMITS)
    assert report.ok == all(check.state.value != "fail" for check in report.checks)
    rows = [("", report.whole), *((name.host, checks) for name, checks in report.nodes)]
    return {
        (where, check.name): (check.detail, check.remedy)
        for where, checks in rows
        for check in checks
        if check.state.value == "fail"
    }


def test_two_nodes_in_good_order_pass_every_check(cluster: MadeCluster) -> None:
    report = check_cluster(cluster, ASKED, EXCHANGE, LIMITS)
    assert report.ok and not report.skipped
    assert {check.state.value for check in report.checks} == {"pass"}
    (_, mine), (_, its) = report.nodes
    assert [check.name for check in mine] == [check.name for check in its]
    assert len(mine) == 13


FAULTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "plugin": ({"plugin": {"version": "0.2.0", "content": "d" * 64}}, "plugin", "0.2.0 (dddd", "docker save"),
    "content": ({"plugin": {"version": "0.1.0", "content": "d" * 64}}, "plugin", "(cccc", "docker save"),
    "image": ({"image": {}}, "image", "no image; this machine has rrrr", "docker save"),
    "host": (
        {"packages": {"vllm": "0.30.0", "vllm-omni": "0.30.0", "torch": "2.12.0", "ray": "2.60.0"}},
        "host",
        "torch 2.12.0; this machine has torch 2.13.0",
        "docker save",
    ),
    "ray": (
        {"packages": {"vllm": "0.30.0", "vllm-omni": "0.30.0", "torch": "2.13.0", "ray": "2.59.0"}},
        "Ray",
        "2.59.0; this machine has 2.60.0",
        "docker save",
    ),
    "recipe": ({"recipe": {"name": "fp8", "sha256": "e" * 64}}, "recipe", "fp8 (eeee", "same path"),
    "no recipe": ({"recipe": Unknown("recipe mine.json is not there")}, "recipe", "mine.json", "--recipe"),
    "one byte": (
        {"checkpoint": {"FL2VA/transformer/1.safetensors": "10", "FL2VA/model_index.json": "22"}},
        "checkpoint",
        "not the files of 192.0.2.1 (spark-a): FL2VA/transformer/1.safetensors differs",
        "rsync -a --checksum",
    ),
    "a file less": (
        {"checkpoint": {"FL2VA/model_index.json": "22"}},
        "checkpoint",
        "FL2VA/transformer/1.safetensors is missing",
        "rsync",
    ),
    "no checkpoint": (
        {"checkpoint": Unknown("no checkpoint at /checkpoint")},
        "checkpoint",
        "no checkpoint",
        "own disk",
    ),
    "interface down": (
        {"interface": {"name": "cx7", "known": ["cx7"], "up": False, "addresses": [], "mtu": 1500, "mbit": 0}},
        "interface",
        "interface cx7 is down",
        "ip link set cx7 up",
    ),
    "no interface": (
        {"interface": {"name": "cx8", "known": ["cx7", "lo"], "up": False, "addresses": [], "mtu": 0, "mbit": 0}},
        "interface",
        "there is no cx8; there are cx7, lo",
        "H3_CLUSTER_INTERFACE",
    ),
    "another network": (
        {
            "interface": {
                "name": "cx7",
                "known": ["cx7"],
                "up": True,
                "addresses": ["198.51.100.2"],
                "mtu": 1,
                "mbit": 0,
            }
        },
        "interface",
        "Ray reaches the node at 192.0.2.2, which is not on cx7 (198.51.100.2)",
        "H3_CLUSTER_BIND",
    ),
    "no HCA": (
        {"hca": devices("mlx5_0", "")},
        "HCA",
        "none at all",
        "/dev/infiniband",
    ),
    "another HCA": (
        {"hca": devices("mlx5_9:1", "", "mlx5_0")},
        "HCA",
        "there is no mlx5_9; there are mlx5_0",
        "H3_CLUSTER_HCA",
    ),
    "HCA down": (
        {"hca": devices("mlx5_0", "1: DOWN", "mlx5_0")},
        "HCA",
        "mlx5_0 is DOWN",
        "ibv_devinfo",
    ),
    "memory": ({"available_bytes": 20 * GIB}, "memory", "20.0 GiB free, the model takes 58.0 GiB", "docker ps"),
    "token": ({"token": False}, "access", "may run any code", "RAY_AUTH_MODE=token"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_node_that_differs_fails_in_its_own_words_and_the_other_does_not(cluster: MadeCluster, name: str) -> None:
    change, check, detail, remedy = FAULTS[name]
    cluster.change(**change)
    found = faults(cluster)
    assert list(found) == [("spark-b", check)]
    assert detail in found["spark-b", check][0] and remedy in found["spark-b", check][1]


@pytest.mark.parametrize("name", ["interface down", "no HCA", "host"])
def test_a_link_that_cannot_be_is_not_waited_for(cluster: MadeCluster, name: str) -> None:
    cluster.change(**FAULTS[name][0])
    report = check_cluster(cluster, ASKED, EXCHANGE, LIMITS)
    assert (dict(report.skipped), cluster.asked_for) == ({"link": FAULTS[name][1]}, [])


def test_a_clock_that_is_off_fails_and_one_that_cannot_be_read_that_well_does_not(cluster: MadeCluster) -> None:
    cluster.offsets["b"] = ClockReading(-3.0, 0.01)
    assert "-3.000 s" in faults(cluster)["spark-b", "clock"][0]
    cluster.offsets["b"] = ClockReading(-3.0, 2.5)
    assert faults(cluster) == {}


def test_a_slow_link_fails_with_what_it_costs(cluster: MadeCluster) -> None:
    cluster.measured["b"] = replace(FAST, all_to_all_s=1.088)
    detail, remedy = faults(cluster)["spark-b", "link"]
    assert "1.0 Gbit/s" in detail and "take 218 s" in detail and "40 Gbit/s are asked for" in detail
    assert "--least-gbit" in remedy


def test_a_node_without_a_gpu_is_told_before_the_link_is_measured(cluster: MadeCluster) -> None:
    cluster.names = (A, replace(B, gpus=0))
    detail, remedy = faults(cluster)["spark-b", "GPU"]
    assert detail == "Ray has no GPU to hand out there" and "--num-gpus=1" in remedy
    assert cluster.asked_for == []


def test_a_link_that_was_measured_without_the_gpu_is_none(cluster: MadeCluster) -> None:
    cluster.measured["b"] = replace(FAST, backend="gloo")
    assert faults(cluster)["spark-b", "link"][0] == "torch sees no GPU there, so it was measured by gloo"


def test_a_link_that_does_not_come_up_says_why(cluster: MadeCluster) -> None:
    cluster.measured = {"a": Unknown("no answer within 5 s"), "b": Unknown("Connection refused")}
    found = faults(cluster)
    assert found["spark-b", "link"][0] == "Connection refused" and "firewall" in found["spark-a", "link"][1]


def test_a_missing_node_is_counted(cluster: MadeCluster) -> None:
    cluster.names = (A,)
    cluster.answers.pop("b")
    detail, remedy = faults(cluster)["", "nodes"]
    assert detail == "1 of 2 nodes joined within 5 s" and "up -d worker" in remedy


def test_a_node_that_hangs_is_named_and_nothing_else_waits_for_it(cluster: MadeCluster) -> None:
    cluster.answers["b"] = Unknown("no answer within 5 s")
    report = check_cluster(cluster, ASKED, EXCHANGE, LIMITS)
    assert cluster.asked_for == []
    assert list(report.skipped) == ["clock", "link"]
    assert faults(cluster)["spark-b", "answer"][0] == "192.0.2.2 (spark-b): no answer within 5 s"


def test_what_is_not_named_is_told(cluster: MadeCluster) -> None:
    """The executor takes the interface of the node's address; which HCA NCCL takes is its own choice."""
    cluster.change(interface={"known": ["cx7"], "addresses": {"cx7": ["192.0.2.2"]}}, hca={"known": ["mlx5_0"]})
    report = check_cluster(cluster, ASKED, EXCHANGE, LIMITS)
    its = {check.name: check for check in report.nodes[1][1]}
    assert report.ok and its["interface"].detail == "none is named: cx7, which has 192.0.2.2"
    assert its["HCA"].state.value == "warn" and "H3_CLUSTER_HCA=mlx5_0" in its["HCA"].remedy
    cluster.change(interface={"known": ["cx7"], "addresses": {"cx7": ["192.0.2.9"]}})
    (warned,) = (
        check
        for check in check_cluster(cluster, ASKED, EXCHANGE, LIMITS).checks
        if check.name == "interface" and check.state.value == "warn"
    )
    assert "no interface of this node has 192.0.2.2" in warned.detail and "H3_CLUSTER_INTERFACE" in warned.remedy


# --- the verb


@pytest.fixture
def run(
    cluster: MadeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, dict[str, Any]]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "this_cluster", lambda values, asked: cluster)

    def run(*words: str) -> tuple[int, str, dict[str, Any]]:
        with pytest.raises(SystemExit) as ended:
            main(["preflight", "--cluster", *words, "--json"])
        out = capsys.readouterr().out
        return int(ended.value.code or 0), out, json.loads(out.splitlines()[-1])

    return run


def test_the_table_has_a_row_for_each_node_and_no_cell_is_cut(run: Callable[..., Any]) -> None:
    code, out, answer = run()
    rows = [line for line in out.splitlines() if line.startswith("192.0.2.")]
    assert code == 0 and answer["ok"] and len(rows) == 2
    assert rows[0].startswith("192.0.2.1 (spark-a) *") and [row.split().count("ok") for row in rows] == [12, 12]
    assert [node["host"] for node in answer["nodes"]] == ["spark-a", "spark-b"]


def test_a_fault_stands_in_the_table_below_it_and_in_the_json(run: Callable[..., Any], cluster: MadeCluster) -> None:
    cluster.change(available_bytes=GIB)
    code, out, answer = run()
    assert code == 1 and not answer["ok"]
    assert "FAIL 192.0.2.2 (spark-b) memory: 1.0 GiB free" in out and "these machines are not ready" in out
    (check,) = (check for check in answer["nodes"][1]["checks"] if check["state"] == "fail")
    assert check["name"] == "memory" and check["remedy"]


def test_without_ray_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ToolMissingError, match="Ray is not installed") as caught:
        RayCluster("127.0.0.1:1", None, ASKED, 1.0)
    assert "CLUSTER=1" in caught.value.fix


@pytest.mark.host
@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:port"])
def test_an_address_at_which_nothing_answers_is_named(address: str) -> None:
    with pytest.raises(ServerError, match=f"no Ray cluster answers at {address}") as caught:
        RayCluster(address, None, ASKED, 1.0)
    assert "up -d head" in caught.value.fix


def test_the_address_is_the_one_that_was_named_or_that_ray_wrote_down(tmp_path: Path) -> None:
    written = tmp_path / "ray_current_cluster"
    assert verb.cluster_address(None, written) == "127.0.0.1:6379"
    written.write_text("192.0.2.1:6379\n")
    assert verb.cluster_address(None, written) == "192.0.2.1:6379"
    assert verb.cluster_address("192.0.2.9:1", written) == "192.0.2.9:1"
