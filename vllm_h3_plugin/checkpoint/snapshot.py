# SPDX-License-Identifier: Apache-2.0
"""Find and open quantized snapshots. What is not whole, or not of this key, is refused by name and reason.

Importing this module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from blake3 import blake3

from vllm_h3_plugin.checkpoint.faults import FaultLog
from vllm_h3_plugin.checkpoint.file_lock import HeldLock, hold, holder
from vllm_h3_plugin.checkpoint.inventory import PartInventory
from vllm_h3_plugin.checkpoint.safetensors_header import ShardFile, read_header
from vllm_h3_plugin.checkpoint.snapshot_manifest import (
    MANIFEST,
    ForeignFormat,
    Manifest,
    PartManifest,
    SnapshotKey,
    parse_manifest,
    parse_piece,
    piece_name,
    piece_record,
)
from vllm_h3_plugin.checkpoint.snapshot_paths import PATIENCE_S, is_id, lock_of, snapshots_folder
from vllm_h3_plugin.errors import CheckpointError, SnapshotError

__all__ = ["Snapshot", "StaleSnapshot", "find_stale", "open_folder", "open_snapshot", "parse_piece", "read_manifest"]


class Snapshot:
    """A whole snapshot, locked against removal and replacement until :meth:`close`; a context manager.

    A writer of the same key, in this process too, is turned away while it is open.
    """

    def __init__(self, folder: Path, manifest: Manifest, files: Mapping[str, ShardFile], lock: HeldLock) -> None:
        self.folder = folder
        self.manifest = manifest
        self._files = files
        self._lock = lock

    @property
    def id(self) -> str:
        """Name of its folder."""
        return self.folder.name

    @property
    def key(self) -> SnapshotKey:
        """What it was made from and for."""
        return self.manifest.key

    @property
    def notes(self) -> Mapping[str, Any]:
        """What its writer noted."""
        return self.manifest.notes

    @property
    def nbytes(self) -> int:
        """Size of all its parts' files."""
        return self.manifest.nbytes

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of its parts."""
        return tuple(self.manifest.parts)

    def file(self, name: str) -> ShardFile:
        """A part's file with its *entries*: whole, unsharded parameters, for mapping.

        Raises:
            SnapshotError: it has no such part.
        """
        if name not in self._files:
            _refuse(self.folder, f"it has no part {name}, only {', '.join(self.parts)}")
        return self._files[name]

    def part(self, name: str) -> PartInventory:
        """A part whose tensors are the *pieces*, in file order, named ``<parameter>@<shard>``; see ``parse_piece``.

        Raises:
            SnapshotError: it has no such part.
        """
        file = self.file(name)
        entries = {record.name: record for record in file.tensors}
        pieces = tuple(piece_record(entries[param], piece) for param, piece, _ in self.manifest.parts[name].pieces)
        return PartInventory(name, self.folder, (ShardFile(file.path, file.size, file.mtime_ns, pieces),), pieces)

    def digests(self, name: str) -> dict[str, str]:
        """Piece name -> BLAKE3 of its bytes, in hex.

        Raises:
            SnapshotError: it has no such part.
        """
        self.file(name)
        return {piece_name(param, piece.shard): digest for param, piece, digest in self.manifest.parts[name].pieces}

    def close(self) -> None:
        """Let it be removed or replaced; may be called again."""
        self._lock.release()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_snapshot(cache_dir: Path, key: SnapshotKey) -> Snapshot | None:
    """The snapshot of that key; None if there is none.

    Its manifest, its files' sizes and their headers are checked here; the pieces' bytes are checked against
    :meth:`Snapshot.digests` by who reads them, or by ``vllm-h3 snapshot verify``.

    Raises:
        SnapshotError: there is one and it is half-written, truncated, foreign, unreadable, or being replaced now.
            ``details["path"]`` is the file at fault.
    """
    folder = snapshots_folder(cache_dir) / key.id
    try:
        return open_folder(folder, key) if os.path.lexists(folder) else None
    except SnapshotError:
        if not os.path.lexists(folder):  # removed while this waited for its lock
            return None
        raise


def open_folder(folder: Path, key: SnapshotKey | None = None, *, mark: bool = True) -> Snapshot:
    """The snapshot in that folder; with ``key``, only if it is of that key.

    Args:
        mark: that this is a use of it.

    Raises:
        SnapshotError: as :func:`open_snapshot`.
    """
    lock = _share(folder)
    try:
        manifest = read_manifest(folder)
        if manifest.key.id != folder.name:
            _refuse(folder / MANIFEST, f"it is the manifest of snapshot {manifest.key.id}")
        if key is not None and manifest.key != key:
            _refuse(folder / MANIFEST, f"it is of another key: {_differences(manifest.key, key)}")
        files = {name: _file(folder, part) for name, part in manifest.parts.items()}
    except BaseException:
        lock.release()
        raise
    if mark:
        _mark_used(lock)
    return Snapshot(folder, manifest, files, lock)


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a snapshot's folder.

    Raises:
        SnapshotError: there is none (half-written), it cannot be read, or it is not one of this version.
    """
    path = folder / MANIFEST
    try:
        return parse_manifest(path.read_bytes())
    except FileNotFoundError:
        _refuse(folder, f"it is half-written: there is no {MANIFEST}, which is written last", "half-written")
    except OSError as exc:
        _refuse(path, exc.strerror or str(exc))
    except ForeignFormat as exc:
        _refuse(path, str(exc), "other version")
    except ValueError as exc:
        _refuse(path, str(exc))


