# SPDX-License-Identifier: Apache-2.0
"""All of a pipeline's weights: from a snapshot if one fits, else from the checkpoint, and then a snapshot is written.

Each file is read once, in file order. A DiT whose AdaLN is a table takes its timestep embedder first (a few MB); then
AdaLN tensors are projected into the default table as they come by, and are never resident.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size

from vllm_h3_plugin.checkpoint import page_cache
from vllm_h3_plugin.checkpoint.loader import Shard
from vllm_h3_plugin.checkpoint.reader import WeightSource
from vllm_h3_plugin.checkpoint.shared_base import SharedBase
from vllm_h3_plugin.checkpoint.snapshot import Snapshot
from vllm_h3_plugin.checkpoint.snapshot_writer import SnapshotWriter
from vllm_h3_plugin.conditioning.schedule import Schedule
from vllm_h3_plugin.errors import CheckpointError
from vllm_h3_plugin.host import loading, shared_base, snapshots
from vllm_h3_plugin.host.adaln import AdalnTables, LayerProjections
from vllm_h3_plugin.host.parts import Part, file_digests, make_part, make_tables, read_options
from vllm_h3_plugin.host.progress import Progress
from vllm_h3_plugin.host.session import Session
from vllm_h3_plugin.host.snapshots import Snapshots
from vllm_h3_plugin.host.vision import widen_vision
from vllm_h3_plugin.host.worker_memory import release_host_buffers
from vllm_h3_plugin.settings import Settings


@dataclass
class Loaded:
    """What a load did, for the log and ``/v1/h3/info``.

    Attributes:
        origin: ``checkpoint``, ``snapshot`` or ``shared base``.
        base: what was taken of a base that ranks share; None if none is shared.
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
    base: shared_base.Attached | None = None


