# SPDX-License-Identifier: Apache-2.0
"""The host's DiT on the shared base: views compute the same and cannot be written; damage is seen by all ranks."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from tests.contract.dit_inputs import denoise, make_request, random_weights
from tests.contract.test_tensor_parallel import CONFIG, load, loader_of
from tests.unit.checkpoint.snapshot_kit import KEY, flip
from vllm_h3_plugin.checkpoint.read_only import ReadOnlyTensor
from vllm_h3_plugin.checkpoint.shared_base import SharedBase
from vllm_h3_plugin.checkpoint.snapshot import Snapshot, open_snapshot
from vllm_h3_plugin.checkpoint.snapshot_writer import SnapshotWriter
from vllm_h3_plugin.errors import BusyError, LoadError, SnapshotError
from vllm_h3_plugin.host import shared_base
from vllm_h3_plugin.host.hot_stages import keep_stages, plain_weights
from vllm_h3_plugin.host.snapshots import snapshot_entries
from vllm_h3_plugin.host.standalone import finish_loading
from vllm_h3_plugin.quantization.npu_int8 import NpuInt8
from vllm_h3_plugin.settings import Settings

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHTS = random_weights(CONFIG)
RESIDENT_ADALN = "fp8-tensor"
"""The one of its recipes that test_tensor_parallel.py loads without tables."""


def written(cache: Path, recipe: str, device: torch.device) -> Any:
    """A snapshot of a loaded DiT in a cache folder; returns that DiT."""
    _, loader, _ = loader_of(recipe, WEIGHTS, device)
    dit, _, pieces = load(recipe, WEIGHTS, device)
    with SnapshotWriter(cache, KEY, {"transformer": snapshot_entries(loader.pieces())}) as writer:
        for (param, shard), piece in pieces.items():
            writer.put("transformer", param, shard, piece)
        writer.commit()
    return dit


def opened(cache: Path) -> SharedBase:
    snapshot = open_snapshot(cache, KEY)
    assert snapshot is not None
    return SharedBase(snapshot)


def test_a_dit_of_views_denoises_to_the_bit_and_cannot_be_written(device: torch.device, tmp_path: Path) -> None:
    reference = written(tmp_path, RESIDENT_ADALN, device)
    dit, loader, _ = loader_of(RESIDENT_ADALN, WEIGHTS, device)
    part: Any = SimpleNamespace(name="transformer", loader=loader)
    with opened(tmp_path) as base:
        nbytes = shared_base.attach(base, part, views=True)
        assert nbytes == base.viewed_bytes + base.copied_bytes and base.viewed_bytes > 0.95 * nbytes
    finish_loading(dit)
    views = [name for name, parameter in dit.named_parameters() if isinstance(parameter, ReadOnlyTensor)]
    assert "blocks.0.attn.qkv_proj.weight" in views and "blocks.1.mlp.fc2.weight_scale" in views
    with torch.inference_mode():
        ours, theirs = (denoise(model, make_request("fl2va", device), 2) for model in (dit, reference))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    with pytest.raises(LoadError, match="would write a tensor of the shared read-only base"):
        dit.get_parameter("blocks.0.attn.qkv_proj.weight").data.zero_()


def test_a_view_of_another_shape_is_no_parameter(device: torch.device) -> None:
    _, loader, _ = loader_of("int8", WEIGHTS, device)
    name = "blocks.0.attn.out_proj.weight"
    with pytest.raises(LoadError, match=f"{name} is torch.uint8"):
        loader.from_pieces(iter(()), views={name: torch.zeros(3, 3, dtype=torch.int8)})


class Snapshots:
    """The part of ``host.snapshots.Snapshots`` that a base asks."""

    key, writes = KEY, True

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.refused: list[Exception] = []

    def open_now(self) -> Snapshot | None:
        return open_snapshot(self.cache, KEY)

    def refuse(self, error: Exception) -> None:
        self.refused.append(error)

    def refuse_to_build(self) -> None:
        pass


def of_ranks(snapshots: Any, build: Any, rank: int = 0, ranks: int = 1, vote: Any = bool) -> shared_base.BaseOfRanks:
    return shared_base.BaseOfRanks(snapshots, rank, ranks, lambda write: build(), lambda text: None, vote)


class Votes:
    """Two ranks in two threads that vote together."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=180)
        self._said: list[bool] = []

    def __call__(self, mine: bool) -> bool:
        self._said.append(mine)
        self._barrier.wait()
        answer = any(self._said[-2:])
        self._barrier.wait()
        return answer


@pytest.mark.parametrize("disk", ["takes it", "refuses it"])
def test_a_rank_without_the_text_encoder_waits_for_one_that_can_write_all_parts(
    device: torch.device, tmp_path: Path, disk: str
) -> None:
    """The host gives the text encoder to the first replica alone, and the other one is at the lock sooner."""
    votes, loads = Votes(), []

    def start(rank: int, parts: tuple[str, ...]) -> Any:
        if rank == 0:
            time.sleep(0.5)

        def load_checkpoint(write: bool) -> None:
            loads.append((rank, write))
            if write and disk == "takes it":
                written(tmp_path, "int8", device)

        base = shared_base.BaseOfRanks(Snapshots(tmp_path), rank, 2, load_checkpoint, lambda text: None, votes, parts)
        return base.take()

    with ThreadPoolExecutor() as pool:
        first = pool.submit(start, 0, ("transformer", "text_encoder"))
        second = pool.submit(start, 1, ("transformer",))
        taken = [first.result(60), second.result(60)]
    if disk == "takes it":
        assert loads == [(0, True)] and [one.here for one in taken] == [True, False]
        for one in taken:
            one.base.close()
    else:
        assert sorted(loads) == [(0, True), (1, False)] and [one.base for one in taken] == [None, None]


