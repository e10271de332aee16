# SPDX-License-Identifier: Apache-2.0
"""Real Ray nodes on loopback addresses, ended by their own process ids."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[3]
START_S = 180
"""Generous: Ray's processes import for long on a machine that does much else."""


class RayNodes:
    """A head at ``127.0.0.2`` and whoever joins it, with one token for all.

    Addresses from .2 on: Ray takes 127.0.0.1 for "no address" and puts the machine's public one in its place.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = folder / "token"
        self.token.write_text("0" * 64)
        with socket.socket() as trial:
            trial.bind(("127.0.0.2", 0))
            self.port = int(trial.getsockname()[1])
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        """``HOST:PORT`` of the head."""
        return f"127.0.0.2:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of nodes and of whoever talks to them."""
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}
        # A node that a test has stopped is not to be given up meanwhile, however long this machine takes.
        return {**token, "RAY_health_check_failure_threshold": "10000"}

    def start(self, address: str, **more: str) -> subprocess.Popen[bytes]:
        """Start a node, the first one as the head, and wait until Ray says that it runs.

        Args:
            more: further variables of the node and of everything that it runs.
        """
        role = [f"--address={self.address}"]
        if not self._started:
            role = ["--head", f"--port={self.port}", "--include-dashboard=false", "--include-log-monitor=false"]
            # Sockets lie below it, and the path of one may have 107 characters.
            role.append(f"--temp-dir={self.folder}")
        log = self.folder / f"{address}.log"
        # Free ports, and not a range from 10002 up that the nodes of another run on this machine take from as well.
        words = ["--min-worker-port=0", "--max-worker-port=0"]
        words += ["--num-cpus=1", "--num-gpus=0", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
        with log.open("wb") as out:
            node = subprocess.Popen(
                [str(Path(sys.executable).parent / "ray"), "start", f"--node-ip-address={address}", *role, *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT), **self.environment, **more},
                cwd=ROOT,
                start_new_session=True,
            )
        self._started.append(node)
        until = time.monotonic() + START_S
        while b"Ray runtime started" not in log.read_bytes():
            assert node.poll() is None and time.monotonic() < until, log.read_text(errors="replace")
            time.sleep(0.2)
        return node

    def stop(self) -> None:
        """End all nodes, the head last, with everything that they started."""
        for node in reversed(self._started):
            everything = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
            for process in everything:
                _signalled(process.resume)
            _signalled(everything[0].terminate)
            _, alive = psutil.wait_procs(everything, timeout=10)
            for process in alive:
                _signalled(process.kill)
            psutil.wait_procs(alive, timeout=10)
            node.wait()


def processes(node: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """A node's process and all below it."""
    root = psutil.Process(node.pid)
    return [root, *root.children(recursive=True)]


def _signalled(act: object) -> None:
    try:
        act()  # type: ignore[operator]
    except psutil.NoSuchProcess:
        return
