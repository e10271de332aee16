# SPDX-License-Identifier: Apache-2.0
"""Which interface the ranks talk over, its address, and whether the others are reached from it. Imports no torch."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping

import psutil

from vllm_h3_plugin.errors import ServerError, SettingsError


def interface_address(interface: str) -> str:
    """The IPv4 address of a network interface that is up.

    Raises:
        SettingsError: there is no such interface, it is down, or it has no address; names those that there are.
    """
    found = addresses()
    if interface in found:
        return found[interface]
    if interface in psutil.net_if_addrs():
        up = psutil.net_if_stats()[interface].isup
        why = "it has no IPv4 address" if up else "it is down"
        fix = f"Give it one (`ip address add ADDRESS dev {interface}`; `ip link set {interface} up`)."
    else:
        why, fix = "this machine has no such interface", ""
    others = ", ".join(f"{name} ({address})" for name, address in sorted(found.items())) or "none"
    raise SettingsError(
        f"H3_CLUSTER_INTERFACE={interface}", why=why, fix=f"{fix} Interfaces with an address: {others}.".strip()
    )


def addresses() -> dict[str, str]:
    """Interface -> first IPv4 address, of those that are up."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        name: next(address.address for address in listed if address.family == socket.AF_INET)
        for name, listed in psutil.net_if_addrs().items()
        if name in up and any(address.family == socket.AF_INET for address in listed)
    }


def interface_of(address: str) -> str | None:
    """The interface that carries an address; None: no one interface does."""
    if ipaddress.ip_address(address).is_loopback:
        return next((name for name, own in addresses().items() if ipaddress.ip_address(own).is_loopback), None)
    return next((name for name, own in addresses().items() if own == address), None)


def choose(environ: MutableMapping[str, str], node_address: str) -> tuple[str | None, str]:
    """Interface and address of this rank, and the variables that Gloo and NCCL read, set.

    Args:
        environ: ``H3_CLUSTER_INTERFACE`` and ``H3_CLUSTER_HCA`` are read from it.
        node_address: the machine's in Ray, which is taken where no interface is named.

    Raises:
        SettingsError: see :func:`interface_address`.
    """
    named = environ.get("H3_CLUSTER_INTERFACE") or None
    address = interface_address(named) if named else node_address
    interface = named or interface_of(node_address)
    if interface is not None:
        environ["GLOO_SOCKET_IFNAME"] = interface
        environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # this one and not all that begin so
    if environ.get("H3_CLUSTER_HCA"):
        environ["NCCL_IB_HCA"] = environ["H3_CLUSTER_HCA"]
    environ["VLLM_HOST_IP"] = address
    return interface, address


class Listener:
    """A port of one rank that the others try to reach before anything waits for them."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.create_server((address, 0))
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Free the port."""
        self._socket.close()


def reach(own: str, others: Mapping[int, tuple[str, int]], seconds: float) -> None:
    """Connect to each of the other ranks from this rank's address.

    Raises:
        ServerError: one is not reached; names its rank and address, and the interface.
    """
    for rank, (address, port) in others.items():
        try:
            socket.create_connection((address, port), timeout=seconds, source_address=(own, 0)).close()
        except OSError as exc:
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "no interface of its own")
            raise ServerError(
                f"rank {rank} at {address}:{port} is not reached from {own} ({interface})",
                why=exc.strerror or str(exc) or "no answer",
                fix="The interfaces that H3_CLUSTER_INTERFACE names must be of one network, and no firewall between "
                "them: `ip route get ADDRESS`, `ping -I INTERFACE ADDRESS`.",
                rank=rank,
                address=address,
            ) from exc
