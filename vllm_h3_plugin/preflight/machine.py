# SPDX-License-Identifier: Apache-2.0
"""The machine as preflight may touch it: commands, files, sockets and counters. Nothing here writes or needs root.

Tests put a machine of their own in the place of :class:`LocalMachine`.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vllm_h3_plugin.preflight.check import Unknown

READ_LIMIT = 1 << 20
"""Bytes of a small text file that are read at most."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A command that ended by itself."""

    code: int
    stdout: str
    stderr: str = ""


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system that a path lies on, or would lie on.

    Attributes:
        path: the nearest folder that exists.
        device: equal for two paths on one file system.
    """

    path: str
    device: int
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """What ``uname`` says."""

    system: str
    release: str
    architecture: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Main memory and swap in bytes; ``holders`` are the largest processes in words."""

    total_bytes: int
    available_bytes: int
    swap_total_bytes: int
    swap_used_bytes: int
    holders: tuple[str, ...] = ()


class Machine(Protocol):
    """Everything that preflight asks a machine."""

    @property
    def environ(self) -> Mapping[str, str]:
        """The caller's environment."""

    def run(self, argv: Sequence[str], timeout_s: float = 15.0) -> Ran | Unknown:
        """Run a command that changes nothing."""

    def read(self, path: Path) -> bytes | Unknown:
        """The first MiB of a regular file."""

    def exists(self, path: Path) -> bool:
        """Whether something is there."""

    def names(self, folder: Path) -> tuple[str, ...]:
        """Names in a folder, sorted; none if it cannot be listed."""

    def disk(self, path: Path) -> Disk | Unknown:
        """Room where a path lies or would lie."""

    def kernel(self) -> Kernel:
        """System, release and architecture."""

    def memory(self) -> Memory:
        """Memory as it is now."""

    def bind(self, address: str, port: int) -> str:
        """Why a TCP port cannot be listened on; empty if it can."""

    def now(self) -> float:
        """Seconds since 1970 by this machine's clock."""


class LocalMachine:
    """This machine."""

    @property
    def environ(self) -> Mapping[str, str]:
        """The caller's environment."""
        return os.environ

    def run(self, argv: Sequence[str], timeout_s: float = 15.0) -> Ran | Unknown:
        """Run a command with its messages in English and without a terminal to ask on."""
        environment = {**os.environ, "LC_ALL": "C"}
        try:
            done = subprocess.run(
                argv,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                stdin=subprocess.DEVNULL,
                env=environment,
                check=False,
            )
        except FileNotFoundError:
            return Unknown(f"{argv[0]} is not installed, or not on PATH")
        except subprocess.TimeoutExpired:
            return Unknown(f"`{' '.join(argv)}` gave no answer in {timeout_s:g} s")
        except OSError as exc:
            return Unknown(f"{argv[0]} cannot be run: {exc.strerror or exc}")
        return Ran(done.returncode, done.stdout, done.stderr)

    def read(self, path: Path) -> bytes | Unknown:
        """The first MiB of a regular file; pipes and devices are not waited for."""
        try:
            if not path.is_file():
                return Unknown(f"{path} is no file" if path.exists() else f"{path} is not there")
            with path.open("rb") as file:
                return file.read(READ_LIMIT)
        except OSError as exc:
            return Unknown(f"{path} cannot be read: {exc.strerror or exc}")

    def exists(self, path: Path) -> bool:
        """Whether something is there and may be seen."""
        return os.path.exists(path)

    def names(self, folder: Path) -> tuple[str, ...]:
        """Names in a folder, sorted."""
        try:
            return tuple(sorted(os.listdir(folder)))
        except OSError:
            return ()

    def disk(self, path: Path) -> Disk | Unknown:
        """What this user may still write, so without the blocks that are kept for root."""
        whole = Path(os.path.abspath(path.expanduser()))
        nearest = next(folder for folder in (whole, *whole.parents) if os.path.exists(folder))
        try:
            found, device = os.statvfs(nearest), nearest.stat().st_dev
        except OSError as exc:
            return Unknown(f"{nearest} cannot be looked at: {exc.strerror or exc}")
        return Disk(str(nearest), device, found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail)

    def kernel(self) -> Kernel:
        """What ``uname`` says."""
        found = platform.uname()
        return Kernel(found.system, found.release, found.machine)

    def memory(self) -> Memory:
        """/proc/meminfo through psutil, and the three largest processes."""
        import psutil

        from vllm_h3_plugin.memory.system import largest_processes

        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        holders = tuple(str(holder) for holder in largest_processes())
        return Memory(int(memory.total), int(memory.available), int(swap.total), int(swap.used), holders)

    def bind(self, address: str, port: int) -> str:
        """Bind and let go at once; nothing listens in between."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind((address, port))
        except OSError as exc:
            return exc.strerror or str(exc)
        return ""

    def now(self) -> float:
        """The system clock."""
        return time.time()
