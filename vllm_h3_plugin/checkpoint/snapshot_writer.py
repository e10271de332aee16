# SPDX-License-Identifier: Apache-2.0
"""Write a quantized snapshot while the model loads: piece by piece, whole or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from blake3 import blake3

from vllm_h3_plugin.checkpoint.arena import Arena
from vllm_h3_plugin.checkpoint.atomic import (
    WAY_OUT,
    discard,
    free_bytes,
    fsync,
    gib,
    require_space,
    sweep,
    temporary_beside,
)
from vllm_h3_plugin.checkpoint.file_lock import hold, holder
from vllm_h3_plugin.checkpoint.reader import TORCH_DTYPES
from vllm_h3_plugin.checkpoint.safetensors_header import TensorRecord
from vllm_h3_plugin.checkpoint.snapshot_manifest import (
    MANIFEST,
    Entry,
    Manifest,
    PartManifest,
    Piece,
    Shard,
    SnapshotKey,
    lay_out,
    piece_name,
)
from vllm_h3_plugin.checkpoint.snapshot_paths import PATIENCE_S, lock_of, snapshots_folder
from vllm_h3_plugin.checkpoint.write_behind import WriteBehind, WriteBehindFile
from vllm_h3_plugin.errors import LoadError, SnapshotError

# Host memory for copies of tensors that wait for the disk, and the most that is copied at a time (more only where one
# row is larger). The first is a power of two, since PyTorch's page-locked allocations are.
_QUEUE_BYTES = 256 << 20
_CHUNK_BYTES = 64 << 20


@dataclass
class _OpenPiece:
    param: str
    piece: Piece
    record: TensorRecord
    hasher: Any = field(default_factory=lambda: blake3(max_threads=4))
    taken: bool = False


@dataclass
class _OpenPart:
    file: WriteBehindFile
    size: int
    header: bytes
    pieces: dict[str, _OpenPiece]


class SnapshotWriter:
    """A snapshot in the making. A context manager: leaving it without :meth:`commit` leaves nothing on disk.

    Args:
        cache_dir: ``H3_CACHE_DIR``; the snapshot becomes ``<cache_dir>/snapshots/<key.id>/``.
        parts: part -> its entries, in the order in which they shall lie in the part's file.
        notes: JSON values for people and for the reader: ``checkpoint`` (path) and ``recipe`` (name) are shown by
            ``vllm-h3 snapshot list``.

    Raises:
        SnapshotError: no room (``details["needed_bytes"]``, ``["free_bytes"]``), the folder cannot be written, or the
            snapshot is being written or read now (``details["busy"]`` is true). The caller goes on without.
        LoadError: the entries are not a layout.
    """

    def __init__(
        self,
        cache_dir: Path,
        key: SnapshotKey,
        parts: Mapping[str, Sequence[Entry]],
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        self.key = key
        self.path = snapshots_folder(cache_dir) / key.id
        """Where the snapshot will be."""
        self.nbytes = 0
        """Size of all files to be written."""
        self.failure: SnapshotError | None = None
        """Set as soon as the disk refused a write; what is put after that is dropped, and commit() raises it."""
        self._notes = dict(notes or {})
        self._parts: dict[str, _OpenPart] = {}
        self._stack = ExitStack()
        self._ended = False
        self._queue = WriteBehind(self._memory, self._on_disk_error)
        try:
            self._begin(parts)
        except OSError as exc:
            self.abort()
            raise self._refused(exc) from exc
        except BaseException:
            self.abort()
            raise

    def _begin(self, parts: Mapping[str, Sequence[Entry]]) -> None:
        planned = {name: lay_out(self.path / f"{name}.safetensors", entries) for name, entries in parts.items()}
        sizes = {
            name: len(header) + sum(record.nbytes for record in records) for name, (header, records) in planned.items()
        }
        self.nbytes = sum(sizes.values())
        self._largest = max((record.nbytes for _, records in planned.values() for record in records), default=0)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock_path = lock_of(self.path)
        lock = hold(lock_path, patience_s=PATIENCE_S)
        if lock is None:
            raise SnapshotError(
                f"snapshot {self.key.id} is in use",
                why=f"{holder(lock_path)} writes or reads {self.path} now",
                fix="Nothing needs to be done: this start goes on without writing one.",
                path=str(self.path),
                busy=True,
            )
        self._stack.callback(lock.release)
        lock.sign()
        sweep(self.path.parent)
        require_space(self.path.parent, self.nbytes, f"snapshot {self.key.id}")
        self._folder = self._stack.enter_context(temporary_beside(self.path))
        self._folder.mkdir()
        for name, (header, records) in planned.items():
            file = WriteBehindFile(self._folder / f"{name}.safetensors", sizes[name])
            self._stack.callback(file.close)
            file.write(header, 0)
            pieces = _open_pieces(parts[name], records)
            self._parts[name] = _OpenPart(file, sizes[name], header, pieces)

    def put(self, part: str, name: str, shard: Shard, tensor: torch.Tensor) -> None:
        """Take one piece. The tensor is copied to host memory before this returns; writing goes on behind it.

        Blocks while more than 256 MiB wait for the disk. Pieces may come in any order, from any thread.

        Args:
            name: of the parameter, as in its :class:`Entry`.
            tensor: the piece's rows, on any device.

        Raises:
            LoadError: no such piece, it was put before, or its shape or dtype is not the entry's.
        """
        label = piece_name(name, shard)
        piece = self._parts[part].pieces.get(label) if part in self._parts else None
        if piece is None or piece.taken or self._ended:
            why = "it is not in its layout" if piece is None else "it was put before" if piece.taken else "it has ended"
            raise LoadError(f"{part}: piece {label} cannot go into the snapshot", why=why, parameter=name)
        record = piece.record
        dtype = TORCH_DTYPES[record.dtype]
        if tuple(tensor.shape) != record.shape or tensor.dtype != dtype:
            raise LoadError(
                f"{part}: piece {label} is {tensor.dtype} {list(tensor.shape)}",
                why=f"the snapshot's layout has {dtype} {list(record.shape)}",
                parameter=name,
            )
        piece.taken = True
        rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
        row_bytes = max(1, record.nbytes // max(1, rows.shape[0]))
        step = max(1, _CHUNK_BYTES // row_bytes)
        for begin in range(0, rows.shape[0] if record.nbytes else 0, step):
            if self.failure is not None:
                return
            self._copy(self._parts[part].file, piece, rows[begin : begin + step], record.offset + begin * row_bytes)

    def _copy(self, file: WriteBehindFile, piece: _OpenPiece, rows: torch.Tensor, offset: int) -> None:
        def job(data: memoryview) -> None:
            piece.hasher.update(data)
            file.write(data, offset)

        self._queue.submit(rows, job)

    def _memory(self, tensor: torch.Tensor) -> Arena:
        """Page-locked if tensors lie on a CUDA device: copying from there into other memory is several times slower."""
        return Arena(_QUEUE_BYTES, largest=self._largest, pin=tensor.is_cuda)

    def commit(self) -> Path:
        """Make the snapshot real: all bytes on disk, the manifest last, then the folder gets its name.

        An older folder of that name, stale or damaged, gives way.

        Returns:
            The snapshot's folder.

        Raises:
            SnapshotError: the disk refused something, now or earlier. Nothing stays on disk.
            LoadError: a piece was never put. Nothing stays on disk.
        """
        try:
            self._queue.finish()
            if self.failure is not None:
                raise self.failure
            missing = [
                f"{part}: {label}"
                for part, open_part in self._parts.items()
                for label, piece in open_part.pieces.items()
                if not piece.taken
            ]
            if missing:
                raise LoadError(f"piece {missing[0]} never came", why=f"{len(missing)} pieces are open", open=missing)
            self._publish()
        except OSError as exc:
            raise self._refused(exc) from exc
        finally:
            self.abort()
        return self.path

    def _publish(self) -> None:
        for part in self._parts.values():
            part.file.flush()
            part.file.close()
        with (self._folder / MANIFEST).open("xb") as stream:
            stream.write(self._manifest().dump())
            stream.flush()
            os.fsync(stream.fileno())
        fsync(self._folder)
        with temporary_beside(self.path) as aside:
            # A folder cannot be renamed over a full one. Who has the old files open keeps them.
            if os.path.lexists(self.path):
                self.path.rename(aside)
            self._folder.rename(self.path)
            fsync(self.path.parent)

    def _manifest(self) -> Manifest:
        parts = {
            name: PartManifest(
                f"{name}.safetensors",
                part.size,
                blake3(part.header).hexdigest(),
                tuple((piece.param, piece.piece, piece.hasher.hexdigest()) for piece in part.pieces.values()),
            )
            for name, part in self._parts.items()
        }
        return Manifest(self.key, time.time(), self._notes, parts)

    def abort(self) -> None:
        """Drop everything that is not committed; may be called again."""
        self._ended = True
        self._queue.cancel()
        self._stack.close()

    def __enter__(self) -> SnapshotWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _on_disk_error(self, exc: OSError) -> None:
        """In the writing thread: keep the reason and give the space back at once; the load may take minutes more."""
        self.failure = self._refused(exc)
        for part in self._parts.values():
            part.file.close()
        discard(self._folder)

    def _refused(self, exc: OSError) -> SnapshotError:
        free = free_bytes(self.path.parent)
        return SnapshotError(
            f"snapshot {self.key.id} could not be written: {exc.filename or self.path}",
            why=f"{exc.strerror or exc}; it needs {gib(self.nbytes)} and {gib(free)} are free",
            fix=WAY_OUT,
            path=str(exc.filename or self.path),
            needed_bytes=self.nbytes,
            free_bytes=free,
        )


def _open_pieces(entries: Sequence[Entry], records: Sequence[TensorRecord]) -> dict[str, _OpenPiece]:
    of_name = {piece_name(entry.name, piece.shard): (entry.name, piece) for entry in entries for piece in entry.pieces}
    return {record.name: _OpenPiece(*of_name[record.name], record) for record in records}