def test_a_base_is_built_once_and_a_damaged_one_is_built_anew(device: torch.device, tmp_path: Path) -> None:
    snapshots, built = Snapshots(tmp_path), []

    def build() -> None:
        built.append(written(tmp_path, "int8", device))

    first = of_ranks(snapshots, build).take()
    assert first.here and first.base is not None and len(built) == 1
    file = first.base.snapshot.file("transformer").path
    first.base.close()
    again = of_ranks(snapshots, build).take()
    assert not again.here and again.base is not None and len(built) == 1
    again.base.close()
    flip(file, file.stat().st_size - 100)
    repaired = of_ranks(snapshots, build).take()
    assert repaired.here and len(built) == 2 and "BLAKE3" in str(snapshots.refused[0])
    assert repaired.base is not None
    repaired.base.verify()
    repaired.base.close()


def test_a_rank_follows_another_that_found_damage(device: torch.device, tmp_path: Path) -> None:
    """This rank's share is sound; the vote is what it learns from."""
    written(tmp_path, "int8", device)
    votes = iter([True, False, False])
    built: list[int] = []

    def build() -> None:
        built.append(1)
        written(tmp_path, "int8", device)

    taken = of_ranks(Snapshots(tmp_path), build, vote=lambda mine: next(votes)).take()
    assert taken.base is not None and built == [1]
    taken.base.close()


def test_a_disk_that_refuses_the_base_leaves_the_rank_with_what_it_loaded(tmp_path: Path) -> None:
    loaded: list[int] = []
    taken = of_ranks(Snapshots(tmp_path), lambda: loaded.append(1)).take()
    assert taken.base is None and taken.here and loaded == [1]


def test_a_cache_folder_that_cannot_be_written_leaves_each_rank_with_what_it_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    loaded: list[int] = []
    taken = of_ranks(Snapshots(tmp_path / "file"), lambda: loaded.append(1)).take()
    assert taken.base is None and taken.here and loaded == [1]


def test_too_little_host_memory_is_refused_with_the_numbers(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "int8", device)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(BusyError, match=r"of host memory and 0\.0 GiB are free"):
        of_ranks(Snapshots(tmp_path), lambda: None).take()


def test_a_base_that_is_not_the_models_is_named(device: torch.device, tmp_path: Path) -> None:
    """A snapshot holds whole parameters, so another TP size is no other snapshot; another model is."""
    written(tmp_path, "int8", device)
    _, loader, _ = loader_of("fp8", WEIGHTS, device)
    part: Any = SimpleNamespace(name="transformer", loader=loader)
    with opened(tmp_path) as base, pytest.raises(SnapshotError, match="does not fit the model"):
        shared_base.attach(base, part, views=True)


@pytest.mark.parametrize(
    ("mode", "ranks", "resident", "shared"),
    [
        ("auto", 1, "all", False),
        ("auto", 2, "all", True),
        ("auto", 1, "stage", True),
        ("on", 1, "all", True),
        ("off", 4, "stage", False),
    ],
)
def test_where_a_base_is_shared(mode: Any, ranks: int, resident: Any, shared: bool, tmp_path: Path) -> None:
    settings = Settings(shared_base=mode, resident=resident)
    assert shared_base.wanted(settings, ranks, Snapshots(tmp_path)) is shared  # type: ignore[arg-type]


def test_stages_come_back_from_the_base_where_it_has_their_bytes(device: torch.device, tmp_path: Path) -> None:
    dit = written(tmp_path, RESIDENT_ADALN, device)
    other = torch.nn.Linear(64, 64)
    other.decode_latent = other.forward  # type: ignore[assignment]
    pipeline: Any = SimpleNamespace(transformer=dit, video_vae=other)
    before = {name: parameter.detach().clone() for name, parameter in dit.named_parameters()}
    request = make_request("fl2va", device)
    with torch.inference_mode():
        want = denoise(dit, request, 2)
    with opened(tmp_path) as base:
        cache = keep_stages(pipeline, Settings(resident="stage"), base)
        assert cache is not None
        facts = cache.facts()
        assert facts["dit"]["host_copy_bytes"] < 0.1 * facts["dit"]["nbytes"]  # type: ignore[operator]
        for _ in range(20):
            cache.drop("dit")
            with torch.inference_mode(), cache.use("dit"):
                pass
        for name, parameter in dit.named_parameters():
            assert torch.equal(parameter.view(torch.uint8), before[name].view(torch.uint8)), name
        cache.drop("dit")
        with torch.inference_mode():
            got = denoise(dit, request, 2)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert keep_stages(pipeline, Settings(), None) is None


def test_a_part_beside_the_dits_card_takes_no_turn() -> None:
    """Role map two-resident: what is on the other card makes no room on this one. ``meta`` plays that card."""
    parts = {"text_encoder": torch.nn.Linear(64, 64, device="meta")}
    parts |= {name: torch.nn.Linear(64, 64) for name in ("transformer", "video_vae")}
    entry = parts["text_encoder"].forward
    cache = keep_stages(SimpleNamespace(**parts), Settings(resident="stage"), None)
    assert cache is not None and cache.facts().keys() == {"dit", "vae"}
    assert parts["text_encoder"].forward == entry
    with cache.use("vae"):
        assert cache.resident == ("vae",)


def test_on_ascend_stages_that_take_turns_stay_in_nd() -> None:
    backend = NpuInt8(ops=SimpleNamespace())
    plain_weights(backend, Settings())
    assert backend.weight_format == "FRACTAL_NZ"
    plain_weights(backend, Settings(resident="stage"))
    assert backend.weight_format.startswith("ND, stages take turns")
