# SPDX-License-Identifier: Apache-2.0
"""A machine that is made of answers: a DGX Spark in good order, of which a test breaks one thing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_h3_plugin.pins import load_pins
from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.preflight.machine import Disk, Kernel, LocalMachine, Memory, Ran

GIB = 2**30
IMAGE = load_pins().host("nvidia").image
PINNED = IMAGE.digest or ""
SPARK_GPU = "0, NVIDIA GB10, 580.173.02, 12.1, [N/A], [N/A]\n"
DOCKER_INFO = {
    "ServerVersion": "28.3.3",
    "Runtimes": {"io.containerd.runc.v2": {}, "nvidia": {}, "runc": {}},
    "Architecture": "aarch64",
    "DockerRootDir": "/var/lib/docker",
}
ASCEND_FILES = (
    "/dev/davinci_manager",
    "/dev/devmm_svm",
    "/dev/hisi_hdc",
    "/usr/local/dcmi",
    "/usr/local/Ascend/driver/lib64",
    "/usr/local/Ascend/driver/version.info",
    "/etc/ascend_install.info",
)
NPU_SMI_IDLE = "| No running processes found in NPU 0 |\n"
NPU_SMI_BUSY = (
    "| NPU     Chip | Process id | Process name | Process memory(MB) |\n| 0  0  | 4711  | python3 | 51234  |\n"
)


def manifest(digest: str = PINNED, *architectures: str) -> str:
    """What `docker buildx imagetools inspect` prints of an image index."""
    entries = [
        {"digest": f"sha256:{name:0<64}", "platform": {"os": "linux", "architecture": name}}
        for name in architectures or ("amd64", "arm64")
    ]
    return json.dumps({"digest": digest, "manifests": entries})


def healthy_commands() -> dict[str, Ran | Unknown]:
    """First words of a command -> its answer."""
    return {
        "timedatectl show": Ran(0, "yes\n"),
        "docker info": Ran(0, json.dumps(DOCKER_INFO)),
        "docker compose version": Ran(0, "2.39.1\n"),
        "docker image inspect": Ran(1, "", "Error: No such image"),
        "docker volume inspect": Ran(1, "", "Error: no such volume"),
        "docker buildx imagetools inspect": Ran(0, manifest()),
        "docker buildx version": Ran(0, "github.com/docker/buildx v0.27.0\n"),
        "nvidia-smi --query-gpu": Ran(0, SPARK_GPU),
        "nvidia-smi --query-compute-apps": Ran(0, ""),
        "npu-smi info": Unknown("npu-smi is not installed, or not on PATH"),
    }


@dataclass
class MadeMachine:
    """A ``Machine`` of answers. Files below a test's own folder are real."""

    commands: dict[str, Ran | Unknown] = field(default_factory=healthy_commands)
    environ: Mapping[str, str] = field(default_factory=lambda: {"H3_ACCEPT_LICENSE": "yes"})
    uname: Kernel = field(default_factory=lambda: Kernel("Linux", "6.14.0-1015-nvidia", "aarch64"))
    main_memory: Memory = field(default_factory=lambda: Memory(119 * GIB, 112 * GIB, 16 * GIB, 0))
    free_disk: int = 900 * GIB
    shm: int = 60 * GIB
    ports_taken: Sequence[int] = ()
    time: float = datetime(2026, 12, 1, 12, tzinfo=UTC).timestamp()
    files: dict[str, bytes] = field(default_factory=lambda: {"/etc/os-release": b'PRETTY_NAME="Ubuntu 24.04.3 LTS"\n'})
    present: Sequence[str] = ()
    devices: Sequence[str] = ()
    asked: list[str] = field(default_factory=list)

    def run(self, argv: Sequence[str], timeout_s: float = 15.0) -> Ran | Unknown:
        line = " ".join(argv)
        self.asked.append(line)
        for start, answer in self.commands.items():
            if line.startswith(start):
                return answer
        raise AssertionError(f"nobody said what `{line}` answers")

    def read(self, path: Path) -> bytes | Unknown:
        return self.files[str(path)] if str(path) in self.files else LocalMachine().read(path)

    def exists(self, path: Path) -> bool:
        return str(path) in self.files or str(path) in self.present or path.exists()

    def names(self, folder: Path) -> tuple[str, ...]:
        return tuple(self.devices) if folder == Path("/dev") else LocalMachine().names(folder)

    def disk(self, path: Path) -> Disk | Unknown:
        if str(path) == "/dev/shm":
            return Disk("/dev/shm", 2, self.shm, self.shm)
        return Disk("/", 1, 3600 * GIB, self.free_disk)

    def kernel(self) -> Kernel:
        return self.uname

    def memory(self) -> Memory:
        return self.main_memory

    def bind(self, address: str, port: int) -> str:
        return "Address already in use" if port in self.ports_taken else ""

    def now(self) -> float:
        return self.time


def docker_info(**changes: Any) -> Ran:
    """`docker info` with some keys changed."""
    return Ran(0, json.dumps({**DOCKER_INFO, **changes}))


@dataclass(frozen=True)
class Outcome:
    """One run of the verb."""

    code: int
    out: str
    answer: dict[str, Any]

    @property
    def states(self) -> dict[str, str]:
        return {check["name"]: check["state"] for check in self.answer["checks"]}

    @property
    def failed(self) -> list[str]:
        return [name for name, state in self.states.items() if state == "fail"]

    @property
    def warned(self) -> list[str]:
        return [name for name, state in self.states.items() if state == "warn"]

    def check(self, name: str) -> dict[str, str]:
        return next(check for check in self.answer["checks"] if check["name"] == name)


Preflight = Callable[..., Outcome]
