# SPDX-License-Identifier: Apache-2.0
"""The time that a new schedule's AdaLN table takes, and whether its values are the host's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm_omni.diffusion.models.minimax_h3 import minimax_h3_transformer as host_dit
from vllm_omni.diffusion.models.minimax_h3 import time_request

from vllm_h3_plugin.checkpoint.inventory import Inventory, PartInventory
from vllm_h3_plugin.checkpoint.reader import WeightSource
from vllm_h3_plugin.conditioning.schedule import Roles, Schedule, schedule
from vllm_h3_plugin.conditioning.table import FINAL, AdalnTable, TableShape
from vllm_h3_plugin.host import loading
from vllm_h3_plugin.host.adaln import finish_loading
from vllm_h3_plugin.host.adaln_modules import HostProjection, HostTimeEmbedder
from vllm_h3_plugin.host.bench.reads import Cold, Range, joined, make_cold
from vllm_h3_plugin.host.schedules import DEFAULT_STEPS


@dataclass(frozen=True)
class TableRun:
    """One table, built from the weights on disk.

    Attributes:
        schedule: in words.
        rows: of the table; ``table_bytes`` of it.
        build_s: from the first read to the table on the device.
        ready_s: until a request would go on: the table is also kept on disk by then.
        nbytes: of AdaLN tensors in the files.
        equal: whether the checked layers are bit-equal to the host's own projection.
        checked: those layers.
        cold: the files before it.
    """

    schedule: str
    rows: int
    table_bytes: int
    build_s: float
    ready_s: float
    nbytes: int
    equal: bool
    checked: tuple[str, ...]
    cold: Cold


def adaln_tensors(inventory: Inventory) -> dict[str, str]:
    """Name in the files -> native name of every AdaLN tensor of the first DiT."""
    part, place = _dit(inventory)
    return {r.name: native for r in part.tensors if (native := loading.adaln_name(r.name, place)) is not None}


def adaln_ranges(inventory: Inventory) -> list[Range]:
    """Where the AdaLN tensors lie in the files."""
    part, _ = _dit(inventory)
    names = adaln_tensors(inventory)
    records = [record for record in part.tensors if record.name in names]
    return joined(Range(record.file, record.offset, record.offset + record.nbytes) for record in records)


def new_schedule(pipeline: Any, number: int) -> Schedule:
    """A schedule of 50 steps that no table was made for: first frame given, and a shift of its own for each number."""
    sigmas = [
        time_request.minimax_h3_time_shift_sigmas(num_steps=DEFAULT_STEPS, shift_scale=shift + 0.25 * (number + 1))
        for shift in (pipeline.default_video_shift, pipeline.default_audio_shift)
    ]
    return schedule(sigmas[0], sigmas[1], Roles(image=True))


def build(pipeline: Any, inventory: Inventory, number: int) -> TableRun:
    """Build a table as a request would, from cold files, and hold it against the host's projection.

    Raises:
        H3Error: whatever stops a request.
        AssertionError: the recipe keeps AdaLN resident, so there are no tables.
    """
    tables = pipeline._tables.get("transformer")
    if tables is None:
        raise AssertionError("the recipe keeps AdaLN resident: there is no table to build")
    wanted = new_schedule(pipeline, number)
    ranges = adaln_ranges(inventory)
    cold = make_cold(list(dict.fromkeys(piece.path for piece in ranges)))
    device: torch.device = pipeline.device
    taken: list[float] = []

    def timed(work: Callable[..., AdalnTable]) -> Callable[..., AdalnTable]:
        def call(*args: Any) -> AdalnTable:
            begun = time.perf_counter()
            table = work(*args)
            _wait(device)
            taken.append(time.perf_counter() - begun)
            return table

        return call

    original = tables._build
    tables._build = timed(original)
    try:
        started = time.perf_counter()
        tables.activate(wanted)
        _wait(device)
        ready_s = time.perf_counter() - started
    finally:
        tables._build = original
    if len(taken) != 1:
        raise AssertionError("the table was found and not built")
    table = tables.active
    equal, checked = equals_host(pipeline.transformer, table, inventory)
    return TableRun(
        schedule=wanted.label,
        rows=wanted.rows,
        table_bytes=table.nbytes,
        build_s=taken[0],
        ready_s=ready_s,
        nbytes=sum(piece.end - piece.begin for piece in ranges),
        equal=equal,
        checked=checked,
        cold=cold,
    )


@torch.inference_mode()
def equals_host(dit: Any, table: AdalnTable, inventory: Inventory) -> tuple[bool, tuple[str, ...]]:
    """Project the first and the last block and the final layer with the host's own classes, and compare every row.

    The weights are read and copied here, one projection as a whole, by none of the code that builds tables.
    """
    part, _ = _dit(inventory)
    names = adaln_tensors(inventory)
    shape, arch = table.shape, dit.arch
    layers = dict.fromkeys((0, shape.layers - 1, FINAL))
    equal = True
    for layer in layers:
        own = {name: native for name, native in names.items() if shape.layer_of(native) == layer}
        projection = _host_projection(arch, shape, layer, table.values.device)
        for name, tensor in WeightSource(part, wanted=own.__contains__):
            projection.linear.get_parameter(own[name].rpartition(".")[2]).data.copy_(tensor)
        finish_loading(projection)
        for group in table.schedule.groups:
            timesteps = torch.tensor(group, dtype=torch.float32, device=table.values.device)
            embedding = HostTimeEmbedder.forward(dit.time_embedder, timesteps)
            rows = torch.cat(projection(embedding), dim=-1).view(len(group), -1)
            equal &= torch.equal(rows, table.rows(group)[:, shape.columns(layer)])
    return equal, tuple("final layer" if layer == FINAL else f"block {layer}" for layer in layers)


def _host_projection(arch: Any, shape: TableShape, layer: int, device: torch.device) -> Any:
    final = layer == FINAL
    with device:
        return HostProjection(
            arch,
            shape.final if final else shape.block,
            None,
            expand_ratio=2 if final else 6,
            modality_num=1 if final else host_dit.MINIMAX_H3_ADALN_MODALITY_NUM,
            prefix="final_layer.adaln_proj" if final else f"blocks.{layer}.adaln_proj",
        )


def _dit(inventory: Inventory) -> tuple[PartInventory, Any]:
    partition = inventory.partitions[0]
    assert partition.dit is not None  # the inventory is clean
    part = partition.part("transformer")
    return part, loading.dit_place(partition.dit, part.layout == "diffusers")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
