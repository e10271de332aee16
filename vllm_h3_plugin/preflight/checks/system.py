# SPDX-License-Identifier: Apache-2.0
"""Architecture, operating system, clock, port."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from vllm_h3_plugin.preflight.check import Check, Unknown, failed, passed, warned
from vllm_h3_plugin.preflight.expected import CONTAINER_USER, Expected, Kind
from vllm_h3_plugin.preflight.facts import Clock, System
from vllm_h3_plugin.serving.api_key import fault_of_key

EARLIEST = datetime(2026, 11, 1, tzinfo=UTC)
"""No machine runs this version earlier; a clock before it makes every TLS connection fail."""


def architecture(system: System, expected: Expected) -> Check:
    """The processor against the profile."""
    name, found = "architecture", system.architecture
    if found not in expected.architectures:
        wanted = " or ".join(expected.architectures)
        return failed(
            name,
            f"{found}; profile {expected.profile} is for {wanted}",
            "Run it on that machine, or choose another with --profile (h200 for an x86-64 machine with an NVIDIA GPU).",
        )
    note = (
        "; this is no Spark, whose processor is aarch64" if found == "x86_64" and expected.kind is Kind.NVIDIA else ""
    )
    return passed(name, found + note)


def operating_system(system: System) -> Check:
    """Linux, and which."""
    name = "system"
    title = system.system if isinstance(system.os_name, Unknown) else system.os_name
    detail = f"{title}, kernel {system.release}"
    if system.system != "Linux":
        return failed(name, detail, "The server needs Linux: run it on a Linux machine.")
    if "microsoft" in system.release.lower():
        return warned(
            name, f"{detail}: a virtual machine of Windows", "Memory and GPU readings differ there; prefer plain Linux."
        )
    if isinstance(system.os_name, Unknown):
        return warned(name, f"{detail}; {system.os_name.reason}", "Nothing to do if this is a plain Linux.")
    return passed(name, detail)


def clock(found: Clock) -> Check:
    """A clock that is kept, and not in the past."""
    name = "clock"
    now = datetime.fromtimestamp(found.now, UTC)
    shown = now.strftime("%Y-%m-%d %H:%M UTC")
    if now < EARLIEST:
        return failed(
            name,
            f"{shown} lies before this version was made; registries would be refused for their certificates",
            "Set the clock: timedatectl set-ntp true",
        )
    if isinstance(found.synchronized, Unknown):
        return passed(name, f"{shown}; whether a time server keeps it is unknown ({found.synchronized.reason})")
    if not found.synchronized:
        return warned(name, f"{shown}, kept by no time server", "Turn it on: timedatectl set-ntp true")
    return passed(name, f"{shown}, kept by a time server")


def port(address: str, number: int, refused: str) -> Check:
    """Whether the server's port can be listened on.

    Args:
        refused: the system's reason; empty if it can.
    """
    name = "port"
    if not refused:
        return passed(name, f"{address}:{number} is free")
    return failed(
        name,
        f"{address}:{number} cannot be listened on: {refused}",
        f"Stop what uses it (`ss -ltnp 'sport = :{number}'` names it), or choose another with VLLM_H3_PORT or --port.",
    )


def access(
    address: str, key_file: Path | None, key: bytes | Unknown | None, *, contained: bool, readable: bool = True
) -> Check:
    """Who may use the server: this machine alone, or everybody who has the key.

    Args:
        key: content of ``key_file``, which is not shown; empty where it is not there. None if none was named.
        contained: the server runs in a container, whose variables and user are other ones.
        readable: the container's user may read the file.
    """
    name = "access"
    variables = ("VLLM_H3_API_KEY_FILE", "VLLM_H3_BIND") if contained else ("H3_API_KEY_FILE", "--address")
    local = address in ("localhost", "::1") or address.startswith("127.")
    make = "openssl rand -hex 32 > api-key"
    if key_file is None or key is None:
        if local:
            return passed(name, f"{address} is this machine alone; no API key")
        return warned(
            name,
            f"{address} is open to others, and no API key is asked for",
            f"Set {variables[0]} ({make}), or {variables[1]}=127.0.0.1.",
        )
    if isinstance(key, Unknown):
        return warned(
            name,
            f"whether a key is in {key_file} is unknown: {key.reason}",
            f"{f'User id {CONTAINER_USER}' if contained else 'The user who serves'} must read it; or: {make}",
        )
    if not key.strip():
        return failed(name, f"{key_file} holds no key, or is not there", f"Write one: {make}")
    fault = fault_of_key(key.decode("utf-8", "replace").strip())
    if fault:
        return failed(name, f"{key_file} is no key: {fault}", f"Write one: {make}")
    if contained and not readable:
        return failed(
            name,
            f"user id {CONTAINER_USER} of the container may not read {key_file}",
            f"Give it to that user: sudo chown {CONTAINER_USER} {key_file}",
        )
    return passed(name, f"{address}, with the API key in {key_file}")
