# SPDX-License-Identifier: Apache-2.0
"""The snapshots of a cache folder as a whole: what is there, whether its bytes are right, and how it goes away.

Importing this module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from vllm_h3_plugin import __version__
from vllm_h3_plugin.checkpoint.atomic import discard, fsync, sweep, temporaries, temporary_beside
from vllm_h3_plugin.checkpoint.file_lock import hold, holder
from vllm_h3_plugin.checkpoint.page_cache import drop, drop_range
from vllm_h3_plugin.checkpoint.safetensors_header import TensorRecord
from vllm_h3_plugin.checkpoint.snapshot import Snapshot, open_folder
from vllm_h3_plugin.checkpoint.snapshot_manifest import Manifest, SnapshotKey, parse_piece
from vllm_h3_plugin.checkpoint.snapshot_paths import is_id, lock_of, snapshots_folder
from vllm_h3_plugin.errors import BusyError, SnapshotError, UsageError

OK = "ok"
DAMAGED = "damaged"
HALF_WRITTEN = "half-written"
OTHER_VERSION = "other version"
BEING_WRITTEN = "being written"

_BLOCK = 8 << 20


@dataclass(frozen=True)
class SnapshotInfo:
    """One snapshot, whole or not.

    Attributes:
        state: ``ok``, ``damaged``, ``half-written``, ``other version`` or ``being written``.
        reason: why it is not ``ok``.
        nbytes: what its files take on disk.
        part_bytes: part -> size; empty without a manifest.
        created: seconds since 1970, as ``last_use``; None if unknown.
        in_use: a living process reads or writes it.
    """

    id: str
    path: Path
    state: str
    reason: str
    nbytes: int
    part_bytes: Mapping[str, int]
    key: SnapshotKey | None
    notes: Mapping[str, Any]
    created: float | None
    last_use: float | None
    in_use: bool

    @property
    def usable(self) -> bool:
        """Whether a server of this version could load it."""
        return self.state == OK

    def as_dict(self) -> dict[str, Any]:
        """All fields as one JSON object."""
        key = asdict(self.key) if self.key else None
        return {**asdict(self), "path": str(self.path), "key": key, "notes": dict(self.notes)}


def list_snapshots(cache_dir: Path) -> list[SnapshotInfo]:
    """What lies in the cache folder, by age; unfinished ones too. An empty list if there is no such folder."""
    folder = snapshots_folder(cache_dir)
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    found = [_info(folder / name) for name in names if is_id(name)]
    found += [_unfinished(path) for path in temporaries(folder) if path.exists()]
    return sorted(found, key=lambda info: (info.created or 0.0, info.id))


def _info(path: Path) -> SnapshotInfo:
    lock_path = lock_of(path)
    # Opening a snapshot is a use; looking at it is not.
    last_use = lock_path.stat().st_mtime if lock_path.exists() else None
    in_use = _is_held(lock_path)
    manifest: Manifest | None = None
    state, reason = OK, ""
    try:
        with open_folder(path, mark=False) as snapshot:
            manifest = snapshot.manifest
        if manifest.key.plugin != __version__:
            state, reason = OTHER_VERSION, f"it is of plugin {manifest.key.plugin}, and this is {__version__}"
    except SnapshotError as exc:
        state, reason = exc.details.get("state", DAMAGED), exc.why
    return SnapshotInfo(
        path.name,
        path,
        state,
        reason,
        _disk_bytes(path),
        {name: part.size for name, part in manifest.parts.items()} if manifest else {},
        manifest.key if manifest else None,
        manifest.notes if manifest else {},
        manifest.created if manifest else path.stat().st_mtime,
        last_use,
        in_use,
    )


def _unfinished(path: Path) -> SnapshotInfo:
    alive = _is_held(path.with_name(path.name + ".lock"))
    state = BEING_WRITTEN if alive else HALF_WRITTEN
    reason = "" if alive else "its writer ended before it was whole"
    size, created = _disk_bytes(path), path.stat().st_mtime
    return SnapshotInfo(path.name, path, state, reason, size, {}, None, {}, created, None, alive)


def _is_held(lock_path: Path) -> bool:
    if not lock_path.exists():
        return False
    try:
        lock = hold(lock_path)
    except OSError:  # another user's
        return False
    if lock is None:
        return True
    lock.release()
    return False


def _disk_bytes(path: Path) -> int:
    """Blocks, not lengths: a file that is being written has its full length from the start."""
    return sum(512 * file.lstat().st_blocks for file in (path, *path.rglob("*")))


def find_snapshot(cache_dir: Path, wanted: str) -> SnapshotInfo:
    """The snapshot of that id, or the only one whose id starts so.

    Raises:
        UsageError: there is none, or more than one.
    """
    known = list_snapshots(cache_dir)
    found = [info for info in known if info.id == wanted] or [i for i in known if wanted and i.id.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    folder = snapshots_folder(cache_dir)
    ids = ", ".join(info.id for info in known)
    raise UsageError(
        f"snapshot {wanted!r}",
        why=f"more than one id starts so in {folder}" if found else f"there is no such id in {folder}",
        fix=f"There are: {ids}." if known else "There are none. A server writes one after its first load.",
    )


@dataclass(frozen=True)
class Damage:
    """A piece whose bytes are not what was written.

    Attributes:
        file: of the part; ``offset`` is the piece's first byte in it.
    """

    part: str
    param: str
    shard: str | int | None
    file: Path
    offset: int
    nbytes: int

    def error(self, snapshot: str) -> SnapshotError:
        """As an error."""
        shard = "" if self.shard is None else f", shard {self.shard}"
        return SnapshotError(
            f"{self.file}: {self.param}{shard} is damaged",
            why=f"bytes {self.offset} to {self.offset + self.nbytes} do not have the digest they were written with",
            fix=f"Remove it; the next start makes it again: vllm-h3 snapshot remove {snapshot}",
            path=str(self.file),
            snapshot=snapshot,
            part=self.part,
            parameter=self.param,
            shard=self.shard,
            offset=self.offset,
        )


def first_damage(
    snapshot: Snapshot, *, threads: int = 4, progress: Callable[[int], None] = lambda nbytes: None
) -> Damage | None:
    """Read every piece and hold it against its digest; the first in file order that fails, or None.

    Args:
        threads: pieces that are read at a time, in 8 MiB each; pages do not stay in the cache.
        progress: called, from any of them, with the bytes read since the last call.

    Raises:
        SnapshotError: a file cannot be read.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="h3-verify") as pool:
        for name in snapshot.parts:
            digests = snapshot.digests(name)
            records = snapshot.part(name).tensors
            try:
                actual = pool.map(lambda record: _digest(record, progress), records)
                for record, digest in zip(records, actual, strict=True):
                    if digest != digests[record.name]:
                        pool.shutdown(wait=False, cancel_futures=True)
                        param, shard = parse_piece(record.name)
                        return Damage(name, param, shard, record.file, record.offset, record.nbytes)
                drop([snapshot.file(name).path])
            except OSError as exc:
                raise SnapshotError(
                    f"{exc.filename} cannot be read",
                    why=exc.strerror or str(exc),
                    fix="Check the disk and the file's permissions.",
                    path=str(exc.filename),
                ) from exc
    return None


