# SPDX-License-Identifier: Apache-2.0
"""A cluster that Ray runs: one actor on each node answers, and nothing is waited for beyond its deadline.

The actor's class is sent by value and finds the plugin on its own node, so that a node with another version of it says
so instead of running this one's code.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from vllm_h3_plugin.errors import ServerError, ToolMissingError
from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.preflight.cluster.facts import Asked, ClockReading, Exchange, Link, NodeFacts, NodeName

_ANSWER = TypeVar("_ANSWER")
_CLOCK_READINGS = 5
_START = (
    "Start it: `docker compose -f compose.cluster.yaml up -d head` here and `… up -d worker` on the other machines; or "
    "name its address with H3_CLUSTER_ADDRESS."
)


class RayCluster:
    """The running Ray cluster at an address.

    Args:
        address: ``HOST:PORT`` of the head.
        own_address: of this machine on the cluster's network; None lets Ray choose.
        asked: what its nodes will be asked.
        connect_s: seconds that connecting may take.

    Raises:
        ToolMissingError: Ray is not installed.
        ServerError: no cluster answers there, or it does not take this caller; names the address.
    """

    def __init__(self, address: str, own_address: str | None, asked: Asked, connect_s: float) -> None:
        try:
            import ray
        except ModuleNotFoundError as exc:
            raise ToolMissingError(
                "Ray is not installed",
                why="several machines are one server through Ray, which a single one does without",
                fix="pip install 'vllm-h3-plugin[cluster]', or build the image with `make build CLUSTER=1`.",
            ) from exc
        logging.getLogger("ray").setLevel(logging.ERROR)
        self._ray: Any = ray
        self._asked = asked
        self._actors: dict[str, Any] = {}
        self._nodes: tuple[NodeName, ...] = ()
        _answers(address)
        self._connect(address, own_address, connect_s)

    def close(self) -> None:
        """End the actors and leave; the cluster goes on."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._ray.shutdown()

    def nodes(self, wanted: int, wait_s: float) -> Sequence[NodeName]:
        """Nodes that are alive, the caller's first; waits for as many as are wanted."""
        until = time.monotonic() + wait_s
        here = self._ray.get_runtime_context().get_node_id()
        while True:
            alive = [
                NodeName(
                    id=node["NodeID"],
                    address=node["NodeManagerAddress"],
                    host=node["NodeManagerHostname"],
                    here=node["NodeID"] == here,
                    gpus=int(node["Resources"].get("GPU", 0)),
                )
                for node in self._ray.nodes()
                if node["Alive"]
            ]
            if len(alive) >= wanted or time.monotonic() > until:
                break
            time.sleep(0.5)
        self._nodes = tuple(sorted(alive, key=lambda node: (not node.here, node.address)))
        return self._nodes

    def facts(self, asked: Asked, deadline_s: float) -> Mapping[str, NodeFacts | Unknown]:
        """What each node says of itself."""
        self._asked = asked
        text = json.dumps(asdict(asked))
        answers = self._all(lambda actor, node: actor.call.remote("node", "facts_json", text), deadline_s)
        return {key: _read(answer, lambda text: NodeFacts.read(json.loads(text))) for key, answer in answers.items()}

    def clocks(self, deadline_s: float) -> Mapping[str, ClockReading | Unknown]:
        """Each node's clock: of a few readings, the one with the shortest way there and back."""
        best: dict[str, ClockReading | Unknown] = {}
        until = time.monotonic() + deadline_s
        for node in self._nodes:
            for _ in range(_CLOCK_READINGS):
                before = time.time()
                (answer,) = self._all(
                    lambda actor, node: actor.now.remote(), max(until - time.monotonic(), 0.1), (node,)
                ).values()
                after = time.time()
                if isinstance(answer, Unknown):
                    best[node.id] = answer
                    break
                reading = ClockReading(float(answer) - (before + after) / 2, (after - before) / 2)
                known = best.get(node.id)
                if not isinstance(known, ClockReading) or reading.uncertain_s < known.uncertain_s:
                    best[node.id] = reading
        return best

    def links(self, exchange: Exchange, deadline_s: float) -> Mapping[str, Link | Unknown]:
        """One measurement between all nodes at once; rank 0 is the caller's node."""
        until = time.monotonic() + deadline_s
        first = self._nodes[0]
        (port,) = self._all(
            lambda actor, node: actor.call.remote("link", "free_port", first.address), deadline_s, (first,)
        ).values()
        if isinstance(port, Unknown):
            return {node.id: port for node in self._nodes}
        order = {
            "world": len(self._nodes),
            "address": first.address,
            "port": port,
            "rows": exchange.rows,
            "width": exchange.width,
            "cuda": self._asked.cuda,
            "interface": self._asked.interface,
            "hca": self._asked.hca,
            "timeout_s": max(deadline_s / 2, 1.0),
        }
        ranks = {node.id: rank for rank, node in enumerate(self._nodes)}
        answers = self._all(
            lambda actor, node: actor.call.remote(
                "link", "measure", {**order, "rank": ranks[node.id], "own": node.address}
            ),
            max(until - time.monotonic(), 0.1),
        )
        return {key: _read(answer, lambda found: Link(**found)) for key, answer in answers.items()}

    def _connect(self, address: str, own_address: str | None, connect_s: float) -> None:
        """``ray.init`` has no deadline of its own, so a thread makes it."""
        caught: list[BaseException] = []

        def connect() -> None:
            try:
                more = {} if own_address is None else {"_node_ip_address": own_address}
                self._ray.init(
                    address=address,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=False,
                    job_config=_job_config(),
                    **more,
                )
            except Exception as exc:  # noqa: BLE001 -- Ray raises ConnectionError, RuntimeError, ValueError and its own
                caught.append(exc)

        thread = threading.Thread(target=connect, name="h3-ray-init", daemon=True)
        thread.start()
        thread.join(connect_s)
        if thread.is_alive() or caught:
            why = (
                str(caught[0]).strip().splitlines()[0][:300]
                if caught
                else f"it did not let us in within {connect_s:g} s"
            )
            raise ServerError(
                f"the Ray cluster at {address} does not take this caller",
                why=why,
                fix="Run this on a machine of the cluster, in its container, with the same Ray and the same token "
                "(RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH); see docs/CLUSTER.md.",
            )

    def _actor(self, node: NodeName) -> Any:
        if node.id not in self._actors:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            self._actors[node.id] = (
                self._ray.remote(_probe_class())
                .options(
                    num_cpus=0,
                    num_gpus=1 if self._asked.cuda and node.gpus else 0,
                    max_restarts=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
                )
                .remote()
            )
        return self._actors[node.id]

    def _all(
        self, ask: Callable[[Any, NodeName], Any], deadline_s: float, nodes: Sequence[NodeName] | None = None
    ) -> dict[str, Any]:
        """Ask nodes at once; whoever has not answered by the deadline is an ``Unknown`` that says so."""
        chosen = self._nodes if nodes is None else nodes
        pending = {ask(self._actor(node), node): node for node in chosen}
        done, late = self._ray.wait(list(pending), num_returns=len(pending), timeout=deadline_s)
        answers: dict[str, Any] = {}
        for ref in late:
            node = pending[ref]
            held = " (if a server holds its GPU, stop that first)" if self._asked.cuda and node.gpus else ""
            answers[node.id] = Unknown(f"no answer within {deadline_s:.3g} s{held}")
        for ref in done:
            try:
                answers[pending[ref].id] = self._ray.get(ref)
            except Exception as exc:  # noqa: BLE001 -- whatever the node's own code raised, and Ray's errors
                answers[pending[ref].id] = Unknown(_reason(exc))
        return answers


