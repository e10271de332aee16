# SPDX-License-Identifier: Apache-2.0
"""What a launch profile asks of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from vllm_h3_plugin.serving.profile import Profile

CONTAINER_USER = 10001
"""User id that the image runs as (Dockerfile)."""


class Kind(Enum):
    """Kinds of machine that profiles are for."""

    SPARK = "spark"
    NVIDIA = "nvidia"
    ASCEND = "ascend"
    REFERENCE = "reference"


@dataclass(frozen=True)
class Expected:
    """What must be there.

    Attributes:
        profile: the profile's name.
        cards: accelerators that the profile uses.
        architectures: as ``uname -m`` has them.
        capability: CUDA compute capability; None where any will do.
        host: name of the host in ``launch/image.lock``.
        containers: whether the server runs in a container that is built and started here.
    """

    profile: str
    kind: Kind
    cards: int
    architectures: tuple[str, ...]
    capability: str | None
    host: str
    containers: bool

    @property
    def cuda(self) -> bool:
        """Whether an NVIDIA device is expected."""
        return self.kind in (Kind.SPARK, Kind.NVIDIA)


_BOTH = ("x86_64", "aarch64")
_CAPABILITY = {"spark": "12.1", "h200": "9.0"}


def expected_of(name_or_path: str, profile: Profile, *, containers: bool = True) -> Expected:
    """Expectations of a profile. Its name says which kind of machine it is for: ``spark``, ``spark-long``,
    ``ascend-4``; any other name means an NVIDIA device of any generation.

    Args:
        name_or_path: as for ``load_profile``.
        containers: False where the server is started from an environment of this machine, or preflight runs inside a
            container.
    """
    name = Path(name_or_path).stem
    family = name.partition("-")[0]
    if profile.reference or family == "reference":
        return Expected(name, Kind.REFERENCE, 0, _BOTH, None, "nvidia", False)
    if family == "ascend":
        return Expected(name, Kind.ASCEND, profile.devices, _BOTH, None, "ascend", containers)
    kind = Kind.SPARK if family == "spark" else Kind.NVIDIA
    architectures = ("aarch64",) if kind is Kind.SPARK else _BOTH
    return Expected(name, kind, profile.devices, architectures, _CAPABILITY.get(family), "nvidia", containers)
