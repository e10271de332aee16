# SPDX-License-Identifier: Apache-2.0
"""The modules of a pipeline that are filled from files, each with its files, its loader and its AdaLN tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from vllm_h3_plugin.checkpoint.adapter import Adapter
from vllm_h3_plugin.checkpoint.checksums import digests_for
from vllm_h3_plugin.checkpoint.dit_placement import Place
from vllm_h3_plugin.checkpoint.inventory import Inventory, PartInventory, PartitionInventory
from vllm_h3_plugin.checkpoint.reader import Progress, ReadOptions, WeightSource
from vllm_h3_plugin.checkpoint.source_identity import part_identity
from vllm_h3_plugin.conditioning.store import Origin, TableStore
from vllm_h3_plugin.conditioning.table import TableShape
from vllm_h3_plugin.errors import AdapterError
from vllm_h3_plugin.host import loading
from vllm_h3_plugin.host.adaln import AdalnTables, math_identity
from vllm_h3_plugin.host.adaln_modules import uses_tables
from vllm_h3_plugin.host.fused_adapter import FusedAdapter
from vllm_h3_plugin.pins import installed_host
from vllm_h3_plugin.settings import Settings


class Source(Protocol):
    """The host's ``ComponentSource``."""

    prefix: str
    model_or_path: str
    subfolder: str | None


@dataclass(frozen=True)
class Part:
    """One module of the pipeline and the files that fill it; ``fused`` is an adapter that becomes part of it."""

    name: str
    module: Any
    partition: PartitionInventory
    files: PartInventory
    loader: loading.PartLoader
    place: Place
    fused: FusedAdapter | None = None

    @property
    def diffusers(self) -> bool:
        return self.files.layout == "diffusers"

    @property
    def has_table(self) -> bool:
        return self.name != "text_encoder" and uses_tables(self.module)

    @property
    def identity(self) -> str:
        """Of the weights that are resident: those of the files, and of an adapter that was fused into them."""
        files = part_identity(self.files)
        return files if self.fused is None else f"{files}+{self.fused.adapter.identity}"

    def with_adapter(
        self, tensors: Iterable[tuple[str, torch.Tensor]], skipped: Callable[[str], bool]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Tensors of the files by native name, with the fused adapter in them if there is one."""
        return tensors if self.fused is None else self.fused.stream(tensors, skipped)

    def adaln_name(self, name: str) -> str | None:
        """Native name of a tensor if it is AdaLN's and this part keeps AdaLN as a table."""
        return loading.adaln_name(name, self.place) if self.has_table else None


def make_part(pipeline: Any, source: Source, inventory: Inventory, adapter: Adapter | None = None) -> Part:
    """The part that one of the host's sources fills. Plans its load; reads nothing.

    Args:
        adapter: one that is to be fused into ``transformer``, the DiT that such adapters were made for.

    Raises:
        LoadError: the files and the module do not match one to one.
    """
    name = source.prefix.rstrip(".")
    folder = Path(source.model_or_path) / (source.subfolder or "")
    partition = next(p for p in inventory.partitions if p.path.samefile(folder.parent))
    files = partition.part(folder.name)
    shapes = loading.shapes_of(files)
    module = getattr(pipeline, name)
    if name == "text_encoder":
        loader = loading.text_encoder_loader(module, shapes)
        return Part(name, module, partition, files, loader, loader.placements.get)
    assert partition.dit is not None  # the inventory is clean
    diffusers = files.layout == "diffusers"
    loader = loading.dit_loader(module, shapes, config=partition.dit, diffusers=diffusers)
    fused = None
    if adapter is not None and name == "transformer":
        if diffusers:
            raise AdapterError(
                f"adapter {adapter.path}",
                why=f"it is fused into native tensors, and {files.path} has the Diffusers layout",
                fix="Serve the native FL2VA checkpoint.",
            )
        fused = FusedAdapter(adapter, partition.dit, getattr(pipeline, "_fasth3", None))
    return Part(name, module, partition, files, loader, loading.dit_place(partition.dit, diffusers), fused)


def make_tables(part: Part, settings: Settings, device: torch.device) -> AdalnTables:
    """The tables of a DiT that was built without AdaLN weights, with their folder in ``H3_CACHE_DIR``."""
    assert part.partition.dit is not None
    read = read_options(settings, device)
    store = TableStore(
        TableShape.of(part.partition.dit),
        Origin(part.identity, {"host": str(installed_host()), **math_identity(device)}),
        device=device,
        device_bytes=int(settings.adaln_device_gib * 2**30),
        folder=settings.cache_dir.expanduser() / "tables" if settings.adaln_disk_gib > 0 else None,
        disk_bytes=int(settings.adaln_disk_gib * 2**30),
        read=read,
    )

    def stream(progress: Progress) -> Iterator[tuple[str, torch.Tensor]]:
        names = {record.name: native for record in part.files.tensors if (native := part.adaln_name(record.name))}
        source = WeightSource(part.files, options=read, wanted=names.__contains__, progress=progress)
        renamed = ((names[name], tensor) for name, tensor in source)
        yield from part.with_adapter(renamed, lambda name: loading.ADALN not in name)

    def embedder() -> dict[str, torch.Tensor]:
        names = {
            name: target.param
            for name in part.loader.placements
            for target in part.place(name) or ()
            if target.param.startswith("time_embedder.")
        }
        native = ((names[name], tensor) for name, tensor in WeightSource(part.files, wanted=names.__contains__))
        return dict(part.with_adapter(native, lambda name: not name.startswith("time_embedder.")))

    return AdalnTables(part.module, store, stream, embedder)


def read_options(settings: Settings, device: torch.device) -> ReadOptions:
    """How files are read for a device."""
    return ReadOptions(
        threads=settings.read_threads,
        buffer_bytes=settings.read_buffer_mib << 20,
        pin=device.type == "cuda",
    )


def file_digests(settings: Settings, inventory: Inventory) -> Mapping[Path, str] | None:
    """SHA-256 by file where H3_VERIFY_CHECKSUMS names a manifest.

    Raises:
        CheckpointError: it is no manifest, or it lacks a file of the checkpoint.
    """
    manifest = settings.verify_checksums
    return None if manifest is None else digests_for(manifest, inventory)
