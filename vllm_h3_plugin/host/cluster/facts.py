# SPDX-License-Identifier: Apache-2.0
"""What one machine runs and serves, and whether all do the same. Imports neither torch nor the host."""

from __future__ import annotations

import mmap
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vllm_h3_plugin.errors import CheckpointError, HostError, RecipeError

_WORDS = frozenset({"name", "description", "source", "rules"})
"""Of a recipe's fields, those that change nothing, and the rules, which have words of their own."""
_PACKAGES = ("vllm", "vllm-omni", "torch", "ray")


@dataclass(frozen=True)
class NodeFacts:
    """One rank's machine.

    Attributes:
        node: its address in Ray.
        versions: package -> version; the plugin's and Python's are among them.
        recipe: digest of what the recipe's name stands for there.
        checkpoint: part -> digest of its files, time of change left out; see :func:`checkpoint_digests`.
        path: the checkpoint's folder there.
        checksums: digest of the manifest that H3_VERIFY_CHECKSUMS names, path by path; None without.
    """

    node: str
    versions: Mapping[str, str]
    recipe: str
    checkpoint: Mapping[str, str]
    path: str
    checksums: str | None = None


def versions() -> dict[str, str]:
    """What must be equal on all machines."""
    from vllm_h3_plugin import __version__

    found = {"vllm-h3-plugin": __version__, "python": ".".join(platform.python_version_tuple()[:2])}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def checkpoint_digests(path: Path, task: str | None) -> dict[str, str]:
    """Part -> BLAKE3 over its config and files, whenever they were written and wherever they lie.

    Of each file of the DiT and the text encoder: name, size, header and 64 samples of 4 KiB. The VAEs are read whole.
    What samples miss of the other two is found by the snapshots' digests once they are loaded, or by
    ``H3_VERIFY_CHECKSUMS``.

    Raises:
        CheckpointError: it is not sound.
    """
    from blake3 import blake3

    from vllm_h3_plugin.checkpoint.inventory import take_inventory
    from vllm_h3_plugin.checkpoint.source_identity import file_samples

    digests = {}
    for partition in take_inventory(path, task).require_clean().partitions:
        for part in partition.parts:
            hasher = blake3()
            for config in sorted(part.path.glob("*.json")):
                hasher.update(config.name.encode() + config.read_bytes())
            for file in part.files:
                hasher.update(f"{file.path.relative_to(part.path)} {file.size} ".encode())
                if part.name.endswith("vae"):
                    _whole(hasher.update, file.path)
                else:
                    for sample in file_samples(file):
                        hasher.update(sample)
            digests[f"{partition.name}/{part.name}"] = hasher.hexdigest()
    return digests


def _whole(update: Callable[[bytes], object], path: Path) -> None:
    with path.open("rb") as file:
        while data := file.read(mmap.PAGESIZE << 10):
            update(data)


def recipe_facts(name: str) -> str:
    """Digest of all that a recipe decides; how it is called and explained and where it lies may differ."""
    from blake3 import blake3

    from vllm_h3_plugin.quantization.recipe import load_recipe

    recipe = load_recipe(name)
    said = [(field.name, getattr(recipe, field.name)) for field in fields(recipe) if field.name not in _WORDS]
    rules = [(rule.match, rule.precision) for rule in recipe.rules]
    return blake3(repr((said, rules)).encode()).hexdigest()


def require_same(found: Sequence[NodeFacts]) -> None:
    """Hold every machine against the first.

    Raises:
        HostError: versions differ; RecipeError: recipes do; CheckpointError: files or checksums do. Each names the
            machine and what is on both.
    """
    first = found[0]
    for other in found[1:]:
        odd = [name for name in first.versions if other.versions.get(name) != first.versions[name]]
        if odd:
            theirs = ", ".join(f"{name} {other.versions.get(name, 'none')}" for name in odd)
            ours = ", ".join(f"{name} {first.versions[name]}" for name in odd)
            raise HostError(
                f"node {other.node} runs {theirs}",
                why=f"node {first.node} runs {ours}, and all must run the same",
                fix="Start Ray on both from one image.",
                node=other.node,
            )
        if other.recipe != first.recipe:
            raise RecipeError(
                f"the recipe on node {other.node} is not that of node {first.node}",
                why="the same name stands for other rules there",
                fix="Start Ray on both from one image, or copy the recipe's file.",
                node=other.node,
            )
        _same_files(first, other)


def require_same_weights(loaded: Mapping[str, Mapping[str, str]]) -> None:
    """Hold what every machine has loaded against the first: every byte of every quantized snapshot has a part in it.

    Args:
        loaded: machine -> part -> digest.

    Raises:
        CheckpointError: names machine and part.
    """
    first, *others = loaded
    for other in others:
        odd = sorted(part for part, digest in loaded[first].items() if loaded[other].get(part, digest) != digest)
        if odd:
            raise CheckpointError(
                f"the weights on node {other} are not those of node {first}: {', '.join(odd)}",
                why="their snapshots have other digests, so a checkpoint's bytes differ or were changed on a disk",
                fix="Run `vllm-h3 checksums` on both and compare; copy what differs again and remove that snapshot.",
                node=other,
                parts=odd,
            )


def _same_files(first: NodeFacts, other: NodeFacts) -> None:
    parts = sorted({*first.checkpoint, *other.checkpoint})
    odd = [part for part in parts if first.checkpoint.get(part) != other.checkpoint.get(part)]
    if odd:
        raise CheckpointError(
            f"the checkpoint on node {other.node} is not that of node {first.node}: {', '.join(odd)}",
            why=f"files in {other.path} there differ from those in {first.path} here",
            fix="Run `vllm-h3 checksums` on both and compare; copy what differs again.",
            node=other.node,
            parts=odd,
        )
    if first.checksums != other.checksums:
        raise CheckpointError(
            f"the checksums on node {other.node} are not those of node {first.node}",
            why="H3_VERIFY_CHECKSUMS names different lists, or is set on one of them alone",
            fix="Give both the same file.",
            node=other.node,
        )
