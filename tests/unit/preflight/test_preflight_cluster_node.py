# SPDX-License-Identifier: Apache-2.0
"""What a node of a cluster says of itself, and whether two checkpoints are told apart."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.checkpoint.same_files import different, file_digests, total_digest
from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.preflight.cluster import node as on_node
from vllm_h3_plugin.preflight.cluster.facts import Asked, NodeFacts
from vllm_h3_plugin.preflight.cluster.run import exchange_of


def test_a_node_tells_of_its_checkpoint_and_its_answer_survives_json(checkpoint: Path) -> None:
    answer = json.loads(on_node.facts_json(json.dumps(asdict(Asked(str(checkpoint), None, "fp8")))))
    found = NodeFacts.read(answer)
    assert isinstance(found.checkpoint, Mapping) and "FL2VA/model_index.json" in found.checkpoint
    assert isinstance(found.recipe, Mapping) and found.recipe["name"] == "fp8"
    assert found.need_bytes and found.available_bytes and len(found.plugin["content"]) == 64


def test_a_node_without_checkpoint_or_recipe_says_so(tmp_path: Path) -> None:
    found = NodeFacts.read(on_node.facts(Asked(str(tmp_path / "none"), None, str(tmp_path / "no.json"))))
    assert isinstance(found.checkpoint, Unknown) and "none" in found.checkpoint.reason
    assert isinstance(found.recipe, Unknown) and "no.json" in found.recipe.reason
    assert found.need_bytes is None


@pytest.mark.parametrize("whole", [False, True])
def test_one_byte_more_or_less_names_its_file_and_times_do_not_matter(
    pristine: Path, tmp_path: Path, whole: bool
) -> None:
    copy = tmp_path / "H3"
    shutil.copytree(pristine, copy)
    mine = file_digests(take_inventory(pristine / "FL2VA"), whole=whole)
    os.utime(next(copy.rglob("*.safetensors")), (1, 1))
    assert different(mine, file_digests(take_inventory(copy / "FL2VA"), whole=whole)) == []
    for pattern in ("*.safetensors", "tokenizer*.json", "*.py"):
        file = max(copy.rglob(pattern), key=lambda path: path.stat().st_size)
        raw = bytearray(file.read_bytes())
        raw[-3] ^= 1
        file.write_bytes(raw)
        its = file_digests(take_inventory(copy / "FL2VA"), whole=whole)
        assert different(mine, its) == [str(file.relative_to(copy))]
        assert total_digest(mine) != total_digest(its)
        raw[-3] ^= 1
        file.write_bytes(raw)


def made_sysfs(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_an_interface_is_read_from_sysfs(tmp_path: Path) -> None:
    net = made_sysfs(
        tmp_path, {"lo/operstate": "unknown\n", "lo/mtu": "65536", "cx7/operstate": "down\n", "cx7/speed": "-1"}
    )
    assert on_node.interface("lo", net)["up"] is True and "127.0.0.1" in on_node.interface("lo", net)["addresses"]
    down = on_node.interface("cx7", net)
    assert (down["up"], down["mbit"], down["known"]) == (False, 0, ["cx7", "lo"])
    assert on_node.interface("none", net)["up"] is False
    assert "name" not in on_node.interface(None, net)


def test_an_hca_is_active_if_one_of_its_ports_is(tmp_path: Path) -> None:
    ports = made_sysfs(
        tmp_path,
        {
            "mlx5_0/ports/1/state": "1: DOWN\n",
            "mlx5_0/ports/2/state": "4: ACTIVE\n",
            "mlx5_0/ports/2/rate": "200 Gb/sec (4X HDR)\n",
        },
    )

    def states(names: str) -> list[str]:
        return [device["state"] for device in on_node.hca(names, ports)["devices"]]

    assert states("mlx5_0") == ["4: ACTIVE"] and states("=mlx5_0:1") == ["1: DOWN"] and states("mlx5_1") == [""]
    assert states("mlx5_0:2,mlx5_0:1") == ["4: ACTIVE", "1: DOWN"]
    assert on_node.hca(None, ports) == on_node.hca("^mlx5_2", ports) == {"known": ["mlx5_0"]}


def test_a_node_may_have_its_checkpoint_elsewhere(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H3_CLUSTER_CHECKPOINT", str(checkpoint))
    found = NodeFacts.read(on_node.facts(Asked("/not/here", None, "fp8")))
    assert isinstance(found.checkpoint, Mapping) and found.checkpoint


def test_the_exchange_has_the_widths_of_the_checkpoint_or_of_the_real_model(checkpoint: Path) -> None:
    real = exchange_of(None)
    assert (real.width, real.blocks) == (56 * 128, 50) and real.rows > 30_000
    assert exchange_of(checkpoint).blocks == 1 and exchange_of(checkpoint.parent / "none") == real
