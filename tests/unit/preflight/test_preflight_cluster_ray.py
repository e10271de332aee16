# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 preflight --cluster`` on two real Ray nodes of this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.preflight.ray_nodes import ROOT, RayNodes, processes
from vllm_h3_plugin import __version__

pytestmark = pytest.mark.host
Ask = Callable[..., tuple[subprocess.CompletedProcess[str], dict[str, Any]]]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """The head; a test adds the second."""
    with tempfile.TemporaryDirectory(prefix="h3-ray-") as folder:
        started = RayNodes(Path(folder))
        try:
            started.start("127.0.0.2", H3_CLUSTER_INTERFACE="lo")
            yield started
        finally:
            started.stop()


@pytest.fixture
def ask(nodes: RayNodes, pristine: Path) -> Ask:
    """Run the verb as a person would, in a process of its own."""

    def run(*words: str, **more: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        command = (
            "-c",
            "from vllm_h3_plugin.cli import main; main()",
            "preflight",
            "--cluster",
            "--profile",
            "reference",
        )
        done = subprocess.run(
            [sys.executable, *command, "-c", str(pristine / "FL2VA"), *words, "--json"],
            env={
                **os.environ,
                **nodes.environment,
                "PYTHONPATH": str(ROOT),
                "H3_CLUSTER_ADDRESS": nodes.address,
                "H3_CLUSTER_BIND": "127.0.0.2",
                **more,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        line = done.stdout.splitlines()[-1] if done.stdout else "{}"
        return done, json.loads(line)

    return run


def checks(answer: dict[str, Any], address: str) -> dict[str, dict[str, str]]:
    (node,) = (node for node in answer["nodes"] if node["address"] == address)
    return {check["name"]: check for check in node["checks"]}


def states(answer: dict[str, Any], address: str) -> dict[str, str]:
    return {name: check["state"] for name, check in checks(answer, address).items()}


def another_version(folder: Path) -> Path:
    """A copy of the plugin that says that it is another version, for PYTHONPATH."""
    shutil.copytree(ROOT / "vllm_h3_plugin", folder / "vllm_h3_plugin", ignore=shutil.ignore_patterns("__pycache__"))
    module = folder / "vllm_h3_plugin" / "__init__.py"
    text = module.read_text(encoding="utf-8")
    assert f'"{__version__}"' in text
    module.write_text(text.replace(f'"{__version__}"', '"9.9.9"'), encoding="utf-8")
    return folder


def one_byte_off(pristine: Path, root: Path) -> Path:
    """A copy of the checkpoint in which one weight's last bit differs."""
    shutil.copytree(pristine, root)
    shard = max(root.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    return root / "FL2VA"


def test_one_node_alone_two_that_agree_one_that_differs_and_one_that_hangs(
    nodes: RayNodes, ask: Ask, pristine: Path, tmp_path: Path
) -> None:
    done, answer = ask(H3_CLUSTER_START_S="0.5")
    assert done.returncode == 1 and "1 of 2 nodes joined within 0.5 s" in done.stdout, done.stdout + done.stderr

    second = nodes.start("127.0.0.3", H3_CLUSTER_INTERFACE="lo")
    done, answer = ask("--deadline", "600")
    assert (done.returncode, answer["ok"]) == (0, True), done.stdout + done.stderr
    for address in ("127.0.0.2", "127.0.0.3"):
        found = states(answer, address)
        assert set(found.values()) == {"pass"}
        assert {"plugin", "image", "host", "Ray", "recipe", "checkpoint", "interface", "HCA"} <= set(found)
        assert {"memory", "access", "clock", "link"} <= set(found)
    assert [node["here"] for node in answer["nodes"]] == [True, False]
    assert "by gloo" in done.stdout

    other = one_byte_off(pristine, tmp_path / "H3")
    nodes.start("127.0.0.4", PYTHONPATH=str(another_version(tmp_path)), H3_CLUSTER_CHECKPOINT=str(other))
    done, answer = ask("--nodes", "3", "--deadline", "600")
    assert done.returncode == 1, done.stdout + done.stderr
    found = checks(answer, "127.0.0.4")
    assert "9.9.9" in found["plugin"]["detail"] and __version__ in found["plugin"]["detail"]
    assert ".safetensors differs" in found["checkpoint"]["detail"]
    # What the link gives between three nodes on a busy machine is not what is asked here.
    failed = {name for name, check in found.items() if check["state"] == "fail"} - {"link"}
    assert failed == {"plugin", "checkpoint"}, found
    assert "fail" not in states(answer, "127.0.0.3").values()

    stopped = processes(second)
    for process in stopped:
        process.suspend()
    done, answer = ask("--deadline", "20")
    assert done.returncode == 1
    assert "127.0.0.3" in done.stdout and "no answer within 20 s" in done.stdout, done.stdout + done.stderr


def test_a_caller_without_the_token_is_told_so(nodes: RayNodes, ask: Ask, tmp_path: Path) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("1" * 64)
    done, _ = ask(RAY_AUTH_TOKEN_PATH=str(wrong))
    assert done.returncode == 7
    assert "does not take this caller" in done.stderr and "RAY_AUTH_TOKEN_PATH" in done.stderr
