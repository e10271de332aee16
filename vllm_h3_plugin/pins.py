# SPDX-License-Identifier: Apache-2.0
"""The pinned hosts, read from ``launch/image.lock``.

A host is one version of vLLM with one version of vLLM-Omni. The plugin reaches into both below their public interface,
so any other version is refused by name instead of failing somewhere inside a request.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vllm_h3_plugin.data import data_path
from vllm_h3_plugin.errors import HostError

_INSTALL = "In a checkout, `make setup` installs the pinned host; a container builds on the image in launch/image.lock."


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel file of a host, as the package index names it."""

    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class ImagePin:
    """The container image of a host.

    ``digest`` is None where none is known: the operator must supply one. ``variants`` are suffixes of the tag, one for
    each generation of the accelerator.
    """

    reference: str
    digest: str | None
    variants: tuple[str, ...]

    @property
    def pinned(self) -> str | None:
        """``reference@digest``, or None without a digest."""
        return f"{self.reference}@{self.digest}" if self.digest else None


@dataclass(frozen=True, slots=True)
class HostPin:
    """One supported host.

    ``requirements`` is its lock file, relative to the top of a checkout. ``oracle`` is the wheel of the accelerator's
    operators that tests read declarations from; it is never installed.
    """

    name: str
    vllm: str
    vllm_omni: str
    image: ImagePin
    wheels: tuple[Wheel, ...]
    requirements: str
    oracle: Wheel | None = None

    def __str__(self) -> str:
        return f"vLLM {self.vllm} + vLLM-Omni {self.vllm_omni} ({self.name})"


@dataclass(frozen=True, slots=True)
class Pins:
    """All hosts; the default one is first."""

    hosts: tuple[HostPin, ...]

    def host(self, name: str) -> HostPin:
        """The host of that name.

        Raises:
            HostError: no host has the name.
        """
        for pin in self.hosts:
            if pin.name == name:
                return pin
        raise HostError(f"unknown host {name!r}", fix=f"Known: {', '.join(pin.name for pin in self.hosts)}.")


def parse_pins(text: str) -> Pins:
    """Pins from the text of an ``image.lock``.

    Raises:
        KeyError, TypeError, tomllib.TOMLDecodeError: the file is not what this module expects. It ships with the
            plugin, so that is a bug and not a user's fault.
    """
    raw = tomllib.loads(text)
    default = raw.pop("default")
    hosts = [_host(name, table) for name, table in raw.items()]
    if default not in raw:
        raise KeyError(default)
    return Pins(tuple(sorted(hosts, key=lambda pin: pin.name != default)))


def _host(name: str, table: dict[str, Any]) -> HostPin:
    image = table["image"]
    return HostPin(
        name=name,
        vllm=table["vllm"],
        vllm_omni=table["vllm-omni"],
        image=ImagePin(image["reference"], image.get("digest"), tuple(image["variants"])),
        wheels=tuple(Wheel(file, sha256) for file, sha256 in table["wheels"].items()),
        requirements=table["requirements"],
        oracle=next((Wheel(file, sha256) for file, sha256 in table.get("oracle", {}).items()), None),
    )


@cache
def load_pins() -> Pins:
    """Pins of this installation."""
    return parse_pins(lock_file().read_text(encoding="utf-8"))


def lock_file() -> Path:
    """Where ``image.lock`` lies in this installation."""
    return data_path("launch") / "image.lock"


def host_for(vllm_version: str, omni_version: str) -> HostPin:
    """The pinned host with exactly these versions.

    A local version segment is ignored (``0.30.0+cu130`` is 0.30.0 built for one CUDA); anything else must be equal.

    Raises:
        HostError: no host has them; names what was found and every accepted pair.
    """
    found = (vllm_version.partition("+")[0], omni_version.partition("+")[0])
    pins = load_pins()
    for pin in pins.hosts:
        if found == (pin.vllm, pin.vllm_omni):
            return pin
    raise HostError(
        f"host is vLLM {vllm_version} + vLLM-Omni {omni_version}",
        why="this version of the plugin works only with " + " or ".join(str(pin) for pin in pins.hosts),
        fix=_INSTALL,
        found={"vllm": vllm_version, "vllm-omni": omni_version},
        accepted=[{"vllm": pin.vllm, "vllm-omni": pin.vllm_omni} for pin in pins.hosts],
    )


def installed_host() -> HostPin:
    """The host of this environment, from package metadata; imports neither vLLM nor vLLM-Omni.

    Raises:
        HostError: a package is missing, or the versions are not pinned ones.
    """
    found: dict[str, str] = {}
    for package in ("vllm", "vllm-omni"):
        try:
            found[package] = version(package)
        except PackageNotFoundError as exc:
            accepted = " or ".join(str(pin) for pin in load_pins().hosts)
            raise HostError(
                f"{package} is not installed in this environment", why=f"the plugin needs {accepted}", fix=_INSTALL
            ) from exc
    return host_for(found["vllm"], found["vllm-omni"])
