# SPDX-License-Identifier: Apache-2.0
"""All of a pipeline's weights: from a snapshot if one fits, else from the checkpoint, and then a snapshot is written.

Order of a load from the checkpoint: each part's files are read once, in file order. A DiT whose AdaLN is a table takes
its timestep embedder first (a few MB); then AdaLN tensors are projected into the default table as they come by, and are
never resident.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger

from vllm_h3_plugin import __version__
from vllm_h3_plugin.checkpoint import page_cache
from vllm_h3_plugin.checkpoint.dit_placement import Place
from vllm_h3_plugin.checkpoint.inventory import PartInventory, PartitionInventory
from vllm_h3_plugin.checkpoint.loader import Shard
from vllm_h3_plugin.checkpoint.reader import ReadOptions, WeightSource
from vllm_h3_plugin.checkpoint.snapshot import Snapshot, find_stale, open_snapshot, parse_piece
from vllm_h3_plugin.checkpoint.snapshot_manifest import Entry, SnapshotKey
from vllm_h3_plugin.checkpoint.snapshot_manifest import Piece as SnapshotPiece
from vllm_h3_plugin.checkpoint.snapshot_writer import SnapshotWriter
from vllm_h3_plugin.checkpoint.source_identity import part_identity, source_identity
from vllm_h3_plugin.conditioning.schedule import Schedule
from vllm_h3_plugin.conditioning.store import Origin, TableStore
from vllm_h3_plugin.conditioning.table import AdalnTable, TableShape
from vllm_h3_plugin.errors import CheckpointError, LoadError, SnapshotError
from vllm_h3_plugin.host import loading
from vllm_h3_plugin.host.adaln import AdalnTables, LayerProjections, math_identity, uses_tables
from vllm_h3_plugin.host.progress import Progress
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


class Source(Protocol):
    """The host's ``ComponentSource``."""

    prefix: str
    model_or_path: str
    subfolder: str | None


@dataclass
class Loaded:
    """What a load did, for the log and ``/v1/h3/info``.

    Attributes:
        origin: ``checkpoint`` or ``snapshot``.
        detail: the snapshot's id and state, or why there is none.
        nbytes: bytes of tensors that were read, AdaLN included.
        seconds: by part, and ``total``.
        filled: names of the pipeline's parameters and buffers.
        layers: linear layers by part and precision.
    """

    origin: str = "checkpoint"
    detail: str = ""
    nbytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)
    layers: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """One module of the pipeline and the files that fill it."""

    name: str
    module: Any
    partition: PartitionInventory
    files: PartInventory
    loader: loading.PartLoader
    place: Place

    @property
    def diffusers(self) -> bool:
        return self.files.layout == "diffusers"

    @property
    def has_table(self) -> bool:
        return self.name != "text_encoder" and uses_tables(self.module)

    def adaln_name(self, name: str) -> str | None:
        """Native name of a tensor if it is AdaLN's and this part keeps AdaLN as a table."""
        return loading.adaln_name(name, self.place) if self.has_table else None


