# SPDX-License-Identifier: Apache-2.0
"""Order of the checks of a cluster: who is there, what each node is, then the link between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from vllm_h3_plugin.checkpoint.configs import DitConfig
from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.memory.requests import RequestSize
from vllm_h3_plugin.preflight.check import Check, State, Unknown
from vllm_h3_plugin.preflight.cluster import judge
from vllm_h3_plugin.preflight.cluster.facts import Asked, Cluster, Exchange, NodeFacts, NodeName

_FOUND = TypeVar("_FOUND")

CLIP = RequestSize(1344, 768, 124)
"""5 s at 768p, the size that H3 was made for."""


@dataclass(frozen=True)
class Limits:
    """What is asked of a cluster.

    Attributes:
        nodes: how many.
        wait_s: seconds to wait for them to join.
        deadline_s: seconds within which every node has answered, and once more within which the link is measured.
        least_gbit: Gbit/s that leave a node in an all-to-all.
    """

    nodes: int
    wait_s: float
    deadline_s: float
    least_gbit: float


@dataclass(frozen=True)
class ClusterReport:
    """What was found.

    Attributes:
        whole: checks of the cluster as a whole.
        nodes: each node with its checks, the caller's first.
        skipped: check that was left out -> the check or the node that it stands on.
    """

    whole: tuple[Check, ...]
    nodes: tuple[tuple[NodeName, tuple[Check, ...]], ...]
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def checks(self) -> tuple[Check, ...]:
        """All of them."""
        return (*self.whole, *(check for _, checks in self.nodes for check in checks))

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not any(check.state is State.FAIL for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-serialisable values."""
        return {
            "checks": [check.as_dict() for check in self.whole],
            "skipped": dict(self.skipped),
            "nodes": [
                {
                    "address": name.address,
                    "host": name.host,
                    "here": name.here,
                    "checks": [check.as_dict() for check in checks],
                }
                for name, checks in self.nodes
            ],
        }


def exchange_of(checkpoint: Path | None) -> Exchange:
    """The exchange of a 768p clip, with the checkpoint's own widths; the real model's where it cannot be read."""
    dit = DitConfig()
    if checkpoint is not None and checkpoint.is_dir():
        partitions = take_inventory(checkpoint).partitions
        dit = next((each.dit for each in partitions if each.dit is not None), dit)
    return Exchange(CLIP.tokens, dit.inner_size, dit.num_layers, f"{CLIP.frames} frames at {CLIP.width}x{CLIP.height}")


def check_cluster(
    cluster: Cluster,
    asked: Asked,
    exchange: Exchange,
    limits: Limits,
    on_step: Callable[[str], None] = lambda name: None,
) -> ClusterReport:
    """Run all checks. The link is measured only between nodes that answered.

    Args:
        on_step: told what is looked at next.
    """
    on_step("its nodes")
    names = cluster.nodes(limits.nodes, limits.wait_s)
    whole = (judge.nodes(len(names), limits.nodes, limits.wait_s),)
    on_step("what each node is")
    facts = cluster.facts(asked, limits.deadline_s)
    compared = _compared(names, facts)
    rows = {name: _of_node(name, facts.get(name.id), compared, asked) for name in names}
    skipped: dict[str, str] = {}
    silent = next((name for name in names if not isinstance(facts.get(name.id), NodeFacts)), None)
    if silent is not None:
        skipped = {"clock": f"{silent}", "link": f"{silent}"}
    else:
        on_step("its clocks")
        for name, reading in _by_name(names, cluster.clocks(limits.deadline_s)):
            rows[name].append(judge.clock(reading))
        # An interface that is not there fails the measurement too, after its deadline and in other words.
        cause = next((check.name for checks in rows.values() for check in checks if _stops_link(check)), None)
        if len(names) < 2:
            skipped["link"] = "nodes"
        elif cause is not None:
            skipped["link"] = cause
        else:
            on_step("the link")
            for name, found in _by_name(names, cluster.links(exchange, limits.deadline_s)):
                rows[name].append(judge.link(found, exchange, limits.least_gbit, cuda=asked.cuda))
    return ClusterReport(whole, tuple((name, tuple(checks)) for name, checks in rows.items()), skipped)


def _compared(names: Sequence[NodeName], facts: Mapping[str, NodeFacts | Unknown]) -> tuple[NodeName, NodeFacts] | None:
    """The node that the others are held against: the caller's, or the first that answered."""
    for name in sorted(names, key=lambda name: not name.here):
        found = facts.get(name.id)
        if isinstance(found, NodeFacts):
            return name, found
    return None


def _of_node(
    name: NodeName, its: NodeFacts | Unknown | None, compared: tuple[NodeName, NodeFacts] | None, asked: Asked
) -> list[Check]:
    if not isinstance(its, NodeFacts) or compared is None:
        return [judge.answer(str(name), its.reason if isinstance(its, Unknown) else "it was not asked")]
    where, other = compared
    return [
        judge.plugin(its, other),
        judge.image(its, other),
        judge.host(its, other),
        judge.ray(its, other),
        judge.recipe(its, other),
        judge.checkpoint(its, other, where, whole=asked.whole),
        judge.interface(its, name),
        judge.hca(its, cuda=asked.cuda),
        *([judge.gpu(name)] if asked.cuda else []),
        judge.memory(its),
        judge.token(its, name),
    ]


def _by_name(names: Sequence[NodeName], found: Mapping[str, _FOUND]) -> list[tuple[NodeName, _FOUND]]:
    return [(name, found[name.id]) for name in names if name.id in found]


def _stops_link(check: Check) -> bool:
    return check.state is State.FAIL and check.name in ("interface", "HCA", "host", "GPU")
