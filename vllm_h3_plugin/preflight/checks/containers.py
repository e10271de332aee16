# SPDX-License-Identifier: Apache-2.0
"""Docker engine, compose, NVIDIA runtime, and the pinned image."""

from __future__ import annotations

from vllm_h3_plugin.preflight.check import Check, Unknown, failed, is_number, passed, warned
from vllm_h3_plugin.preflight.facts import Docker, Image

_REGISTRY_NAMES = {"x86_64": "amd64", "aarch64": "arm64"}
_GONE = ("not found", "manifest unknown", "no such manifest")


def engine(found: Docker | Unknown) -> Check:
    """A docker engine that answers this user."""
    name = "docker"
    if not isinstance(found, Unknown):
        return passed(name, f"engine {found.version}, {found.architecture}")
    if "permission denied" in found.reason.lower():
        return failed(
            name,
            f"this user may not talk to the engine: {found.reason}",
            'Join its group, then log in again: sudo usermod -aG docker "$USER"',
        )
    if "not installed" in found.reason:
        return failed(
            name,
            found.reason,
            "Install Docker Engine (DGX OS brings it), or add --without-docker if the server runs outside a container.",
        )
    return failed(name, f"the engine does not answer: {found.reason}", "Start it: sudo systemctl start docker")


def compose(found: str | Unknown) -> Check:
    """Compose, version 2 or later, as docker's plugin."""
    name = "compose"
    remedy = "Install docker's compose plugin: sudo apt-get install docker-compose-plugin"
    if isinstance(found, Unknown):
        return failed(name, f"`docker compose` does not run: {found.reason}", remedy)
    major = found.lstrip("v").partition(".")[0]
    if not is_number(major) or int(major) < 2:
        return failed(name, f"version {found}; 2 or later is needed", remedy)
    return passed(name, f"version {found}")


def buildx(found: str | Unknown) -> Check:
    """buildx, as docker's plugin."""
    name = "buildx"
    if isinstance(found, Unknown):
        return failed(
            name,
            f"`docker buildx` does not run, and `make build` needs it: {found.reason}",
            "Install docker's buildx plugin: sudo apt-get install docker-buildx-plugin",
        )
    return passed(name, found)


def nvidia_runtime(found: Docker) -> Check:
    """A way for a container to reach the GPU."""
    name = "NVIDIA runtime"
    if "nvidia" in found.runtimes:
        return passed(name, "docker has the runtime `nvidia`")
    if any(device.startswith("nvidia.com/gpu") for device in found.cdi_devices):
        return passed(name, f"docker knows the GPU by CDI ({found.cdi_devices[0]})")
    return failed(
        name,
        f"docker has no runtime `nvidia` and no CDI device (runtimes: {', '.join(found.runtimes) or 'none'})",
        "Install nvidia-container-toolkit, then: sudo nvidia-ctk runtime configure --runtime=docker && "
        "sudo systemctl restart docker",
    )


def image(found: Image, architecture: str) -> Check:
    """The pinned image against what the registry has under that digest, for this machine's architecture."""
    name = "image"
    wanted = _REGISTRY_NAMES.get(architecture, architecture)
    if found.digest is None:
        return warned(
            name,
            f"no digest of {found.reference} is pinned in launch/image.lock, and a build refuses a bare tag",
            f"Find it where there is a network (docker buildx imagetools inspect {found.reference}) and put it there.",
        )
    pinned = found.pinned
    if isinstance(pinned, Unknown):
        if any(word in pinned.reason.lower() for word in _GONE):
            return failed(
                name,
                f"the registry has no {found.reference}: {pinned.reason}",
                "Compare launch/image.lock with a fresh clone; a mirror must carry this digest.",
            )
        if found.local:
            return passed(name, f"{found.reference} is on this machine; the registry was not reached")
        return warned(
            name,
            f"{found.reference} is not on this machine and the registry did not tell about it: {pinned.reason}",
            f"Once online: docker pull {found.reference}",
        )
    if pinned.digest != found.digest:
        return failed(
            name,
            f"digest mismatch: launch/image.lock pins {found.digest} and the registry answers {pinned.digest}",
            "Do not build. Compare launch/image.lock with a fresh clone, and look for a proxy or mirror that rewrites "
            "images.",
        )
    if pinned.platforms and wanted not in pinned.platforms:
        return failed(
            name,
            f"{found.reference} has no {wanted} image; it has {', '.join(sorted(pinned.platforms))}",
            "Run it on a machine of one of these architectures.",
        )
    mine = pinned.platforms.get(wanted, pinned.digest)
    tag = found.tag
    if not isinstance(tag, Unknown) and tag.digest != found.digest:
        return warned(
            name,
            f"{mine} is pinned for {wanted} and there; the tag itself has moved on to {tag.digest}",
            "Nothing to do: builds take the pinned digest, not the tag.",
        )
    return passed(name, f"{mine} for {wanted}{', on this machine' if found.local else ''}")