def _share(folder: Path) -> HeldLock:
    path = lock_of(folder)
    try:
        lock = hold(path, shared=True, patience_s=PATIENCE_S)
    except OSError as exc:
        _refuse(path, exc.strerror or str(exc))
    if lock is None:
        raise SnapshotError(
            f"{folder} cannot be used now",
            why=f"{holder(path)} writes or removes it",
            fix="Start again when that is done, or set H3_SNAPSHOT=off.",
            path=str(folder),
            busy=True,
            state="being written",
        )
    return lock


def _mark_used(lock: HeldLock) -> None:
    """The lock file's time of change is the snapshot's last use."""
    if lock.path is not None and os.access(lock.path, os.W_OK):
        os.utime(lock.path)


def _file(folder: Path, part: PartManifest) -> ShardFile:
    path = folder / part.file
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != part.size:
                _refuse(path, f"it has {size} bytes, and the manifest says {part.size}")
            start = stream.read(8)
            header = start + stream.read(int.from_bytes(start, "little"))
    except FileNotFoundError:
        _refuse(path, "the file is missing")
    except (OSError, OverflowError, MemoryError) as exc:
        _refuse(path, str(exc))
    if blake3(header).hexdigest() != part.header:
        _refuse(path, "its header does not have the digest that the manifest says, so it was changed or damaged")
    log = FaultLog()
    file = read_header(path, log)
    if file is None:
        _refuse(path, log.faults[0].why)
    return file


def _refuse(path: Path, why: str, state: str = "damaged") -> NoReturn:
    snapshot = next((p.name for p in (path, path.parent) if is_id(p.name)), path.name)
    raise SnapshotError(
        f"{path} cannot be used",
        why=why,
        fix=f"Remove the snapshot; the next start makes it again: vllm-h3 snapshot remove {snapshot}",
        path=str(path),
        snapshot=snapshot,
        state=state,
    )


@dataclass(frozen=True)
class StaleSnapshot:
    """A snapshot of the same checkpoint that does not fit.

    Attributes:
        differs: field of the key -> (the snapshot's value, the value asked for).
    """

    id: str
    path: Path
    differs: Mapping[str, tuple[str, str]]

    def __str__(self) -> str:
        fields = ", ".join(f"{name} {theirs} (now {ours})" for name, (theirs, ours) in self.differs.items())
        return f"snapshot {self.id} is of {fields}"


def find_stale(cache_dir: Path, key: SnapshotKey, checkpoint: Path | str | None = None) -> list[StaleSnapshot]:
    """Snapshots of the same checkpoint with another key, and which fields of it differ; for the log.

    Args:
        checkpoint: path that snapshots noted as ``checkpoint``; those of the same ``key.source`` count in any case.
            Damaged snapshots are left out.
    """
    folder = snapshots_folder(cache_dir)
    try:
        names = sorted(name for name in os.listdir(folder) if is_id(name) and name != key.id)
    except OSError:
        return []
    found = []
    for name in names:
        try:
            manifest = read_manifest(folder / name)
        except CheckpointError:
            continue
        noted = manifest.notes.get("checkpoint")
        if manifest.key.source == key.source or (checkpoint is not None and noted == str(checkpoint)):
            found.append(StaleSnapshot(name, folder / name, _differing(manifest.key, key)))
    return found


def _differing(theirs: SnapshotKey, ours: SnapshotKey) -> dict[str, tuple[str, str]]:
    pairs = zip(asdict(theirs).items(), asdict(ours).values(), strict=True)
    return {name: (str(value), str(other)) for (name, value), other in pairs if value != other}


def _differences(theirs: SnapshotKey, ours: SnapshotKey) -> str:
    return ", ".join(f"{name} {value} instead of {other}" for name, (value, other) in _differing(theirs, ours).items())
