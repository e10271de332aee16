# SPDX-License-Identifier: Apache-2.0
"""Quantized snapshots of a pipeline: which one fits, what is in it, and how one is written while a checkpoint loads."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import torch
from vllm.logger import init_logger

from vllm_h3_plugin import __version__
from vllm_h3_plugin.checkpoint import page_cache
from vllm_h3_plugin.checkpoint.loader import Shard
from vllm_h3_plugin.checkpoint.reader import Progress, ReadOptions, WeightSource
from vllm_h3_plugin.checkpoint.snapshot import Snapshot, find_stale, open_snapshot, parse_piece
from vllm_h3_plugin.checkpoint.snapshot_manifest import Entry, SnapshotKey
from vllm_h3_plugin.checkpoint.snapshot_manifest import Piece as SnapshotPiece
from vllm_h3_plugin.checkpoint.snapshot_writer import SnapshotWriter
from vllm_h3_plugin.checkpoint.source_identity import source_identity
from vllm_h3_plugin.errors import CheckpointError, LoadError, SnapshotError
from vllm_h3_plugin.host import loading
from vllm_h3_plugin.host.parts import Part
from vllm_h3_plugin.host.session import Session
from vllm_h3_plugin.pins import installed_host
from vllm_h3_plugin.quantization.recipe import Recipe
from vllm_h3_plugin.settings import Settings

logger = init_logger(__name__)

_DTYPE_NAMES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.int8: "I8",
}


class Snapshots:
    """The snapshots of one server's checkpoint and recipe.

    Args:
        session: what the server serves.
        cache: ``H3_CACHE_DIR``.
        mode: ``H3_SNAPSHOT``.

    Raises:
        SnapshotError: ``require`` with a recipe that quantizes nothing.
    """

    def __init__(self, session: Session, cache: Path, mode: str) -> None:
        self._session = session
        self.cache = cache
        self._mode = mode if session.plan.quantized else "off"
        if mode == "require" and not session.plan.quantized:
            raise SnapshotError(
                "H3_SNAPSHOT=require",
                why=f"recipe {session.plan.recipe.name} quantizes nothing, so there is nothing to keep",
                fix="Set H3_SNAPSHOT=off, or serve with a quantizing recipe.",
            )

    @cached_property
    def key(self) -> SnapshotKey:
        """What a snapshot must have been made from and for. Told from samples of every file, so taken once."""
        backend, fused = self._session.backend, self._session.fused
        source = source_identity(self._session.inventory)
        if fused is not None:
            source = hashlib.sha256(f"{source}+{fused.identity}".encode()).hexdigest()
        return SnapshotKey(
            source=source,
            recipe=recipe_digest(self._session.plan.recipe),
            backend=backend.name if backend else "none",
            host=str(installed_host()),
            plugin=__version__,
        )

    def find(self) -> Snapshot | None:
        """The snapshot that fits; None if there is none and the checkpoint may be loaded instead (said in the log).

        Raises:
            SnapshotError: there is none, or it is damaged, under ``require``.
        """
        if self._mode == "off":
            return None
        key = self.key
        try:
            snapshot = open_snapshot(self.cache, key)
        except SnapshotError as exc:
            self.refuse(exc)
            return None
        if snapshot is not None:
            return snapshot
        stale = "; ".join(str(other) for other in find_stale(self.cache, key, self._session.inventory.path))
        reason = f"none is of this checkpoint, recipe, backend, host and plugin{f' ({stale})' if stale else ''}"
        if self._mode == "require":
            raise SnapshotError(
                f"no snapshot in {self.cache}",
                why=reason,
                fix="Start once with H3_SNAPSHOT=auto, which writes one, or set H3_CACHE_DIR to its folder.",
                path=str(self.cache),
            )
        logger.info("H3 snapshot: %s; loading the checkpoint", reason)
        return None

    @property
    def writes(self) -> bool:
        """Whether there are snapshots at all: not ``off``, and a recipe that quantizes."""
        return self._mode != "off"

    def open_now(self) -> Snapshot | None:
        """The snapshot that fits, without a word where there is none.

        Raises:
            SnapshotError: it is damaged or is being written.
        """
        return open_snapshot(self.cache, self.key)

    def refuse_to_build(self) -> None:
        """Under ``require`` nothing is built.

        Raises:
            SnapshotError: as :meth:`find`.
        """
        if self._mode == "require":
            self.find()

    def refuse(self, error: CheckpointError) -> None:
        """A snapshot turned out not to be sound: go on without it, or not at all under ``require``."""
        if self._mode == "require":
            raise error
        logger.warning("H3 snapshot is not used, the checkpoint is loaded instead: %s", error)

    def writer(self, parts: Sequence[Part]) -> SnapshotWriter | None:
        """What takes the pieces of a load; None if none is to be written or none can be (said in the log)."""
        if self._mode != "auto":
            return None
        notes = {"checkpoint": str(self._session.inventory.path), "recipe": self._session.plan.recipe.name}
        entries = {part.name: snapshot_entries(part.loader.pieces()) for part in parts}
        try:
            return SnapshotWriter(self.cache, self.key, entries, notes)
        except (SnapshotError, OSError) as exc:
            logger.warning("H3 snapshot is not written: %s", exc)
            return None


def require_snapshot(session: Session, settings: Settings) -> None:
    """Under H3_SNAPSHOT=require, see that there is one before anything is read for a start that must be refused.

    Raises:
        SnapshotError: there is none that fits, or its manifest or a file's header or size is not sound.
    """
    if settings.snapshot == "require":
        snapshot = Snapshots(session, settings.cache_dir.expanduser(), settings.snapshot).find()
        assert snapshot is not None  # else it has raised
        snapshot.close()


def commit(writer: SnapshotWriter | None) -> str:
    """Make a written snapshot the one that the next start finds; says in a few words what became of it."""
    if writer is None:
        return "no snapshot written"
    begun = time.perf_counter()
    try:
        folder = writer.commit()
    except (SnapshotError, OSError) as exc:
        logger.warning("H3 snapshot is not written: %s", exc)
        return f"no snapshot written: {exc}"
    logger.info("H3 snapshot written to %s (%.1f s after the load)", folder, time.perf_counter() - begun)
    return f"snapshot {folder.name} written"


def read_part(snapshot: Snapshot, part: Part, options: ReadOptions, progress: Progress) -> int:
    """Fill a part from its pieces, each held against its digest; returns the bytes read.

    Raises:
        SnapshotError, LoadError: the pieces are not the model's, or not what their digests say.
    """
    require_fits(snapshot, part)
    files = snapshot.part(part.name)
    digests = snapshot.digests(part.name)
    source = WeightSource(files, options=options, progress=progress, tensor_digests=digests)
    nbytes = part.loader.from_pieces(_pieces(source)).nbytes
    page_cache.drop([file.path for file in files.files])
    return nbytes


def require_fits(snapshot: Snapshot, part: Part) -> None:
    """Hold a snapshot's pieces against those that the model's loaders take.

    Raises:
        SnapshotError: a piece is missing, is not the model's, or has another shape or dtype.
    """
    expected = {(piece.param, piece.shard): (piece.shape, _DTYPE_NAMES[piece.dtype]) for piece in part.loader.pieces()}
    files = snapshot.part(part.name)
    found = {parse_piece(record.name): (record.shape, record.dtype) for record in files.tensors}
    if expected != found:
        odd = min(set(expected.items()) ^ set(found.items()), key=str)
        raise SnapshotError(
            f"snapshot {snapshot.id} does not fit the model",
            why=f"{part.name} differs at {odd}",
            fix=f"Remove it: `vllm-h3 snapshot remove {snapshot.id}`.",
            path=str(snapshot.folder),
        )


def _pieces(source: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Shard, torch.Tensor]]:
    for name, tensor in source:
        param, shard = parse_piece(name)
        yield param, shard, tensor


def snapshot_entries(pieces: Iterable[loading.Piece]) -> list[Entry]:
    """One entry a parameter: its pieces under each other, in the order gate, up or q, k, v."""
    order: dict[Shard, int] = {None: 0, 0: 0, 1: 1, "q": 0, "k": 1, "v": 2}
    grouped: dict[str, list[loading.Piece]] = {}
    for piece in pieces:
        grouped.setdefault(piece.param, []).append(piece)
    entries = []
    for param, shards in grouped.items():
        shards.sort(key=lambda piece: order[piece.shard])
        start, rows = 0, []
        for piece in shards:
            count = piece.shape[0] if piece.shape else 1
            rows.append(SnapshotPiece(piece.shard, start, count))
            start += count
        first = shards[0]
        shape = (start, *first.shape[1:]) if first.shape else ()
        if any(piece.shape[1:] != first.shape[1:] or piece.dtype != first.dtype for piece in shards):
            raise LoadError(f"shards of {param} differ in width or dtype", why="they cannot be one parameter")
        entries.append(Entry(param, _DTYPE_NAMES[first.dtype], shape, tuple(rows)))
    return entries


def recipe_digest(recipe: Recipe) -> str:
    """What of a recipe decides the resident bytes: rules and AdaLN mode, not its name or its file."""
    rules = [(rule.match, rule.precision.value) for rule in recipe.rules]
    return hashlib.sha256(json.dumps([recipe.adaln.value, rules]).encode()).hexdigest()[:32]
