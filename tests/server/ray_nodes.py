# SPDX-License-Identifier: Apache-2.0
"""Ray nodes of one machine, told apart by loopback addresses.

127.0.0.1 is not among them: Ray takes it for the machine's own address on its network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.ports import own_port

HEAD = "127.0.0.2"
_RAY = Path(sys.executable).with_name("ray")
_QUICK = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A node that does not answer is given up after 5 s instead of 15.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
}


class Node:
    """One ``ray start --block`` with all that it started."""

    def __init__(self, address: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.address = address
        self._process = process
        self.log = log

    @property
    def processes(self) -> list[psutil.Process]:
        """Of this node, ranks included."""
        try:
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """Let it say goodbye, then end what is left."""
        left = self.processes
        for process in left:
            if "raylet" in _name(process):
                _signal(process, signal.SIGTERM)
        self._process.terminate()
        psutil.wait_procs(left, timeout=10)
        self.kill(left)

    def kill(self, processes: list[psutil.Process] | None = None) -> None:
        """End all at once, as a loss of power does."""
        processes = self.processes if processes is None else processes
        for process in processes:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(processes, timeout=10)
        self._process.wait(10)


class RayNodes:
    """A cluster with one node; others join it."""

    def __init__(self, head: str = HEAD) -> None:
        self._head = head
        self._folder = Path(tempfile.mkdtemp(prefix="h3ray", dir="/tmp"))  # paths of sockets must be short
        self._nodes: list[Node] = []
        self.port = own_port(head)
        self.address = f"{head}:{self.port}"

    def start_head(self, **environment: str) -> Node:
        """The node that the server is on."""
        client = f"--ray-client-server-port={own_port(self._head)}"
        ports = (f"--port={self.port}", client, f"--temp-dir={self._folder}/ray")
        node = self._start(
            self._head, "--head", "--include-dashboard=false", "--disable-usage-stats", *ports, **environment
        )
        self._wait(node, lambda: b"Ray runtime started" in node.log.read_bytes())
        return node

    def add(self, address: str, prefix: Sequence[str] = (), **environment: str) -> Node:
        """Another one; ``prefix`` is what runs the command elsewhere, as in a network namespace."""
        node = self._start(address, f"--address={self.address}", prefix=prefix, **environment)
        self._wait(node, lambda: b"Ray runtime started" in node.log.read_bytes())
        return node

    def _start(self, address: str, *words: str, prefix: Sequence[str] = (), **environment: str) -> Node:
        log = self._folder / f"{address}-{len(self._nodes)}.log"
        # Free ports, and not a range from 10002 up that the nodes of another run on this machine take from as well.
        ports = ("--min-worker-port=0", "--max-worker-port=0")
        sizes = ("--num-cpus=1", "--num-gpus=0", "--object-store-memory=80000000", *ports)
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*prefix, str(_RAY), "start", "--block", f"--node-ip-address={address}", *sizes, *words],
                env={**os.environ, **_QUICK, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        node = Node(address, process, log)
        self._nodes.append(node)
        return node

    def _wait(self, node: Node, reached: Callable[[], bool], seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            assert node.processes and time.monotonic() < deadline, node.log.read_text()
            time.sleep(0.2)

    def close(self) -> None:
        """Everything is gone afterwards."""
        for node in reversed(self._nodes):
            node.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
