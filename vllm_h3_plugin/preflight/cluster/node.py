# SPDX-License-Identifier: Apache-2.0
"""What a node says of itself. Runs there, in a process of Ray's; nothing here changes the machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vllm_h3_plugin import __version__
from vllm_h3_plugin.checkpoint.inventory import Inventory, take_inventory
from vllm_h3_plugin.checkpoint.same_files import file_digests
from vllm_h3_plugin.errors import H3Error
from vllm_h3_plugin.preflight.cluster.facts import Asked
from vllm_h3_plugin.preflight.need import need_of
from vllm_h3_plugin.serving.provenance import BUILD_RECORD, PACKAGE, content_digest, recipe_file

NET, INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")
PACKAGES = ("vllm", "vllm-omni", "torch", "ray")


def facts_json(asked: str) -> str:
    """:func:`facts`, from and to JSON, so that no class has to be the same on both sides."""
    return json.dumps(facts(Asked(**json.loads(asked))))


def facts(asked: Asked) -> dict[str, Any]:
    """Everything that is compared between nodes, as JSON-serialisable values."""
    # As the executor has it: what is set on a node wins there.
    own = os.environ.get("H3_CLUSTER_CHECKPOINT")
    asked = replace(asked, checkpoint=own or asked.checkpoint)
    found = _inventory(asked)
    checkpoint = found if isinstance(found, dict) else _told(lambda: file_digests(found, whole=asked.whole))
    return {
        "plugin": {"version": __version__, "content": content_digest(PACKAGE)},
        "image": _image(),
        "packages": {name: _version(name) for name in PACKAGES},
        "recipe": _told(lambda: recipe_file(asked.recipe)),
        "checkpoint": checkpoint,
        "interface": interface(os.environ.get("H3_CLUSTER_INTERFACE") or asked.interface),
        "hca": hca(os.environ.get("H3_CLUSTER_HCA") or asked.hca),
        "available_bytes": _available(asked.cuda),
        "need_bytes": _need(asked.recipe, found),
        "token": os.environ.get("RAY_AUTH_MODE", "").lower() == "token",
    }


def interface(name: str | None, root: Path = NET) -> dict[str, Any]:
    """A network interface by its name, from sysfs and the system's addresses."""
    import psutil

    known = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    if name is None:
        return {"known": known, "addresses": {key: _addresses(psutil.net_if_addrs(), key) for key in known}}
    state = _read(root / name / "operstate")
    return {
        "name": name,
        "known": known,
        # A loopback device and some tunnels have no state of their own: the kernel calls it unknown.
        "up": state in ("up", "unknown"),
        "addresses": _addresses(psutil.net_if_addrs(), name),
        "mtu": int(_read(root / name / "mtu") or 0),
        "mbit": max(int(_read(root / name / "speed") or 0), 0),
    }


def hca(names: str | None, root: Path = INFINIBAND) -> dict[str, Any]:
    """InfiniBand or RoCE devices by their names, as NCCL_IB_HCA has them: ``mlx5_0,mlx5_1:1``, a port after the colon.

    What NCCL is to leave out (``^mlx5_2``) names none.
    """
    known = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    if not names or names.startswith("^"):
        return {"known": known}
    return {"names": names, "known": known, "devices": [_device(name, root) for name in names.lstrip("=").split(",")]}


def _device(name: str, root: Path) -> dict[str, str]:
    device, _, port = name.partition(":")
    ports = root / device / "ports"
    chosen = [ports / port] if port else (sorted(ports.iterdir()) if ports.is_dir() else [])
    states = [(_read(path / "state"), _read(path / "rate")) for path in chosen]
    state, rate = next((found for found in states if found[0].endswith("ACTIVE")), (states or [("", "")])[0])
    return {"name": name, "device": device, "state": state, "rate": rate}


def _told(make: Callable[[], Mapping[str, str]]) -> dict[str, str]:
    try:
        return dict(make())
    except H3Error as exc:
        return {"unknown": str(exc)}


def _inventory(asked: Asked) -> Inventory | dict[str, str]:
    if asked.checkpoint is None:
        return {"unknown": "none was named"}
    try:
        return take_inventory(Path(asked.checkpoint), asked.task).require_clean()
    except H3Error as exc:
        return {"unknown": str(exc)}
    except OSError as exc:
        return {"unknown": f"{asked.checkpoint}: {exc.strerror or exc}"}


def _need(recipe: str, found: Inventory | dict[str, str]) -> int | None:
    if isinstance(found, dict):
        return None
    try:
        return need_of(recipe, found).resident
    except H3Error:
        return None


def _image() -> dict[str, str]:
    try:
        built = json.loads(BUILD_RECORD.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: str(built.get(key, "")) for key in ("revision", "base", "image_lock_sha256")}


def _available(cuda: bool) -> int:
    from vllm_h3_plugin.memory.system import probe

    if cuda:
        import torch

        cuda = torch.cuda.is_available()
    return probe("cuda" if cuda else "cpu").available()


def _addresses(known: Mapping[str, Any], name: str) -> list[str]:
    return [entry.address.partition("%")[0] for entry in known.get(name, ()) if entry.family.name != "AF_PACKET"]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
