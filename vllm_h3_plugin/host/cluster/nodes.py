# SPDX-License-Identifier: Apache-2.0
"""The machines of a Ray cluster, and which rank is on which."""

from __future__ import annotations

import socket
import time
from typing import Any

from vllm_h3_plugin.errors import ServerError, ToolMissingError

_POLL_S = 0.5


def import_ray() -> Any:
    """The package.

    Raises:
        ToolMissingError: it is not installed.
    """
    try:
        import ray
    except ImportError as exc:
        raise ToolMissingError(
            "Ray is not installed",
            why=str(exc),
            fix="Install it on every node: `pip install 'vllm-h3-plugin[cluster]'`.",
        ) from exc
    return ray


def connect(address: str | None, seconds: float) -> Any:
    """Join the cluster as its driver; returns the package.

    Args:
        address: ``host:port`` of its head; None: the one that runs on this machine.
        seconds: how long its port may stay closed. One that is open and not Ray's takes Ray some 40 s to give up.

    Raises:
        ToolMissingError: see :func:`import_ray`.
        ServerError: nothing answers there.
    """
    ray = import_ray()
    if ray.is_initialized():
        return ray
    where = address or "auto"
    try:
        if address:
            _wait_for_port(address, seconds)
            # Else Ray tries 20 times, for minutes.
            ray._private.ray_constants.NUM_REDIS_GET_RETRIES = 1
        ray.init(
            address=where,
            namespace="vllm-h3",
            log_to_driver=True,
            configure_logging=False,
            job_config=_job_config(),
            _node_ip_address=_own_address(address),
        )
    except Exception as exc:
        raise ServerError(
            f"there is no Ray cluster at {address}" if address else "no Ray cluster runs on this machine",
            why=(str(exc).strip().splitlines() or [type(exc).__name__])[0],
            fix="Start it: `ray start --head --node-ip-address=ADDRESS` here, `ray start --address=ADDRESS:6379` on "
            "the other nodes; H3_CLUSTER_ADDRESS names it where it is not this machine's.",
            address=address,
        ) from exc
    return ray


def _wait_for_port(address: str, seconds: float) -> None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=max(_POLL_S, deadline - time.monotonic())).close()
            return
        except OSError as exc:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{exc.strerror or exc}, for {seconds:.0f} s") from exc
        time.sleep(_POLL_S)


def _job_config() -> Any:
    """One that lets each node import its own packages.

    Ray puts the driver's current folder before them (ray/_private/worker.py, connect), so that a checkout there would
    hide which version a node has. It does not where a job has a working folder.
    """
    from ray.job_config import JobConfig

    class OwnPackages(JobConfig):  # type: ignore[misc]
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    return OwnPackages()


def _own_address(address: str | None) -> str | None:
    """This machine's, where it is the head: Ray would take that of the way to the internet."""
    from vllm_h3_plugin.host.cluster.network import addresses, interface_of

    host = (address or "").rpartition(":")[0]
    if host and (host in addresses().values() or (host.startswith("127.") and interface_of(host))):
        return host
    return None


def wait_for_nodes(ray: Any, count: int, resource: str, seconds: float) -> list[str]:
    """Addresses of that many machines with a free device; this one first, the others in order.

    Raises:
        ServerError: there are fewer when the time is over; names those that there are.
    """
    deadline = time.monotonic() + seconds
    own = ray.util.get_node_ip_address()
    while True:
        alive = {node["NodeManagerAddress"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        fitting = [address for address, has in alive.items() if has.get(resource, 0) >= 1]
        if own in fitting and len(fitting) >= count:
            return [own, *sorted(address for address in fitting if address != own)][:count]
        if time.monotonic() >= deadline:
            there = ", ".join(f"{address} ({has.get(resource, 0):g} {resource})" for address, has in alive.items())
            raise ServerError(
                f"{len(fitting)} of {count} nodes are in the Ray cluster",
                why=f"there after {seconds:.0f} s: {there or 'none'}; the server's own is {own}",
                fix="Start Ray on the others: `ray start --address=HEAD:6379`; see `ray status`.",
                nodes=sorted(alive),
            )
        time.sleep(_POLL_S)


def reserve(ray: Any, nodes: list[str], resource: str, seconds: float) -> Any:
    """A placement group with a device on each machine, in order.

    Raises:
        ServerError: a device is in use.
    """
    bundles = [{resource: 1, f"node:{address}": 0.001} for address in nodes]
    group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD" if len(set(nodes)) == len(nodes) else "PACK")
    try:
        ray.get(group.ready(), timeout=seconds)
    except ray.exceptions.GetTimeoutError as exc:
        ray.util.remove_placement_group(group)
        free = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        raise ServerError(
            f"no free {resource} on all of {', '.join(nodes)}",
            why=f"they were not free within {seconds:.0f} s; alive: {', '.join(sorted(free)) or 'none'}",
            fix="Stop what uses them (`ray status`); a server that was killed frees its own within seconds.",
        ) from exc
    return group
