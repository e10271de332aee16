# SPDX-License-Identifier: Apache-2.0
"""What is known of the nodes of a cluster. A field that could not be had is an ``Unknown``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_h3_plugin.preflight.check import Unknown


@dataclass(frozen=True, slots=True)
class NodeName:
    """One node as Ray lists it.

    Attributes:
        here: whether the command runs on it; the others are compared with it.
        gpus: GPUs that Ray may hand out there.
    """

    id: str
    address: str
    host: str
    here: bool = False
    gpus: int = 0

    def __str__(self) -> str:
        return f"{self.address} ({self.host})"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a node is asked about; travels as JSON.

    Attributes:
        checkpoint: the folder's path on every node; None: none was named.
        recipe: name or path.
        interface, hca: what the caller's settings name; a node's own settings win.
        whole: hash weight files to their end.
        cuda: measure with NCCL on the node's GPU, and take its memory for the model's.
    """

    checkpoint: str | None
    task: str | None
    recipe: str
    interface: str | None = None
    hca: str | None = None
    whole: bool = False
    cuda: bool = False


@dataclass(frozen=True)
class NodeFacts:
    """A node's answer.

    Attributes:
        plugin: version, and digest of its installed files.
        image: what the image says of itself: commit, base and lock; empty outside of an image.
        packages: name -> version; of the host, torch and Ray.
        recipe: name and SHA-256; or why it cannot be read.
        checkpoint: path below the release -> digest; or why it cannot be read.
        interface: the named network interface: ``name``, ``up``, ``addresses``, ``mtu``, ``mbit``, and ``known``, the
            names of all; without ``name`` none was named.
        hca: the named InfiniBand or RoCE devices: ``names``, ``known``, and ``devices``, each with ``name``,
            ``device``, ``state`` and ``rate``; without ``names`` none was named.
        available_bytes: memory that the model could take.
        need_bytes: what the whole model needs on one machine; None where the checkpoint or recipe cannot be read.
        token: whether Ray asks for a token there.
    """

    plugin: Mapping[str, str]
    image: Mapping[str, str]
    packages: Mapping[str, str]
    recipe: Mapping[str, str] | Unknown
    checkpoint: Mapping[str, str] | Unknown
    interface: Mapping[str, Any]
    hca: Mapping[str, Any]
    available_bytes: int
    need_bytes: int | None
    token: bool

    @staticmethod
    def read(answer: Mapping[str, Any]) -> NodeFacts:
        """From what :func:`vllm_h3_plugin.preflight.cluster.node.facts` made of it."""
        values = {name: answer[name] for name in NodeFacts.__dataclass_fields__}
        for name in ("recipe", "checkpoint"):
            if "unknown" in values[name]:
                values[name] = Unknown(str(values[name]["unknown"]))
        return NodeFacts(**values)


@dataclass(frozen=True, slots=True)
class ClockReading:
    """A node's clock against the caller's, in seconds; the true offset is within ``uncertain_s`` of ``offset_s``."""

    offset_s: float
    uncertain_s: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """One Ulysses exchange of a step, as it is measured.

    Attributes:
        rows: of the packed sequence, all ranks together.
        width: numbers in a row: heads times their width.
        blocks: of the DiT; a step makes four exchanges in each.
        clip: what is made of it, for people.
    """

    rows: int
    width: int
    blocks: int
    clip: str


@dataclass(frozen=True, slots=True)
class Link:
    """What one rank measured.

    Attributes:
        backend: ``gloo`` or ``nccl``.
        sent_bytes: that leave this rank in one all-to-all.
        all_to_all_s, all_gather_s: median of one call.
        latency_s: median of an all-to-all of a few bytes.
    """

    backend: str
    sent_bytes: int
    all_to_all_s: float
    all_gather_s: float
    latency_s: float

    @property
    def gbit(self) -> float:
        """Gbit/s that leave this rank in an all-to-all."""
        return self.sent_bytes * 8 / self.all_to_all_s / 1e9


@dataclass(frozen=True)
class Answers:
    """Everything that the nodes said; by node id."""

    facts: Mapping[str, NodeFacts | Unknown] = field(default_factory=dict)
    clocks: Mapping[str, ClockReading | Unknown] = field(default_factory=dict)
    links: Mapping[str, Link | Unknown] = field(default_factory=dict)


class Cluster(Protocol):
    """Everything that is asked of a cluster; tests put one of their own in the place of Ray's."""

    def nodes(self, wanted: int, wait_s: float) -> Sequence[NodeName]:
        """Nodes that are alive, the caller's first; waits for as many as are wanted."""

    def facts(self, asked: Asked, deadline_s: float) -> Mapping[str, NodeFacts | Unknown]:
        """What each node says of itself. A node that does not answer in time is an ``Unknown``."""

    def clocks(self, deadline_s: float) -> Mapping[str, ClockReading | Unknown]:
        """Each node's clock."""

    def links(self, exchange: Exchange, deadline_s: float) -> Mapping[str, Link | Unknown]:
        """One measurement between all nodes at once."""
