# SPDX-License-Identifier: Apache-2.0
"""Two ranks hold slices of what one rank holds: scales of whole tensors, tables to the bit, one snapshot for both.

The ranks are two processes of this machine. They are started once, do everything that needs the pair, and report;
the tests read the report. The oracle is what one rank loads, cut here by hand and not by a weight loader.
"""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from tests.contract.dit_inputs import Weights, denoise, host_dit, precision_plan, random_weights
from tests.contract.test_adaln_table import prepared
from vllm_h3_plugin.checkpoint.loader import Shard, tensors_of
from vllm_h3_plugin.checkpoint.synthetic import tiny_dit
from vllm_h3_plugin.conditioning.schedule import Schedule
from vllm_h3_plugin.conditioning.store import Origin, TableStore
from vllm_h3_plugin.conditioning.table import TableShape
from vllm_h3_plugin.host import loading
from vllm_h3_plugin.host.adaln import ADALN, AdalnTables
from vllm_h3_plugin.host.quant_config import H3QuantizationConfig
from vllm_h3_plugin.host.standalone import build_dit, finish_loading
from vllm_h3_plugin.quantization.contract import choose_backend
from vllm_h3_plugin.quantization.cutlass_fp8 import system_facts

CONFIG = tiny_dit(layers=2, refiner_layers=1, hidden=128, heads=4, head_dim=32, ffn=256)
RANKS = (0, 1)
RECIPES = ("fp8", "fp8-tensor", "int8", "bf16-table")
STEPS = 2
DEADLINE_S = 480.0
"""Importing the host takes half a minute of a core in each process, more where two hosts are tested side by side; the
work itself, seconds."""

COLUMNS = ("attn.out_proj.weight", "mlp.fc2.weight", "time_embedder.proj_out.weight")
"""Row-parallel weights are cut by columns."""
WHOLE = ("_norm.weight", "norm.weight", "norm1.weight", "norm2.weight", "proj_out.bias", "rope.inv_freq")

Pieces = dict[tuple[str, Shard], torch.Tensor]


@contextmanager
def one_of_two(rank: int, rendezvous: Path) -> Iterator[torch.device]:
    """Be one rank of a tensor-parallel pair on the CPU, with BF16 as default dtype."""
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config):
            init_distributed_environment(
                world_size=2,
                rank=rank,
                distributed_init_method=f"file://{rendezvous}",
                local_rank=rank,
                backend="gloo",
            )
            initialize_model_parallel(2)
            config.model_config = SimpleNamespace(dtype=torch.bfloat16, is_moe=False, is_quantized=False)  # type: ignore[assignment]
            yield torch.device("cpu")
    finally:
        cleanup_dist_env_and_memory()


def loader_of(recipe: str, weights: Weights, device: torch.device) -> tuple[Any, loading.PartLoader, Weights]:
    """A DiT for a recipe, unfilled, its loader, and the tensors that it takes."""
    precisions = precision_plan(recipe, CONFIG)
    quantization = None
    if precisions.quantized:
        backend, _ = choose_backend(None, system_facts(device), precisions.recipe.method or "fp8")
        quantization = H3QuantizationConfig(precisions, backend)
    dit = build_dit(CONFIG, quantization, device, tables=recipe != "fp8-tensor")
    loader = loading.dit_loader(dit, loading.facts_of(weights), config=CONFIG, diffusers=False)
    return dit, loader, {name: tensor for name, tensor in weights.items() if name in loader.placements}


def load(recipe: str, weights: Weights, device: torch.device) -> tuple[Any, dict[str, torch.Tensor], Pieces]:
    """A loaded DiT, its tensors before the backend packs them, and the pieces that its load made."""
    dit, loader, taken = loader_of(recipe, weights, device)
    pieces: Pieces = {}

    def keep(param: str, shard: Shard, piece: torch.Tensor) -> None:
        pieces[param, shard] = piece.clone()

    loader.from_checkpoint(loading.dit_stream(taken.items(), config=CONFIG, diffusers=False), sink=keep)
    assert set(pieces) == {(piece.param, piece.shard) for piece in loader.pieces()}
    tensors = {name: tensor.detach().clone() for name, tensor in tensors_of(dit).items()}
    finish_loading(dit)
    return dit, tensors, pieces


def restore(recipe: str, weights: Weights, device: torch.device, pieces: Pieces) -> dict[str, torch.Tensor]:
    """Tensors of a DiT that was filled from the pieces of an earlier load, as from a snapshot."""
    dit, loader, _ = loader_of(recipe, weights, device)
    loader.from_pieces((param, shard, piece) for (param, shard), piece in pieces.items())
    return {name: tensor.detach().clone() for name, tensor in tensors_of(dit).items()}


