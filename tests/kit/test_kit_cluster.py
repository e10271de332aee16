# SPDX-License-Identifier: Apache-2.0
"""compose.cluster.yaml: what each machine starts, and in which order, and with every port named."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.kit.test_kit_containers import CLUSTER, ROOT, SET, services

PROGRAMS = ("vllm-h3", "ray")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Stand-ins that write down how they were called; ``fail`` holds the words at which one ends with code 3."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in PROGRAMS:
        script = folder / name
        script.write_text(
            f'#!/bin/sh\necho "{name} $*" >> "{tmp_path}/calls"\n'
            f'if [ -f "{tmp_path}/fail" ]; then case "{name} $*" in $(cat "{tmp_path}/fail")) exit 3;; esac; fi\n'
        )
        script.chmod(0o755)
    return folder


def run(service: str, programs: Path, **values: str) -> tuple[int, list[str]]:
    """Run a service's own entrypoint and command as an engine would; its exit code, and every call that it made."""
    found = services(CLUSTER, {**SET, **values})[service]
    words = [*found["entrypoint"], *(word.replace("$$", "$") for word in found["command"])]
    environ = {name: str(value) for name, value in found["environment"].items()}
    path = f"{programs}:{os.environ['PATH']}"
    done = subprocess.run(words, env={**environ, "PATH": path}, capture_output=True, text=True, check=False)
    calls = programs.parent / "calls"
    return done.returncode, calls.read_text().splitlines() if calls.exists() else []


def test_the_head_checks_starts_ray_checks_the_cluster_and_serves(programs: Path) -> None:
    code, calls = run("head", programs)
    assert code == 0
    assert [re.match(r"\S+ \S+", call)[0] for call in calls] == [  # type: ignore[index]
        "vllm-h3 serve",
        "ray start",
        "vllm-h3 preflight",
        "vllm-h3 serve",
    ]
    serve = "vllm-h3 serve spark-2 --checkpoint /checkpoint/FL2VA --address 127.0.0.1 --port 8000"
    assert (calls[0], calls[3]) == (f"{serve} --dry-run", serve)
    assert calls[2] == ("vllm-h3 preflight --cluster --profile spark-2 --checkpoint /checkpoint/FL2VA --least-gbit 40")
    assert "--head" in calls[1].split() and "--node-ip-address=192.0.2.2" in calls[1] and "--port=6379" in calls[1]


@pytest.mark.parametrize(("at", "calls"), [("*--dry-run", 1), ("ray*", 2), ("*--cluster*", 3)])
def test_what_is_refused_ends_the_start_there(programs: Path, at: str, calls: int) -> None:
    (programs.parent / "fail").write_text(at)
    code, made = run("head", programs)
    assert (code, len(made)) == (3, calls)


def test_the_worker_joins_and_stays(programs: Path) -> None:
    code, (call,) = run("worker", programs)
    words = call.split()
    assert code == 0 and words[:2] == ["ray", "start"] and "--block" in words and "--head" not in words
    assert "--address=192.0.2.1:6379" in words and "--node-ip-address=192.0.2.2" in words


def test_variables_reach_the_server_and_a_value_is_never_a_command(programs: Path) -> None:
    _, calls = run(
        "head", programs, VLLM_H3_PARTITION="Ref2VA; touch x", VLLM_H3_PROFILE="mine", VLLM_H3_LEAST_GBIT="8"
    )
    assert "serve mine --checkpoint /checkpoint/Ref2VA; touch x --address" in calls[3] and "--least-gbit 8" in calls[2]


def test_every_port_of_rays_is_fixed_and_there_is_no_dashboard(programs: Path) -> None:
    for service in ("head", "worker"):
        _, calls = run(service, programs)
        (call,) = (call for call in calls if call.startswith("ray start"))
        given = dict(re.findall(r"--(\S*port)=(\d+)", call))
        assert {"node-manager-port", "object-manager-port", "min-worker-port", "max-worker-port"} <= set(given)
        numbers = [int(number) for number in given.values()]
        assert len(set(numbers)) == len(numbers) and all(6379 <= number <= 6499 for number in numbers)
        assert "--disable-usage-stats" in call
        (programs.parent / "calls").unlink()
    assert "--include-dashboard=false" in (ROOT / CLUSTER).read_text()


@pytest.mark.parametrize("service", ["head", "worker"])
def test_ray_asks_for_the_token_of_a_file(service: str) -> None:
    found = services(CLUSTER)[service]
    assert found["environment"]["RAY_AUTH_MODE"] == "token"
    assert found["environment"]["RAY_AUTH_TOKEN_PATH"] == "/run/secrets/ray_token"
    assert "ray_token" in found["secrets"] and "ray_token" in yaml.safe_load((ROOT / CLUSTER).read_text())["secrets"]
    # An environment that `docker inspect` shows holds no secret.
    assert "RAY_AUTH_TOKEN" not in found["environment"]


def test_a_refused_head_ends_and_a_worker_comes_back() -> None:
    found = services(CLUSTER)
    assert (found["head"]["restart"], found["worker"]["restart"]) == ("on-failure:3", "unless-stopped")
    assert found["head"]["healthcheck"]["test"][:4] == ["CMD", "vllm-h3", "health", "--url"]
    assert found["worker"]["healthcheck"]["test"][:3] == ["CMD", "ray", "health-check"]
    assert int(found["head"]["stop_grace_period"].removesuffix("s")) > 20


@pytest.mark.parametrize("service", ["head", "worker"])
def test_both_have_gpu_fabric_and_locked_memory(service: str) -> None:
    found = services(CLUSTER)[service]
    (device,) = found["deploy"]["resources"]["reservations"]["devices"]
    assert {"gpu", "compute", "utility", "video"} <= set(device["capabilities"])
    assert found["devices"] == ["/dev/infiniband:/dev/infiniband"] and found["ulimits"] == {"memlock": -1}
    assert "ports" not in found and found["network_mode"] == "host"
