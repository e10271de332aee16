# SPDX-License-Identifier: Apache-2.0
"""The checks of a node, as pure functions of what it and the caller's node said."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_h3_plugin.checkpoint.same_files import different, total_digest
from vllm_h3_plugin.preflight.check import Check, Unknown, failed, passed, warned
from vllm_h3_plugin.preflight.cluster.facts import ClockReading, Exchange, Link, NodeFacts, NodeName
from vllm_h3_plugin.preflight.need import GIB

CLOCK_BOUND_S = 1.0
"""Logs and deadlines of two machines are read side by side; NTP keeps clocks within milliseconds."""

SAME_IMAGE = (
    "Give every machine the same image: `docker save IMAGE | gzip > image.tgz` where it was built, `docker load < "
    "image.tgz` on the others."
)
_EXCHANGES = 4


def nodes(found: int, wanted: int, waited_s: float) -> Check:
    """Whether as many nodes have joined as the profile wants."""
    if found >= wanted:
        return passed("nodes", f"{found} of {wanted}")
    return failed(
        "nodes",
        f"{found} of {wanted} nodes joined within {waited_s:g} s",
        "Start the missing one: `docker compose -f compose.cluster.yaml up -d worker` there, and look at its log: it "
        "names the head's address that it cannot reach, another Ray version or a wrong token.",
    )


def answer(name: str, why: str) -> Check:
    """A node that gave no answer."""
    return failed("answer", f"{name}: {why}", "Look at the node: its memory, its disk, `docker compose logs worker`.")


def plugin(node: NodeFacts, here: NodeFacts) -> Check:
    """Version and content of the plugin."""
    mine, its = (f"{facts.plugin['version']} ({facts.plugin['content'][:12]})" for facts in (here, node))
    return _same("plugin", its, mine, SAME_IMAGE)


def image(node: NodeFacts, here: NodeFacts) -> Check:
    """Commit, base and lock that the image was built from."""

    def told(facts: NodeFacts) -> str:
        found = facts.image
        return f"{found['revision'][:12]} on {found['base'].rpartition('@')[2][:19]}" if found else "no image"

    same = node.image == here.image
    return _same("image", told(node), told(here), SAME_IMAGE, same=same)


def host(node: NodeFacts, here: NodeFacts) -> Check:
    """Versions of the host and of torch."""
    names = [name for name in here.packages if name != "ray"]
    off = [name for name in names if node.packages.get(name) != here.packages[name]] or names
    its, mine = (", ".join(f"{name} {facts.packages.get(name)}" for name in off) for facts in (node, here))
    return _same("host", its, mine, SAME_IMAGE)


def ray(node: NodeFacts, here: NodeFacts) -> Check:
    """Ray's version."""
    return _same("Ray", node.packages.get("ray", "?"), here.packages.get("ray", "?"), SAME_IMAGE)


def recipe(node: NodeFacts, here: NodeFacts) -> Check:
    """Name and content of the recipe."""
    for facts in (node, here):
        if isinstance(facts.recipe, Unknown):
            return failed("recipe", facts.recipe.reason, "Name a recipe that every machine has: `--recipe`.")
    its, mine = (f"{facts.recipe['name']} ({facts.recipe['sha256'][:12]})" for facts in (node, here))  # type: ignore[index]
    return _same("recipe", its, mine, "Copy the recipe's file to every machine, at the same path.")


def checkpoint(node: NodeFacts, here: NodeFacts, where: NodeName, *, whole: bool) -> Check:
    """Every file of the checkpoint."""
    if isinstance(node.checkpoint, Unknown):
        return failed(
            "checkpoint",
            node.checkpoint.reason,
            "Every machine loads from its own disk: put the checkpoint there, at the same path.",
        )
    files = node.checkpoint
    if isinstance(here.checkpoint, Unknown):
        return failed("checkpoint", f"nothing to compare with: {here.checkpoint.reason}", "Make that one right first.")
    off = different(files, here.checkpoint)
    if not off:
        read = "read to the end" if whole else "headers, sizes and samples; --deep reads all"
        return passed("checkpoint", f"{total_digest(files)[:12]}, {len(files)} files ({read})")
    lacking = [name for name in off if name not in files]
    named = ", ".join(f"{name} {'is missing' if name in lacking else 'differs'}" for name in off[:3])
    more = f" and {len(off) - 3} more" if len(off) > 3 else ""
    return failed(
        "checkpoint",
        f"not the files of {where}: {named}{more}",
        f"Copy them once more: `rsync -a --checksum` from {where.address}, or look with `vllm-h3 checksums`.",
    )


def interface(node: NodeFacts, name: NodeName) -> Check:
    """The network interface of the cluster: there, up, and the one that the node is known by."""
    found = node.interface
    if not found.get("name"):
        listed = found.get("addresses", {})
        owner = next((key for key, its in listed.items() if _holds(its, name.address)), "")
        if owner:
            return passed("interface", f"none is named: {owner}, which has {name.address}")
        return warned(
            "interface",
            f"none is named, and no interface of this node has {name.address}",
            "Set H3_CLUSTER_INTERFACE: else gloo and NCCL choose one themselves.",
        )
    word = str(found["name"])
    if word not in found["known"]:
        return failed(
            "interface",
            f"there is no {word}; there are {', '.join(found['known'])}",
            "Set H3_CLUSTER_INTERFACE to the private one; `ip -br address` lists them.",
        )
    if not found["up"]:
        return failed(
            "interface", f"interface {word} is down", f"ip link set {word} up; look at the cable: `ethtool {word}`."
        )
    if not _holds(found["addresses"], name.address):
        return failed(
            "interface",
            f"Ray reaches the node at {name.address}, which is not on {word} "
            f"({', '.join(found['addresses']) or 'no address'})",
            "Set H3_CLUSTER_BIND to the address of that interface and start the node anew: what goes over another one "
            "is slow, or not private.",
        )
    speed = f", {found['mbit'] / 1000:g} Gbit/s" if found["mbit"] else ""
    return passed("interface", f"{word} up{speed}, MTU {found['mtu']}")


