# SPDX-License-Identifier: Apache-2.0
"""The compose files as a compose program reads them: what it makes of a ``.env``, and what it refuses.

``compose-spec.json`` is the Compose Specification's own schema (github.com/compose-spec, Apache-2.0), unchanged.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema.validators import validator_for

ROOT = Path(__file__).resolve().parents[2]
FILES = ("compose.yaml", "compose.ascend.yaml")
CLUSTER = "compose.cluster.yaml"
ENOUGH = {"H3_ACCEPT_LICENSE": "yes", "VLLM_H3_CHECKPOINT": "/models/Mini Max H3", "VLLM_H3_MEMORY_LIMIT": "64g"}
JOINED = {
    "H3_CLUSTER_ADDRESS": "192.0.2.1:6379",
    "H3_CLUSTER_BIND": "192.0.2.2",
    "VLLM_H3_CLUSTER_TOKEN_FILE": "./ray token",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A clone in a folder with spaces, and the program that podman-compose asks for its version before it reads."""
    clone = tmp_path / "my clone"
    (clone / "launch").mkdir(parents=True)
    for file in (*FILES, CLUSTER):
        shutil.copy(ROOT / file, clone)
    shutil.copy(ROOT / "launch" / "no-api-key", clone / "launch")
    podman = tmp_path / "bin" / "podman"
    podman.parent.mkdir()
    podman.write_text("#!/bin/sh\necho 'podman version 4.9.3'\n")
    podman.chmod(0o755)
    return clone


def config(folder: Path, file: str, env_text: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / ".env").write_text(env_text)
    return subprocess.run(
        [sys.executable, str(Path(sys.executable).parent / "podman-compose"), "-f", file, *words, "config"],
        cwd=folder,
        env={"PATH": f"{folder.parent / 'bin'}:{os.environ['PATH']}", "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def env(values: dict[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in values.items())


def read(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = yaml.safe_load(done.stdout)
    return found


@pytest.mark.parametrize("file", (*FILES, CLUSTER))
def test_the_file_is_one_by_the_specifications_schema(file: str) -> None:
    schema = json.loads((Path(__file__).parent / "compose-spec.json").read_text(encoding="utf-8"))
    check = validator_for(schema)(schema)
    document = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
    assert [f"{list(fault.absolute_path)}: {fault.message}" for fault in check.iter_errors(document)] == []
    document["services"]["server"] = {"imge": "a typo"}
    assert list(check.iter_errors(document))


@pytest.mark.parametrize("file", FILES)
def test_a_filled_env_is_enough_and_a_path_with_spaces_stays_whole(folder: Path, file: str) -> None:
    cards = ("--profile", "cards-2") if "ascend" in file else ()
    services = read(config(folder, file, env(ENOUGH), *cards))["services"]
    servers = {name: service for name, service in services.items() if name.startswith("server")}
    assert servers
    for server in servers.values():
        (checkpoint,) = (mount for mount in server["volumes"] if mount["target"] == "/checkpoint")
        assert checkpoint["source"] == "/models/Mini Max H3" and checkpoint["read_only"] is True
        assert [str(port) for port in server["ports"]] == ["127.0.0.1:8000:8000"]
        assert server["environment"]["H3_API_KEY_FILE"] in ("", None)


@pytest.mark.parametrize(
    ("file", "name", "sentence"),
    [
        ("compose.yaml", "H3_ACCEPT_LICENSE", "accepted the licence"),
        ("compose.yaml", "VLLM_H3_CHECKPOINT", "FL2VA and Ref2VA"),
        ("compose.ascend.yaml", "H3_ACCEPT_LICENSE", "accepted the licence"),
        ("compose.ascend.yaml", "VLLM_H3_CHECKPOINT", "FL2VA and Ref2VA"),
        ("compose.ascend.yaml", "VLLM_H3_MEMORY_LIMIT", "how much memory"),
        (CLUSTER, "H3_ACCEPT_LICENSE", "accepted the licence"),
        (CLUSTER, "H3_CLUSTER_ADDRESS", "the head's private address"),
        (CLUSTER, "H3_CLUSTER_BIND", "this machine's own address"),
        (CLUSTER, "VLLM_H3_CLUSTER_TOKEN_FILE", "Ray's token"),
    ],
)
def test_a_required_variable_that_is_missing_refuses_with_a_sentence(
    folder: Path, file: str, name: str, sentence: str
) -> None:
    done = config(folder, file, env({key: value for key, value in {**ENOUGH, **JOINED}.items() if key != name}))
    assert done.returncode != 0
    said = done.stderr.splitlines()[-1]
    assert name in said and sentence in said and ".env" in said


def test_a_key_file_reaches_the_server_as_a_secret(folder: Path) -> None:
    values = {**ENOUGH, "VLLM_H3_API_KEY_FILE": "./api key", "VLLM_H3_PORT": "9000", "VLLM_H3_BIND": "0.0.0.0"}
    (folder / "api key").write_text("k" * 32)
    found = read(config(folder, "compose.yaml", env(values)))
    server = found["services"]["server"]
    assert server["environment"]["H3_API_KEY_FILE"] == "/run/secrets/api_key"
    assert [str(port) for port in server["ports"]] == ["0.0.0.0:9000:8000"]
    assert Path(found["secrets"]["api_key"]["file"]).name == "api key"


def test_both_machines_of_a_cluster_read_their_env(folder: Path) -> None:
    found = read(config(folder, CLUSTER, env({**ENOUGH, **JOINED})))
    for service in found["services"].values():
        assert service["environment"]["H3_CLUSTER_ADDRESS"] == "192.0.2.1:6379"
        assert service["environment"]["H3_CLUSTER_BIND"] == "192.0.2.2"
        assert service["network_mode"] == "host"
    assert found["services"]["head"]["command"][1:3] == ["spark-2", "--checkpoint"]
    assert Path(found["secrets"]["ray_token"]["file"]).name == "ray token"