def _probe_class() -> type:
    class Probe:
        """On the node. Standard library alone: what it imports is the node's."""

        def now(self) -> float:
            import time

            return time.time()

        def call(self, module: str, function: str, *words: Any) -> Any:
            import importlib

            found = importlib.import_module(f"vllm_h3_plugin.preflight.cluster.{module}")
            return getattr(found, function)(*words)

    return Probe


def _job_config() -> Any:
    """One that lets each node import its own packages. Ray puts the driver's current folder before them, unless a job
    has a working folder (ray/_private/worker.py, connect); a checkout there would hide what a node has installed."""
    from ray.job_config import JobConfig

    class OwnPackages(JobConfig):  # type: ignore[misc]
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    return OwnPackages()


def _answers(address: str) -> None:
    """Whether anything listens at an address; Ray itself would try for minutes.

    Raises:
        ServerError: nothing does, or it is no address.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5):
            return
    except (OSError, ValueError, OverflowError) as exc:
        raise ServerError(f"no Ray cluster answers at {address}", why=str(exc), fix=_START) from exc


def _read(answer: Any, read: Callable[[Any], _ANSWER]) -> _ANSWER | Unknown:
    if isinstance(answer, Unknown):
        return answer
    try:
        return read(answer)
    except (KeyError, TypeError, ValueError) as exc:
        return Unknown(f"its plugin answers in another form ({exc}): it has another version")


def _reason(exc: Exception) -> str:
    """The last line of an error that came from a node: Ray puts the node's traceback before it."""
    cause = getattr(exc, "cause", None) or exc
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[-1][:300] if lines else 'no message'}"
