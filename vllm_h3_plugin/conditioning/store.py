# SPDX-License-Identifier: Apache-2.0
"""Where AdaLN tables wait: the least recently used leave first, on the device and on disk.

A table file is ``<cache>/tables/<key>.safetensors``: one tensor ``values``, the BLAKE3 of its bytes and what it was
built from in the header's metadata. It is written to a temporary name, synced and renamed, so a file that is there is
whole; one that is not what it says is replaced. One process builds a table while others that want the same one wait.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_h3_plugin.checkpoint import page_cache
from vllm_h3_plugin.checkpoint.atomic import replacing, require_space, sweep
from vllm_h3_plugin.checkpoint.faults import FaultLog
from vllm_h3_plugin.checkpoint.inventory import PartInventory
from vllm_h3_plugin.checkpoint.reader import ReadOptions, WeightSource
from vllm_h3_plugin.checkpoint.safetensors_header import read_header
from vllm_h3_plugin.conditioning.schedule import Schedule
from vllm_h3_plugin.conditioning.table import AdalnTable, TableShape
from vllm_h3_plugin.errors import CheckpointError, SnapshotError

logger = logging.getLogger(__name__)

_FORMAT = 1
_TENSOR = "values"
_WAIT_S = 900.0
"""A table of the real model takes a minute to build; whoever still holds the lock after this is stuck."""


@dataclass(frozen=True)
class Origin:
    """What a table's values depend on beside the schedule.

    Attributes:
        weights: digest of the checkpoint's DiT files.
        math: everything that decides how a GEMM rounds: torch, device, tensor-parallel size, host.
    """

    weights: str
    math: Mapping[str, object]

    def key(self, schedule: Schedule, shape: TableShape) -> str:
        """Name of the file, 32 hex digits."""
        fields = [_FORMAT, self.weights, dict(self.math), schedule.digest, shape.layers, shape.block, shape.final]
        return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:32]


class TableStore:
    """The tables of one DiT.

    Args:
        shape: row layout.
        origin: see :class:`Origin`.
        device: where tables are used.
        device_bytes: bound on the tables that stay there; the one in use stays even if it is larger.
        folder: where files are kept; None: nowhere.
        disk_bytes: bound on the files.
        read: how files are read.
    """

    def __init__(
        self,
        shape: TableShape,
        origin: Origin,
        *,
        device: torch.device,
        device_bytes: int,
        folder: Path | None,
        disk_bytes: int,
        read: ReadOptions | None = None,
    ) -> None:
        self._shape = shape
        self._origin = origin
        self._device = device
        self._device_bytes = device_bytes
        self._disk_bytes = disk_bytes
        self._read = read
        self._tables: OrderedDict[str, AdalnTable] = OrderedDict()
        self._folder = folder if folder is None else _usable(folder)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(table.nbytes for table in self._tables.values())

    def path(self, schedule: Schedule) -> Path | None:
        """The file of a schedule's table; None where nothing is kept."""
        return self._folder and self._folder / f"{self._origin.key(schedule, self._shape)}.safetensors"

    def resident(self, schedule: Schedule) -> AdalnTable | None:
        """The table, if it is on the device; it becomes the most recently used."""
        key = self._origin.key(schedule, self._shape)
        if key in self._tables:
            self._tables.move_to_end(key)
        return self._tables.get(key)

    def on_disk(self, schedule: Schedule) -> bool:
        """Whether a file of that name is there; whether it is sound is known when it is read."""
        path = self.path(schedule)
        return path is not None and path.exists()

    def get(self, schedule: Schedule, build: Callable[[], AdalnTable]) -> AdalnTable:
        """The table of a schedule: from the device, from disk, or built and kept.

        Args:
            build: makes it. Called at most once, and by one process at a time.
        """
        table = self.resident(schedule)
        if table is None:
            self.make_room(schedule)
            table = self._from_disk_or(schedule, build)
            self.keep(table)
        return table

    def keep(self, table: AdalnTable) -> None:
        """Put a table on the device's list, as the most recently used."""
        key = self._origin.key(table.schedule, self._shape)
        self._tables[key] = table
        self._tables.move_to_end(key)

    def load(self, schedule: Schedule) -> AdalnTable | None:
        """The table from its file; None if there is no file or the file is not sound (said in the log)."""
        path = self.path(schedule)
        if path is None or not path.exists():
            return None
        try:
            values = self._read_values(path, schedule)
        except (CheckpointError, SafetensorError, OSError, ValueError) as exc:
            logger.warning("AdaLN table %s is not used and will be built again: %s", path, exc)
            return None
        with suppress(OSError):
            # Its time of change stays: another rank that is reading the file takes a new one for a change of the file.
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        logger.info("AdaLN table of %s read from %s", schedule.label, path)
        return AdalnTable(self._shape, schedule, values)

    def save(self, table: AdalnTable) -> None:
        """Write a table's file, and remove the least recently used ones beyond the bound. Never raises for the disk."""
        path = self.path(table.schedule)
        if path is None:
            return
        try:
            require_space(path.parent, table.nbytes, "an AdaLN table")
            values = table.values.cpu().contiguous()
            notes = {
                "blake3": blake3(values.view(torch.uint8).numpy()).hexdigest(),
                "schedule": table.schedule.label,
                "origin": json.dumps({"weights": self._origin.weights, **self._origin.math}, default=str),
            }
            with replacing(path) as temporary:
                save_file({_TENSOR: values}, temporary, notes)
            page_cache.drop([path])
            self._bound_disk(path)
        except (SnapshotError, OSError, SafetensorError) as exc:
            logger.warning("AdaLN table of %s is not kept on disk: %s", table.schedule.label, exc)

    def _from_disk_or(self, schedule: Schedule, build: Callable[[], AdalnTable]) -> AdalnTable:
        table = self.load(schedule)
        path = self.path(schedule)
        if table is not None or path is None:
            return table or build()
        lock = FileLock(path.with_suffix(".lock"))
        try:
            lock.acquire(timeout=_WAIT_S)
        except (Timeout, OSError, NotImplementedError) as exc:  # the last: a file system without locks
            logger.warning("AdaLN table of %s is built without waiting any longer: %s", schedule.label, exc)
            return build()
        try:
            # Whoever held the lock may have built it.
            table = self.load(schedule)
            if table is None:
                table = build()
                self.save(table)
        finally:
            lock.release()
        return table

    def _read_values(self, path: Path, schedule: Schedule) -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            digest = (file.metadata() or {}).get("blake3", "")
        faults = FaultLog()
        header = read_header(path, faults)
        if header is None or [tensor.name for tensor in header.tensors] != [_TENSOR]:
            raise SnapshotError(f"{path} is no AdaLN table", why="its header is not one")
        wanted = (schedule.rows, self._shape.width)
        if header.tensors[0].shape != wanted or header.tensors[0].dtype != "BF16":
            raise SnapshotError(f"{path} has {header.tensors[0].shape}", why=f"the schedule needs {wanted} in BF16")
        part = PartInventory("adaln_table", path.parent, (header,), header.tensors)
        for _, values in WeightSource(part, options=self._read, tensor_digests={_TENSOR: digest}):
            return values.to(self._device, copy=True)
        raise AssertionError("a header with one tensor yields one tensor")

    def make_room(self, schedule: Schedule) -> None:
        """Drop the least recently used tables until the new one fits, before its memory is taken."""
        needed = self._shape.nbytes(schedule.rows)
        while self._tables and self.nbytes + needed > self._device_bytes:
            self._tables.popitem(last=False)

    def _bound_disk(self, newest: Path) -> None:
        files = sorted(newest.parent.glob("*.safetensors"), key=_last_use)
        total = sum(path.stat().st_size for path in files)
        for path in files:
            if total <= self._disk_bytes or path == newest:
                continue
            total -= path.stat().st_size
            path.unlink(missing_ok=True)
            path.with_suffix(".lock").unlink(missing_ok=True)
            logger.info("AdaLN table %s removed: the least recently used beyond H3_ADALN_DISK_GIB", path.name)


def _last_use(path: Path) -> int:
    stat = path.stat()
    return max(stat.st_atime_ns, stat.st_mtime_ns)


def _usable(folder: Path) -> Path | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
    except (OSError, SnapshotError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        logger.warning("AdaLN tables are not kept on disk: %s cannot be used (%s)", folder, why)
        return None
    return folder