class WeightLoading:
    """Fills a pipeline.

    Args:
        pipeline: built, unfilled.
        session: what was decided about it.
        settings: where files of this project's own are kept, and how files are read.
        progress: told of every part.
        rank: of this process; the first writes the snapshot.
        default_schedule: of a DiT by its name (``transformer``, ``transformers_ref``).

    Raises:
        LoadError: files and modules do not match one to one; nothing has been read.
        SnapshotError: H3_SNAPSHOT=require with a recipe that quantizes nothing.
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
        self._ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        self._device: torch.device = pipeline.device
        self.base: SharedBase | None = None
        """What this rank's views lie in, where a base is shared."""
        self._schedules = default_schedule
        self._read = read_options(settings, pipeline.device)
        self._snapshots = Snapshots(session, settings.cache_dir.expanduser(), settings.snapshot)
        self._parts = [
            make_part(pipeline, source, session.inventory, session.fused) for source in pipeline.weights_sources
        ]
        self.tables: Mapping[str, AdalnTables] = {
            part.name: make_tables(part, settings, pipeline.device) for part in self._parts if part.has_table
        }
        """By DiT; the default schedule's is the active one after :meth:`load`."""

    def load(self) -> Loaded:
        """Fill every part and make the default tables.

        Raises:
            CheckpointError: a file that changed, a read error, a digest that does not fit.
            LoadError: a parameter that is not filled exactly once.
            SnapshotError: H3_SNAPSHOT=require and there is no sound snapshot that fits.
        """
        started = time.perf_counter()
        shared = shared_base.wanted(self._settings, self._ranks, self._snapshots)
        loaded = self._from_base() if shared else self._from_snapshot() or self._from_checkpoint(self._rank == 0)
        for name, tables in self.tables.items():
            begun = time.perf_counter()
            tables.activate(self._schedules[name], self._progress.loading(f"AdaLN table of {name}"))
            loaded.seconds[f"table of {name}"] = round(time.perf_counter() - begun, 3)
        for part in self._parts:
            part.loader.pack()
            plan_part = "text_encoder" if part.name == "text_encoder" else "transformer"
            if plan_part == "text_encoder":
                widen_vision(part.module, self._session.plan)
            loaded.layers[part.name] = loading.check_precisions(part.module, plan_part, self._session.plan)
            loaded.filled |= {f"{part.name}.{name}" for name in part.loader.filled}
            page_cache.drop([file.path for file in part.files.files])
            if part.fused is not None:
                part.fused.close()
        release_host_buffers()
        self._progress.phase("idle")
        loaded.seconds["total"] = round(time.perf_counter() - started, 3)
        return loaded

    def _from_base(self) -> Loaded:
        built: list[Loaded] = []
        ranks = shared_base.BaseOfRanks(
            self._snapshots,
            self._rank,
            self._ranks,
            lambda write: built.append(self._from_checkpoint(write)),
            self._progress.phase,
            parts=[part.name for part in self._parts],
            share=_share(self._rank, self._ranks),
        )
        taken = ranks.take()
        loaded = built[-1] if built else Loaded("shared base")
        if taken.base is None:
            return loaded
        self.base = taken.base
        on_cpu = self._device.type == "cpu"
        for part in self._parts if on_cpu or not built else ():
            begun = time.perf_counter()
            self._progress.phase(f"taking {part.name} from the shared base")
            # A stage that is to be dropped needs memory of its own to drop.
            nbytes = shared_base.attach(taken.base, part, views=on_cpu and self._settings.resident == "all")
            loaded.nbytes += 0 if built else nbytes
            loaded.seconds.setdefault(part.name, round(time.perf_counter() - begun, 3))
        loaded.detail = loaded.detail or taken.base.snapshot.id
        loaded.base = shared_base.report(taken, taken.base, self._ranks)
        return loaded

    def _from_snapshot(self) -> Loaded | None:
        snapshot = self._snapshots.find()
        if snapshot is None:
            return None
        with snapshot:
            try:
                return self._read_snapshot(snapshot)
            except CheckpointError as exc:
                self._snapshots.refuse(exc)
                return None

    def _read_snapshot(self, snapshot: Snapshot) -> Loaded:
        loaded = Loaded("snapshot", snapshot.id)
        for part in self._parts:
            begun = time.perf_counter()
            progress = self._progress.loading(f"loading {part.name} from snapshot")
            loaded.nbytes += snapshots.read_part(snapshot, part, self._read, progress)
            loaded.seconds[part.name] = round(time.perf_counter() - begun, 3)
        return loaded

    def _from_checkpoint(self, write: bool) -> Loaded:
        loaded = Loaded()
        writer = self._snapshots.writer(self._parts) if write else None
        try:
            digests = file_digests(self._settings, self._session.inventory)
            for part in self._parts:
                begun = time.perf_counter()
                loaded.nbytes += self._read_part(part, writer, digests)
                loaded.seconds[part.name] = round(time.perf_counter() - begun, 3)
            begun = time.perf_counter()
            self._progress.phase("writing snapshot")
            loaded.detail = snapshots.commit(writer)
            loaded.seconds["writing snapshot"] = round(time.perf_counter() - begun, 3)
        except BaseException:
            if writer is not None:
                writer.abort()
            raise
        return loaded

    def _read_part(self, part: Part, writer: SnapshotWriter | None, digests: Mapping[Path, str] | None) -> int:
        builder = self._table_builder(part)
        source = WeightSource(
            part.files,
            options=self._read,
            wanted=lambda name: builder is not None or part.adaln_name(name) is None,
            progress=self._progress.loading(f"loading {part.name}"),
            file_digests=digests,
        )

        def sink(param: str, shard: Shard, piece: torch.Tensor) -> None:
            if writer is not None:
                writer.put(part.name, param, shard, piece)

        tensors = part.with_adapter(source, lambda name: builder is None and part.adaln_name(name) is not None)
        if part.name != "text_encoder":
            assert part.partition.dit is not None  # the inventory is clean
            tensors = loading.dit_stream(
                tensors,
                config=part.partition.dit,
                diffusers=part.diffusers,
                adaln=builder.add if builder is not None else None,
            )
        part.loader.from_checkpoint(tensors, sink=sink)
        if builder is not None:
            self.tables[part.name].adopt(builder.finish())
        return source.total_bytes

    def _table_builder(self, part: Part) -> LayerProjections | None:
        """What takes AdaLN tensors as they come by; None if the table is at hand or is built apart.

        With tensor parallelism a projection is a collective and the ranks vote first, so it is built apart.
        """
        if not part.has_table or get_tensor_model_parallel_world_size() > 1:
            return None
        tables, schedule = self.tables[part.name], self._schedules[part.name]
        table = tables.store.load(schedule)
        if table is not None:
            tables.store.keep(table)
            return None
        return tables.begin(schedule)


def _share(rank: int, ranks: int) -> tuple[int, int]:
    """Number among the ranks of this machine, and how many those are; all, unless LOCAL_WORLD_SIZE says otherwise."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks)
    return rank % here, here


def summary(loaded: Loaded) -> dict[str, Any]:
    """For ``/v1/h3/info``."""
    facts = asdict(loaded)
    del facts["filled"], facts["layers"]
    return facts