def hca(node: NodeFacts, *, cuda: bool) -> Check:
    """The InfiniBand or RoCE devices."""
    found = node.hca
    known = ", ".join(found["known"])
    if not found.get("names"):
        if cuda and found["known"]:
            return warned(
                "HCA",
                f"none is named; there are {known}",
                f"Set H3_CLUSTER_HCA={found['known'][0]}; `ibdev2netdev` says which belongs to the interface.",
            )
        return passed("HCA", "none named, none needed" if not cuda else "none: NCCL goes over TCP")
    for device in found["devices"]:
        if device["device"] not in found["known"]:
            return failed(
                "HCA",
                f"there is no {device['device']}; {f'there are {known}' if known else 'there is none at all'}",
                "Set H3_CLUSTER_HCA to names below /sys/class/infiniband, or unset it; in a container the devices must "
                "be passed on (/dev/infiniband).",
            )
        state = device["state"].rpartition(" ")[2] or "without a port"
        if state != "ACTIVE":
            return failed("HCA", f"{device['name']} is {state}", "Look at the cable and the other end: `ibv_devinfo`.")
    return passed("HCA", "; ".join(f"{device['name']} ACTIVE, {device['rate']}" for device in found["devices"]))


def clock(reading: ClockReading | Unknown) -> Check:
    """The node's clock against the caller's."""
    if isinstance(reading, Unknown):
        return failed("clock", reading.reason, "Look at the node.")
    text = f"{reading.offset_s:+.3f} s (± {reading.uncertain_s:.3f})"
    if abs(reading.offset_s) - reading.uncertain_s > CLOCK_BOUND_S:
        return failed(
            "clock",
            f"{text}, more than {CLOCK_BOUND_S:g} s off",
            "Let it follow a time server: timedatectl set-ntp true.",
        )
    return passed("clock", text)


def memory(node: NodeFacts) -> Check:
    """Free memory against what the whole model takes on one machine, which is more than a node's share."""
    free = f"{node.available_bytes / GIB:.1f} GiB free"
    if node.need_bytes is None:
        return warned("memory", f"{free}; the need is not known", "Make checkpoint and recipe right first.")
    text = f"{free}, the model takes {node.need_bytes / GIB:.1f} GiB at most"
    if node.available_bytes < node.need_bytes:
        return failed("memory", text, "End what holds it: `docker ps`, `ps aux --sort=-rss | head`.")
    return passed("memory", text)


def token(node: NodeFacts, name: NodeName) -> Check:
    """Whether Ray asks for a token. Whoever reaches its ports without one may run any code there."""
    if node.token:
        return passed("access", "Ray asks for a token")
    fix = "Set RAY_AUTH_MODE=token and one token on every machine, as compose.cluster.yaml does."
    if name.address.startswith("127."):
        return warned("access", "Ray asks for no token; only this machine reaches it", fix)
    return failed("access", "Ray asks for no token: whoever reaches its ports may run any code", fix)


def gpu(name: NodeName) -> Check:
    """Whether Ray has a GPU for a rank there."""
    if name.gpus:
        return passed("GPU", f"{name.gpus} for Ray")
    return failed(
        "GPU",
        "Ray has no GPU to hand out there",
        "Does `nvidia-smi` list one in the container? Ray is told of it by `ray start --num-gpus=1`.",
    )


def link(found: Link | Unknown, exchange: Exchange, least_gbit: float, *, cuda: bool) -> Check:
    """What one rank measured against what is asked."""
    if isinstance(found, Unknown):
        return failed(
            "link",
            found.reason,
            "The nodes must reach each other on the interface, on all ports: look at its routes and at the firewall.",
        )
    if cuda and found.backend != "nccl":
        return failed(
            "link",
            f"torch sees no GPU there, so it was measured by {found.backend}",
            "Does `nvidia-smi` list one in the container? `vllm-h3 doctor` says what torch sees.",
        )
    step_s = found.all_to_all_s * _EXCHANGES * exchange.blocks
    text = (
        f"{found.gbit:.1f} Gbit/s, {found.latency_s * 1e6:.0f} µs by {found.backend}; the exchanges of a step of "
        f"{exchange.clip} take {step_s:.3g} s"
    )
    if found.gbit < least_gbit:
        return failed(
            "link",
            f"{text}, and {least_gbit:g} Gbit/s are asked for",
            "Is it the fast interface? Name it and its HCA (H3_CLUSTER_INTERFACE, H3_CLUSTER_HCA), with MTU 9000; "
            "`--least-gbit` sets what is asked for.",
        )
    return passed("link", text)


def _same(name: str, its: str, mine: str, fix: str, *, same: bool | None = None) -> Check:
    equal = its == mine if same is None else same
    return passed(name, its) if equal else failed(name, f"{its}; this machine has {mine}", fix)


def _holds(addresses: Sequence[str], address: str) -> bool:
    """Whether an interface has an address. It names one of the loopback addresses and has all of 127.0.0.0/8."""
    loopback = address.startswith("127.") and any(one.startswith("127.") for one in addresses)
    return address in addresses or loopback