def cut(name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """What one of two ranks holds of a tensor of the whole model."""
    if name.endswith(COLUMNS):
        return whole.chunk(2, dim=1)[rank]
    if name.endswith(WHOLE) or name.removesuffix("_scale").endswith(COLUMNS) or whole.numel() == 1:
        return whole
    fused = 3 if ".attn.qkv_proj." in name else 2 if ".mlp.fc1." in name else 1
    return torch.cat([part.chunk(2)[rank] for part in whole.chunk(fused)])


def unequal(ours: dict[Any, torch.Tensor], wanted: dict[Any, torch.Tensor]) -> list[Any]:
    """Names of tensors that are not there on both sides, or not equal to the bit."""
    odd = ours.keys() ^ wanted.keys()
    for name in ours.keys() & wanted.keys():
        a, b = ours[name].contiguous(), wanted[name].contiguous()
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            odd.add(name)
    return sorted(odd, key=str)


class PairTables:
    """Tables of one rank, in a folder of its own or one that both share, with the reads of weights counted."""

    def __init__(self, dit: Any, weights: Weights, device: torch.device) -> None:
        self.dit, self.weights, self.device = dit, weights, device

    def open(self, folder: Path | None, *, device_bytes: int = 1 << 30) -> AdalnTables:
        embedder = {name: tensor for name, tensor in self.weights.items() if name.startswith("time_embedder.")}
        adaln = [(name, tensor) for name, tensor in self.weights.items() if ADALN in name]
        store = TableStore(
            TableShape.of(CONFIG),
            Origin("w", {}),
            device=self.device,
            device_bytes=device_bytes,
            folder=folder,
            disk_bytes=1 << 30,
        )
        self.dit.time_embedder.table = None
        return AdalnTables(self.dit, store, lambda progress: adaln, lambda: embedder)


def _rank(rank: int, folder: Path) -> None:
    """What each rank does: nothing is asserted here, everything is reported."""
    from vllm_h3_plugin.host.register import register

    register()
    torch.set_num_threads(1)
    oracle = torch.load(folder / "one.pt")
    weights: Weights = oracle["weights"]
    report: dict[str, Any] = {}
    with one_of_two(rank, folder / "rendezvous") as device, torch.inference_mode():
        for recipe in RECIPES:
            dit, tensors, pieces = load(recipe, weights, device)
            alone = {name: cut(name, tensor, rank) for name, tensor in oracle[recipe]["tensors"].items()}
            report[recipe] = {
                "slices": unequal(tensors, alone),
                "pieces": unequal(pieces, oracle[recipe]["pieces"]),
                "from one rank's pieces": unequal(restore(recipe, weights, device, oracle[recipe]["pieces"]), tensors),
                "made": pieces,
            }
        report |= _tables(rank, folder, weights, dit, device)
    torch.save(report, folder / f"rank{rank}.pt")


def _tables(rank: int, folder: Path, weights: Weights, dit: Any, device: torch.device) -> dict[str, Any]:
    """``dit`` is in BF16 with AdaLN as a table."""
    request, schedule = prepared("fl2va", device, STEPS)
    resident: Any = host_dit(CONFIG, weights, device, "bf16")
    if hasattr(resident, "adaln_cache"):
        resident.adaln_cache = None
        for block in (*resident.blocks, resident.final_layer):
            block.adaln_proj._adaln_cache = None
    pair = PairTables(dit, weights, device)
    own = folder / f"tables-{rank}"
    built = {}

    def activate(name: str, at: Path | None) -> AdalnTables:
        torch.distributed.barrier()
        tables = pair.open(at)
        tables.activate(schedule)
        built[name] = tables.built
        # What is done to the files next must not meet the other rank's look at them.
        torch.distributed.barrier()
        return tables

    tables = activate("nowhere", own)
    table = tables.active
    assert table is not None
    file = tables.store.path(schedule)
    assert file is not None
    report: dict[str, Any] = {"projections": _unlike_the_host(dit, resident, schedule, device)}
    ours, theirs = denoise(dit, request, STEPS), denoise(resident, request, STEPS)
    report["denoised"] = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    report["written"] = file.exists()

    activate("on the first's disk", own)
    if rank == 0:
        shutil.copytree(own, folder / "tables-1", dirs_exist_ok=True)
        file.unlink()
    activate("on the second's disk", own)
    if rank == 0:
        shutil.copytree(own, folder / "shared")
    activate("on a disk of both", folder / "shared")
    if rank == 1:
        file.write_bytes(file.read_bytes()[:-8])
    activate("damaged for the second", own)
    report["built"] = built

    tables = pair.open(None, device_bytes=2 * table.nbytes)
    for steps in (2, 3, 4):
        tables.activate(prepared("fl2va", device, steps)[1])
    report["device bytes"] = tables.store.nbytes, max(2 * table.nbytes, tables.active.nbytes if tables.active else 0)
    return report


def _unlike_the_host(dit: Any, resident: Any, schedule: Schedule, device: torch.device) -> list[str]:
    """Layers whose modulations in the table are not the host's own projection at this size."""
    odd = set()
    for group in schedule.groups:
        times = torch.tensor(group, dtype=torch.float32, device=device)
        rows, embedding = dit.time_embedder(times), resident.time_embedder(times)
        for name in (*(f"blocks.{i}.adaln_proj" for i in range(CONFIG.num_layers)), "final_layer.adaln_proj"):
            ours, theirs = dit.get_submodule(name)(rows), resident.get_submodule(name)(embedding)
            if not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
                odd.add(name)
    return sorted(odd)


@pytest.fixture(scope="module")
def alone(device: torch.device) -> dict[str, Any]:
    """What one rank loads, by recipe."""
    weights = random_weights(CONFIG)
    result: dict[str, Any] = {"weights": weights}
    for recipe in RECIPES:
        _, tensors, pieces = load(recipe, weights, device)
        result[recipe] = {"tensors": tensors, "pieces": pieces}
    return result


@pytest.fixture(scope="module")
def reports(alone: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("pair")
    torch.save(alone, folder / "one.pt")
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=_rank, args=(rank, folder), daemon=True) for rank in RANKS]
    for process in ranks:
        process.start()
    end = time.monotonic() + DEADLINE_S
    try:
        while any(process.is_alive() for process in ranks) and time.monotonic() < end:
            time.sleep(0.2)
            if any(process.exitcode for process in ranks):
                break
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert codes == [0, 0], f"exit codes of the two ranks: {codes}; None is one that hung or waited for the other"
    return [torch.load(folder / f"rank{rank}.pt") for rank in RANKS]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_rank_holds_the_slice_of_the_whole_tensors_quantization(
    recipe: str, rank: int, reports: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    assert reports[rank][recipe]["slices"] == []
    scales = [name for name in alone[recipe]["tensors"] if name.endswith("weight_scale")]
    assert bool(scales) == (recipe != "bf16-table")


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_snapshot_written_by_either_is_the_same(recipe: str, rank: int, reports: list[dict[str, Any]]) -> None:
    assert reports[rank][recipe]["pieces"] == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_snapshot_of_one_rank_fills_two_and_of_two_fills_one(
    recipe: str, reports: list[dict[str, Any]], alone: dict[str, Any], device: torch.device
) -> None:
    assert [report[recipe]["from one rank's pieces"] for report in reports] == [[], []]
    ours = restore(recipe, alone["weights"], device, reports[0][recipe]["made"])
    assert unequal(ours, alone[recipe]["tensors"]) == []


def test_tables_of_two_ranks_are_the_hosts_projection_at_two_ranks(reports: list[dict[str, Any]]) -> None:
    assert [report["projections"] for report in reports] == [[], []]
    assert [report["denoised"] for report in reports] == [True, True]


def test_only_the_first_rank_writes_the_table(reports: list[dict[str, Any]]) -> None:
    assert [report["written"] for report in reports] == [True, False]


def test_a_table_that_one_rank_lacks_is_built_by_both_and_nobody_waits_for_ever(
    reports: list[dict[str, Any]],
) -> None:
    wanted = {
        "nowhere": 1,
        "on the first's disk": 1,
        "on the second's disk": 1,
        "on a disk of both": 0,
        "damaged for the second": 1,
    }
    assert [report["built"] for report in reports] == [wanted, wanted]


def test_tables_of_two_ranks_keep_to_the_bound_on_the_device(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        held, bound = report["device bytes"]
        assert held <= bound


def test_the_cut_of_the_oracle_is_no_copy_of_everything(alone: dict[str, Any]) -> None:
    tensors = alone["fp8"]["tensors"]
    halves = {name for name, tensor in tensors.items() if cut(name, tensor, 0).numel() * 2 == tensor.numel()}
    assert {name for name in tensors if name.endswith(".weight") and ".attn.qkv_proj" in name} <= halves
    assert {name for name in tensors if name.endswith("fc2.weight")} <= halves
    assert "blocks.0.mlp.fc2.weight_scale" not in halves and "blocks.0.mlp.fc1.weight_scale" in halves