class WeightLoading:
    """Fills a pipeline.

    Args:
        pipeline: built, unfilled.
        session: what was decided about it.
        settings: where files of this project's own are kept, and how files are read.
        progress: told of every part.
        rank: of this process; the first writes the snapshot.
        default_schedule: of a DiT by its name (``transformer``, ``transformers_ref``).
    """

    def __init__(
        self,
        pipeline: Any,
        session: Session,
        settings: Settings,
        progress: Progress,
        *,
        rank: int,
        default_schedule: Mapping[str, Schedule],
    ) -> None:
        self._session = session
        self._settings = settings
        self._progress = progress
        self._rank = rank
        self._schedules = default_schedule
        self._device: torch.device = pipeline.device
        self._cache = settings.cache_dir.expanduser()
        self._parts = [self._part(pipeline, source) for source in pipeline.weights_sources]
        self.tables: dict[str, AdalnTables] = {}
        """By DiT, after :meth:`load`."""

    @property
    def read_options(self) -> ReadOptions:
        """How files are read."""
        return ReadOptions(
            threads=self._settings.read_threads,
            buffer_bytes=self._settings.read_buffer_mib << 20,
            pin=self._device.type == "cuda",
        )

    def load(self) -> Loaded:
        """Fill every part, from a snapshot or from the checkpoint, and make the default tables.

        Raises:
            CheckpointError: a file that changed, a read error, a digest that does not fit.
            LoadError: a parameter that is not filled exactly once.
            SnapshotError: H3_SNAPSHOT=require and there is no snapshot that fits.
        """
        started = time.perf_counter()
        for part in self._parts:
            if part.has_table:
                self.tables[part.name] = self._tables(part)
        loaded = self._from_snapshot() or self._from_checkpoint()
        for name, tables in self.tables.items():
            begun = time.perf_counter()
            self._progress.phase(f"AdaLN table of {name}")
            tables.activate(self._schedules[name], self._progress.loading(f"AdaLN table of {name}"))
            loaded.seconds[f"table of {name}"] = round(time.perf_counter() - begun, 3)
        for part in self._parts:
            part.loader.pack()
            plan_part = "text_encoder" if part.name == "text_encoder" else "transformer"
            loaded.layers[part.name] = loading.check_precisions(part.module, plan_part, self._session.plan)
            loaded.filled |= {f"{part.name}.{name}" for name in part.loader.filled}
            page_cache.drop([file.path for file in part.files.files])
        self._progress.phase("idle")
        loaded.seconds["total"] = round(time.perf_counter() - started, 3)
        return loaded

    # -- from a snapshot ------------------------------------------------------------------------------------------

    def _key(self) -> SnapshotKey:
        backend = self._session.backend
        return SnapshotKey(
            source=source_identity(self._session.inventory),
            recipe=recipe_digest(self._session.plan.recipe),
            backend=backend.name if backend else "none",
            host=str(installed_host()),
            plugin=__version__,
        )

    def _from_snapshot(self) -> Loaded | None:
        """Fill from a snapshot; None if there is none that fits and a load from the checkpoint may follow."""
        mode = self._settings.snapshot
        if mode == "off" or not self._session.plan.quantized:
            if mode == "require":
                raise SnapshotError(
                    "H3_SNAPSHOT=require",
                    why=f"recipe {self._session.plan.recipe.name} quantizes nothing, so there is nothing to keep",
                    fix="Set H3_SNAPSHOT=off, or serve with a quantizing recipe.",
                )
            return None
        key = self._key()
        try:
            snapshot = open_snapshot(self._cache, key)
            if snapshot is not None:
                with snapshot:
                    return self._read_snapshot(snapshot)
            stale = "; ".join(str(other) for other in find_stale(self._cache, key, self._session.inventory.path))
            reason = f"none of this checkpoint, recipe, host and plugin{f' ({stale})' if stale else ''}"
        except CheckpointError as exc:
            reason = str(exc)
            if mode == "require":
                raise
            logger.warning("H3 snapshot is not used: %s", exc)
        if mode == "require":
            raise SnapshotError(
                f"no snapshot in {self._cache}",
                why=reason,
                fix="Start once with H3_SNAPSHOT=auto, which writes one, or set H3_CACHE_DIR to its folder.",
                path=str(self._cache),
            )
        logger.info("H3 snapshot: %s; loading the checkpoint", reason)
        return None

    def _read_snapshot(self, snapshot: Snapshot) -> Loaded:
        loaded = Loaded("snapshot", snapshot.id)
        for part in self._parts:
            expected = {(p.param, p.shard): (p.shape, _DTYPE_NAMES[p.dtype]) for p in part.loader.pieces()}
            files = snapshot.part(part.name)
            found = {parse_piece(record.name): (record.shape, record.dtype) for record in files.tensors}
            if expected != found:
                odd = min((set(expected.items()) ^ set(found.items())), key=str)
                raise SnapshotError(
                    f"snapshot {snapshot.id} does not fit the model",
                    why=f"{part.name} differs at {odd}",
                    fix=f"Remove it: `vllm-h3 snapshot remove {snapshot.id}`.",
                    path=str(snapshot.folder),
                )
            begun = time.perf_counter()
            source = WeightSource(
                files,
                options=self.read_options,
                progress=self._progress.loading(f"loading {part.name} from snapshot"),
                tensor_digests=snapshot.digests(part.name),
            )
            loaded.nbytes += part.loader.from_pieces(_pieces(source)).nbytes
            loaded.seconds[part.name] = round(time.perf_counter() - begun, 3)
            page_cache.drop([file.path for file in files.files])
        return loaded

    # -- from the checkpoint --------------------------------------------------------------------------------------

    def _from_checkpoint(self) -> Loaded:
        loaded = Loaded()
        writer = self._writer()
        try:
            for part in self._parts:
                begun = time.perf_counter()
                loaded.nbytes += self._read_part(part, writer)
                loaded.seconds[part.name] = round(time.perf_counter() - begun, 3)
            loaded.detail = self._commit(writer)
        except BaseException:
            if writer is not None:
                writer.abort()
            raise
        return loaded

    def _read_part(self, part: _Part, writer: SnapshotWriter | None) -> int:
        builder = self._table_builder(part)
        source = WeightSource(
            part.files,
            options=self.read_options,
            wanted=lambda name: builder is not None or part.adaln_name(name) is None,
            progress=self._progress.loading(f"loading {part.name}"),
            file_digests=self._digests(),
        )

        def sink(param: str, shard: Shard, piece: torch.Tensor) -> None:
            if writer is not None:
                writer.put(part.name, param, shard, piece)

        tensors: Iterable[tuple[str, torch.Tensor]] = source
        if part.name != "text_encoder":
            assert part.partition.dit is not None
            tensors = loading.dit_stream(
                source,
                config=part.partition.dit,
                diffusers=part.diffusers,
                adaln=builder.add if builder is not None else None,
            )
        part.loader.from_checkpoint(tensors, sink=sink)
        if builder is not None:
            self.tables[part.name].adopt(builder.finish())
        return source.total_bytes

    def _digests(self) -> Mapping[Path, str] | None:
        manifest = self._settings.verify_checksums
        if manifest is None:
            return None
        from vllm_h3_plugin.checkpoint.checksums import digests_for

        return digests_for(manifest, self._session.inventory)

    def _table_builder(self, part: _Part) -> LayerProjections | None:
        """What takes AdaLN tensors as they come by; None if the table is at hand or is built apart.

        With tensor parallelism a projection is a collective and the ranks vote first, so it is built apart.
        """
        if not part.has_table or get_tensor_model_parallel_world_size() > 1:
            return None
        schedule = self._schedules[part.name]
        store = self.tables[part.name].store
        table: AdalnTable | None = store.load(schedule)
        if table is not None:
            store.keep(table)
            return None
        return self.tables[part.name].begin(schedule)

    def _writer(self) -> SnapshotWriter | None:
        if self._settings.snapshot != "auto" or self._rank != 0 or not self._session.plan.quantized:
            return None
        notes = {"checkpoint": str(self._session.inventory.path), "recipe": self._session.plan.recipe.name}
        parts = {part.name: snapshot_entries(part.loader.pieces()) for part in self._parts}
        try:
            return SnapshotWriter(self._cache, self._key(), parts, notes)
        except (SnapshotError, OSError) as exc:
            logger.warning("H3 snapshot is not written: %s", exc)
            return None

    def _commit(self, writer: SnapshotWriter | None) -> str:
        if writer is None:
            return "no snapshot written"
        self._progress.phase("writing snapshot")
        begun = time.perf_counter()
        try:
            folder = writer.commit()
        except (SnapshotError, OSError) as exc:
            logger.warning("H3 snapshot is not written: %s", exc)
            return f"no snapshot written: {exc}"
        logger.info("H3 snapshot written to %s (%.1f s after the load)", folder, time.perf_counter() - begun)
        return f"snapshot {folder.name} written"

    # -- parts and tables -----------------------------------------------------------------------------------------

    def _part(self, pipeline: Any, source: Source) -> _Part:
        name = source.prefix.rstrip(".")
        folder = Path(source.model_or_path) / (source.subfolder or "")
        partition = next(p for p in self._session.inventory.partitions if p.path.samefile(folder.parent))
        files = partition.part(folder.name)
        shapes = loading.shapes_of(files)
        module = getattr(pipeline, name)
        if name == "text_encoder":
            loader = loading.text_encoder_loader(module, shapes)
            return _Part(name, module, partition, files, loader, loader.placements.get)
        assert partition.dit is not None  # the inventory is clean
        diffusers = files.layout == "diffusers"
        loader = loading.dit_loader(module, shapes, config=partition.dit, diffusers=diffusers)
        return _Part(name, module, partition, files, loader, loading.dit_place(partition.dit, diffusers))

    def _tables(self, part: _Part) -> AdalnTables:
        assert part.partition.dit is not None
        store = TableStore(
            TableShape.of(part.partition.dit),
            Origin(part_identity(part.files), math_identity(self._device)),
            device=self._device,
            device_bytes=int(self._settings.adaln_device_gib * 2**30),
            folder=self._cache / "tables" if self._settings.adaln_disk_gib > 0 else None,
            disk_bytes=int(self._settings.adaln_disk_gib * 2**30),
            read=self.read_options,
        )

        def stream(progress: Any) -> Iterator[tuple[str, torch.Tensor]]:
            wanted = {record.name: part.adaln_name(record.name) for record in part.files.tensors}
            source = WeightSource(
                part.files,
                options=self.read_options,
                wanted=lambda name: wanted.get(name) is not None,
                progress=progress,
            )
            for name, tensor in source:
                native = wanted[name]
                assert native is not None
                yield native, tensor

        def embedder() -> dict[str, torch.Tensor]:
            native = {
                name: target.param
                for name in part.loader.placements
                for target in part.place(name) or ()
                if target.param.startswith("time_embedder.")
            }
            source = WeightSource(part.files, wanted=native.__contains__)
            return {native[name]: tensor for name, tensor in source}

        return AdalnTables(part.module, store, stream, embedder)


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


def summary(loaded: Loaded) -> dict[str, Any]:
    """For ``/v1/h3/info``."""
    facts = asdict(loaded)
    del facts["filled"], facts["layers"]
    return facts
