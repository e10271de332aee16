# SPDX-License-Identifier: Apache-2.0
"""A manifest of the SHA-256 of every weight file, in the format of ``sha256sum``.

Paths in it are relative to the release's root, the folder that holds ``FL2VA`` and ``Ref2VA``, whichever of the three
was named: so a manifest of both partitions serves each of them, and one partition's shards are never mistaken for
the other's. ``cd ROOT && sha256sum -c FILE`` checks it too. Importing this module does not import torch.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vllm_h3_plugin.checkpoint.atomic import fsync
from vllm_h3_plugin.checkpoint.hash_files import Hashed, stat_file
from vllm_h3_plugin.checkpoint.inventory import Inventory, ShardFile
from vllm_h3_plugin.errors import CheckpointError, UsageError

_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


def release_root(inventory: Inventory) -> Path:
    """The folder that manifest paths are relative to.

    Raises:
        CheckpointError: there is no checkpoint at that path.
    """
    if not inventory.partitions:
        inventory.require_clean()
    return Path(os.path.abspath(inventory.partitions[0].path)).parent


def weight_files(inventory: Inventory) -> dict[str, ShardFile]:
    """Path in a manifest -> weight file, of all parts of all partitions, VAEs included; sorted by path."""
    root = release_root(inventory)
    files = [file for partition in inventory.partitions for part in partition.parts for file in part.files]
    return dict(sorted((manifest_path(file.path, root), file) for file in files))


def manifest_path(path: Path, root: Path) -> str:
    """A file's path as it stands in a manifest."""
    return Path(os.path.abspath(path)).relative_to(root).as_posix()


def read_manifest(manifest: Path) -> dict[str, str]:
    """Path -> SHA-256 in lower case, in the order of the file. Empty lines and those that start with ``#`` are skipped.

    Raises:
        CheckpointError: it cannot be read, is empty, or has a line that cannot be right; names file and line.
    """
    try:
        lines = manifest.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        why = (exc.strerror or str(exc)) if isinstance(exc, OSError) else "it is not text"
        fix = "Give the file that `vllm-h3 checksums CKPT` wrote."
        raise CheckpointError(f"{manifest} cannot be read", why=why, fix=fix, path=str(manifest)) from exc
    digests: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise _bad_line(manifest, number, "a line is 64 hex digits, two spaces and a path")
        digest, name = match[1].lower(), match[2]
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise _bad_line(manifest, number, f"{name} leads out of the checkpoint")
        if digests.setdefault(str(path), digest) != digest:
            raise _bad_line(manifest, number, f"{name} stands in it before, with another SHA-256")
    if not digests:
        raise CheckpointError(
            f"{manifest} lists no file",
            why="it is empty",
            fix="Write it anew: vllm-h3 checksums CKPT",
            path=str(manifest),
        )
    return digests


def _bad_line(manifest: Path, number: int, why: str) -> CheckpointError:
    return CheckpointError(
        f"{manifest}, line {number}",
        why=why,
        fix="Correct that line, or write the file anew: vllm-h3 checksums CKPT",
        path=str(manifest),
        line=number,
    )


def digests_for(manifest: Path, inventory: Inventory) -> dict[Path, str]:
    """Path of every weight file as the inventory has it -> its SHA-256 in a manifest.

    Raises:
        CheckpointError: the manifest cannot be read or lacks a file; names the file and the command that lists it.
    """
    digests = read_manifest(manifest)
    result = {}
    for name, file in weight_files(inventory).items():
        if name not in digests:
            raise CheckpointError(
                f"{manifest} has no SHA-256 of {file.path}",
                why=f"no line of it ends in {name}",
                fix=f"If you trust these files, write it anew: {write_command(inventory, manifest)}",
                path=str(manifest),
                file=str(file.path),
            )
        result[file.path] = digests[name]
    return result


@dataclass(frozen=True)
class Verdicts:
    """What a check found.

    Attributes:
        good: manifest paths of files that are as listed.
        bad: manifest path -> what is wrong with it.
    """

    good: tuple[str, ...]
    bad: dict[str, str]

    @property
    def count(self) -> int:
        """Files that were looked for or found."""
        return len(self.good) + len(self.bad)


def compare(
    manifest: Path, inventory: Inventory, hasher: Callable[[Iterable[ShardFile]], Mapping[Path, Hashed]]
) -> Verdicts:
    """Hold every file that a manifest lists for a checkpoint, and every weight file of it, against each other.

    Needs no clean inventory: truncated and missing files are what a check is for.

    Args:
        hasher: hashes files that are there; path -> result for each of them.

    Raises:
        CheckpointError: the manifest cannot be read or lists nothing of this checkpoint, or there is no checkpoint.
    """
    listed = read_manifest(manifest)
    root = release_root(inventory)
    if Path(os.path.abspath(inventory.path)) != root:
        folders = {manifest_path(partition.path, root) for partition in inventory.partitions}
        listed = {name: digest for name, digest in listed.items() if name.split("/")[0] in folders}
    if not listed:
        raise CheckpointError(
            f"{manifest} lists no file of {inventory.path}",
            why=f"its paths do not begin in {root}",
            fix=f"Give the file that belongs to it, or write one: {write_command(inventory, manifest)}",
            path=str(manifest),
        )
    bad = {name: f"not listed in {manifest.name}" for name in weight_files(inventory) if name not in listed}
    present = {}
    for name in listed:
        try:
            present[name] = stat_file(root / name)
        except OSError as exc:
            bad[name] = f"missing ({exc.strerror})"
    good = []
    found = hasher(present.values())
    for name, file in present.items():
        result = found[file.path]
        if result.error is not None:
            bad[name] = str(result.error)
        elif result.sha256 != listed[name]:
            bad[name] = f"SHA-256 {result.sha256}, listed {listed[name]}"
        else:
            good.append(name)
    return Verdicts(tuple(good), bad)


def write_command(inventory: Inventory, manifest: Path) -> str:
    """The command that writes a manifest of this checkpoint."""
    words = ["vllm-h3", "checksums", str(inventory.path), "--output", str(manifest), "--force"]
    return shlex.join(words if manifest.exists() else words[:-1])


def write_manifest(manifest: Path, digests: Mapping[str, str], *, force: bool = False) -> None:
    """Write path -> SHA-256 so that the file is whole or not there, also after a crash.

    Raises:
        UsageError: it exists and ``force`` is off, or its folder cannot be written.
    """
    refuse_existing(manifest, force)
    text = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{manifest.name}.", suffix=".part", dir=manifest.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(descriptor, 0o644)
            os.fsync(descriptor)
        if force:
            os.replace(temporary, manifest)
            temporary = None
        else:
            os.link(temporary, manifest)  # unlike a rename, never over a file that has come since
        fsync(manifest.parent)
    except FileExistsError:
        refuse_existing(manifest, force)
        raise
    except OSError as exc:
        raise UsageError(
            f"{manifest} cannot be written",
            why=exc.strerror or str(exc),
            fix="Choose a folder of yours with --output FILE.",
        ) from exc
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def refuse_existing(manifest: Path, force: bool) -> None:
    """Raise before any work is done for a manifest that may not be written.

    Raises:
        UsageError: it exists, and ``force`` is off.
    """
    if manifest.exists() and not force:
        raise UsageError(
            f"{manifest} exists",
            why="checksums are not overwritten: they may be what shows that a file has changed",
            fix="Compare with --check FILE, write to another place with --output FILE, or add --force.",
        )
