# SPDX-License-Identifier: Apache-2.0
"""What is known of the machine: values that checks judge. A field that could not be had is an ``Unknown``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.preflight.machine import Disk


@dataclass(frozen=True)
class Docker:
    """The engine's own account.

    Attributes:
        runtimes: names of the OCI runtimes.
        cdi_devices: devices that the engine found by the Container Device Interface, such as ``nvidia.com/gpu=all``.
        architecture: of the engine's machine, as ``uname -m`` has it.
        root: folder of its images.
    """

    version: str
    runtimes: tuple[str, ...]
    cdi_devices: tuple[str, ...]
    architecture: str
    root: str


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA device; ``total_bytes`` and ``free_bytes`` are None where it shares the CPU's memory (GB10: N/A)."""

    index: int
    name: str
    driver: str
    capability: str
    total_bytes: int | None
    free_bytes: int | None

    @property
    def unified(self) -> bool:
        """Whether CPU and device take from one memory."""
        return self.total_bytes is None


@dataclass(frozen=True)
class DeviceProcess:
    """A process on an accelerator; ``held_bytes`` is None where the driver does not tell."""

    pid: int
    name: str
    held_bytes: int | None

    def __str__(self) -> str:
        held = "" if self.held_bytes is None else f", {self.held_bytes / 2**30:.1f} GiB"
        return f"{self.name} (pid {self.pid}{held})"


@dataclass(frozen=True)
class Ascend:
    """What the Ascend driver left on the machine.

    Attributes:
        cards: numbers of the cards that a server of this environment sees.
        present: numbers of all cards.
        hidden_by: the variable that hides cards; empty if none is hidden.
        missing: driver files and device nodes that are not there.
        driver: version; empty if unknown.
        tool: why ``npu-smi info`` gave nothing; empty if it did.
    """

    cards: tuple[int, ...]
    present: tuple[int, ...]
    hidden_by: str
    missing: tuple[str, ...]
    driver: str
    tool: str
    processes: tuple[DeviceProcess, ...] = ()


@dataclass(frozen=True)
class ImageManifest:
    """What a registry says about an image.

    Attributes:
        digest: of the index or manifest that answers to the reference.
        platforms: architecture, as registries name it (``arm64``), -> digest; empty for an image of one platform
            that does not say which.
    """

    digest: str
    platforms: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Image:
    """The pinned image, asked of the registry and of the engine.

    Attributes:
        reference: as pinned, with its digest; the tag where there is none.
        digest: the pinned one; None where none is known.
        pinned: the answer for the digest.
        tag: the answer for the tag.
        local: whether the engine has the image already.
    """

    reference: str
    digest: str | None
    pinned: ImageManifest | Unknown
    tag: ImageManifest | Unknown
    local: bool


@dataclass(frozen=True)
class Room:
    """Where bytes are written and what is free there.

    Attributes:
        images: file system of the engine's images.
        cache: file system of ``H3_CACHE_DIR``, or of the container's volume for it.
        snapshot: whether a usable quantized snapshot lies in the cache already.
    """

    images: Disk | Unknown
    cache: Disk | Unknown
    snapshot: bool | Unknown


@dataclass(frozen=True)
class System:
    """Operating system and kernel; ``os_name`` is PRETTY_NAME of /etc/os-release."""

    system: str
    release: str
    architecture: str
    os_name: str | Unknown


@dataclass(frozen=True)
class Clock:
    """``synchronized``: whether systemd says that the clock follows a time server."""

    now: float
    synchronized: bool | Unknown