def _digest(record: TensorRecord, progress: Callable[[int], None]) -> str:
    hasher = blake3()
    buffer = memoryview(bytearray(min(_BLOCK, record.nbytes)))
    descriptor = os.open(record.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        position, end = record.offset, record.offset + record.nbytes
        while position < end:
            try:
                size = os.preadv(descriptor, [buffer[: end - position]], position)
            except OSError as exc:
                raise OSError(exc.errno, exc.strerror, str(record.file)) from exc
            if size == 0:
                break
            hasher.update(buffer[:size])
            # From the piece's start: the kernel keeps a large folio that a range covers only in part.
            drop_range(descriptor, record.offset, position + size)
            position += size
            progress(size)
    finally:
        os.close(descriptor)
    return hasher.hexdigest()


def remove_snapshot(info: SnapshotInfo) -> None:
    """Remove it; killed half-way, it leaves nothing that could be taken for a snapshot.

    Raises:
        BusyError: a living process reads or writes it.
        OSError: it cannot be removed.
    """
    if not is_id(info.id):
        sweep(info.path.parent)
        if info.path.exists():
            raise _busy(info, info.path.with_name(info.path.name + ".lock"))
        return
    lock_path = lock_of(info.path)
    lock = hold(lock_path)
    if lock is None:
        raise _busy(info, lock_path)
    try:
        with temporary_beside(info.path) as aside:
            info.path.rename(aside)
            fsync(aside.parent)
            discard(aside)
    finally:
        lock.release(remove=not info.path.exists())


def _busy(info: SnapshotInfo, lock_path: Path) -> BusyError:
    return BusyError(
        f"snapshot {info.id} is in use",
        why=f"{holder(lock_path)} reads or writes {info.path}",
        fix="Remove it when that is done.",
        path=str(info.path),
    )
