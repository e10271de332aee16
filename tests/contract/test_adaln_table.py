# SPDX-License-Identifier: Apache-2.0
"""A DiT that reads AdaLN from a table denoises to the same bits as the host's own that projects it in every forward.

Eager, in BF16, on this platform's device; for every task, with TeaCache and without. The oracle is the host's module
with its weights resident and its own memo of projections switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_omni.diffusion.cache.teacache.config import TeaCacheConfig
from vllm_omni.diffusion.cache.teacache.hook import TeaCacheHook, apply_teacache_hook
from vllm_omni.diffusion.hooks import HookRegistry
from vllm_omni.errors import OmniClientError

from tests.contract.dit_inputs import (
    AUDIO_SHIFT,
    VIDEO_SHIFT,
    Weights,
    denoise,
    diffusers_weights,
    host_dit,
    make_request,
    minimax_h3_time_shift_sigmas,
    random_weights,
)
from vllm_h3_plugin.checkpoint.synthetic import tiny_dit
from vllm_h3_plugin.conditioning.schedule import Schedule
from vllm_h3_plugin.conditioning.store import Origin, TableStore
from vllm_h3_plugin.conditioning.table import TableShape
from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.host import loading
from vllm_h3_plugin.host.adaln import ADALN, AdalnTables
from vllm_h3_plugin.host.schedules import refuse_what_tables_cannot_serve, schedule_of
from vllm_h3_plugin.host.standalone import build_dit, finish_loading

CONFIG = tiny_dit(layers=3, refiner_layers=1, hidden=128, heads=4, head_dim=32, ffn=256)
STEPS = 4
TASKS = ("t2va", "fl2va", "ref2va")


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(CONFIG)


@pytest.fixture(scope="module")
def resident(weights: Weights, device: torch.device) -> Any:
    dit = host_dit(CONFIG, weights, device, "bf16")
    if hasattr(dit, "adaln_cache"):
        dit.adaln_cache = None  # type: ignore[assignment]
        for block in (*dit.blocks, dit.final_layer):  # type: ignore[misc,operator]
            block.adaln_proj._adaln_cache = None
    return dit


def table_dit(
    weights: Weights, device: torch.device, *, diffusers: bool = False, streamed: list[str] | None = None, **store: Any
) -> AdalnTables:
    """A loaded DiT without AdaLN weights, and its tables."""
    dit: Any = build_dit(CONFIG, None, device, tables=True)
    loading.load_dit(dit, weights, config=CONFIG, diffusers=diffusers)
    finish_loading(dit)
    if hasattr(dit, "adaln_cache"):
        dit.adaln_cache = None
    place = loading.dit_place(CONFIG, diffusers)

    def stream(progress: Callable[[int, int], None]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            native = loading.adaln_name(name, place)
            if native is not None:
                if streamed is not None:
                    streamed.append(native)
                yield native, tensor

    def embedder() -> dict[str, torch.Tensor]:
        return {
            target.param: tensor
            for name, tensor in weights.items()
            for target in place(name) or ()
            if target.param.startswith("time_embedder.")
        }

    shape = TableShape.of(CONFIG)
    options: dict[str, Any] = {"device_bytes": 1 << 30, "folder": None, "disk_bytes": 0, **store}
    return AdalnTables(dit, TableStore(shape, Origin("w", {}), device=device, **options), stream, embedder)


@pytest.fixture(scope="module")
def tables(weights: Weights, device: torch.device) -> AdalnTables:
    return table_dit(weights, device)


def prepared(task: str, device: torch.device, steps: int = STEPS) -> tuple[Any, Schedule]:
    """A request and its schedule, read off what the host's ``_build_denoise_inputs`` would return for it."""
    request = make_request(task, device)
    count = next(n for n in (steps, steps + 1) if len(minimax_h3_time_shift_sigmas(num_steps=n)) == steps + 1)
    inputs = {
        "branch": request.branch,
        "sigmas_video": minimax_h3_time_shift_sigmas(num_steps=count, shift_scale=VIDEO_SHIFT),
        "sigmas_audio": minimax_h3_time_shift_sigmas(num_steps=count, shift_scale=AUDIO_SHIFT),
    }
    return request, schedule_of(inputs)


def test_the_dit_has_no_adaln_weights(tables: AdalnTables, resident: Any) -> None:
    names = {name for name, _ in tables._dit.named_parameters()}
    lost = {name for name, _ in resident.named_parameters()} - names
    assert lost and all(ADALN in name for name in lost)
    assert names <= {name for name, _ in resident.named_parameters()}


@pytest.mark.parametrize("task", TASKS)
def test_a_whole_denoise_is_equal_to_the_bit(
    task: str, tables: AdalnTables, resident: Any, device: torch.device
) -> None:
    request, schedule = prepared(task, device)
    tables.activate(schedule)
    ours, theirs = denoise(tables._dit, request, STEPS), denoise(resident, request, STEPS)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("task", ["t2va", "fl2va"])
def test_with_teacache_it_is_equal_too(task: str, tables: AdalnTables, resident: Any, device: torch.device) -> None:
    request, schedule = prepared(task, device, steps=8)
    tables.activate(schedule)
    results = []
    for dit in (tables._dit, resident):
        # A threshold at which some steps are skipped and some are not, so that both branches read modulations.
        apply_teacache_hook(dit, TeaCacheConfig(transformer_type="MiniMaxH3DiTModel", rel_l1_thresh=0.6))
        try:
            results.append(denoise(dit, request, 8))
        finally:
            HookRegistry.get_or_create(dit).remove_hook(TeaCacheHook._HOOK_NAME)
    plain = denoise(resident, request, 8)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(results[0][0], plain[0]), "TeaCache skipped nothing: the test shows nothing"


def test_the_diffusers_layout_gives_equal_tables(tables: AdalnTables, weights: Weights, device: torch.device) -> None:
    _, schedule = prepared("fl2va", device)
    tables.activate(schedule)
    split = table_dit(diffusers_weights(CONFIG, weights), device, diffusers=True)
    split.activate(schedule)
    assert tables.active is not None and split.active is not None
    assert torch.equal(tables.active.values, split.active.values)


def test_a_gemm_of_all_rows_at_once_is_not_what_is_kept(tables: AdalnTables, device: torch.device) -> None:
    _, schedule = prepared("ref2va", device)
    assert [len(group) for group in schedule.groups] == [3, 4, 4, 4]


def test_another_task_builds_its_own_table_and_the_first_is_found_again(weights: Weights, device: torch.device) -> None:
    streamed: list[str] = []
    tables = table_dit(weights, device, streamed=streamed)
    first, second = prepared("t2va", device)[1], prepared("fl2va", device)[1]
    for schedule in (first, second, first, second):
        tables.activate(schedule)
    assert tables.built == 2
    assert len(streamed) == 2 * 2 * (CONFIG.num_layers + 1)


def test_a_table_on_disk_spares_the_weights(weights: Weights, device: torch.device, tmp_path: Path) -> None:
    schedule = prepared("t2va", device)[1]
    table_dit(weights, device, folder=tmp_path, disk_bytes=1 << 30).activate(schedule)
    streamed: list[str] = []
    again = table_dit(weights, device, streamed=streamed, folder=tmp_path, disk_bytes=1 << 30)
    again.activate(schedule)
    assert again.built == 0 and streamed == [] and again.active is not None


def test_a_forward_beside_the_schedule_is_refused_and_not_approximated(
    tables: AdalnTables, device: torch.device
) -> None:
    request, _ = prepared("t2va", device)
    tables.activate(prepared("t2va", device, steps=5)[1])
    with pytest.raises(UsageError, match='"adaln": "resident"'):
        denoise(tables._dit, request, STEPS)


def test_a_dit_without_a_table_says_so(weights: Weights, device: torch.device) -> None:
    with pytest.raises(UsageError, match="without an AdaLN table"):
        denoise(table_dit(weights, device)._dit, make_request("t2va", device), STEPS)


@pytest.mark.parametrize("edit", ["video_edit", "audio_edit"])
def test_a_latent_mask_edit_is_the_clients_mistake_with_the_way_out(edit: str) -> None:
    with pytest.raises(OmniClientError, match=r'latent-mask edit.*"adaln": "resident"'):
        schedule_of({edit: object()})


def test_step_wise_execution_is_refused_before_anything_is_built() -> None:
    with pytest.raises(UsageError, match=r'step-wise execution.*"adaln": "resident"'):
        refuse_what_tables_cannot_serve(SimpleNamespace(step_execution=True))
    refuse_what_tables_cannot_serve(SimpleNamespace())


def test_a_missing_layer_is_no_table(weights: Weights, device: torch.device) -> None:
    short = {name: tensor for name, tensor in weights.items() if not name.startswith("blocks.1.adaln")}
    with pytest.raises(AssertionError, match=r"layers \[1\]"):
        table_dit(weights, device)  # loads
        tables = table_dit({**short, **{k: v for k, v in weights.items() if ADALN not in k}}, device)
        tables.activate(prepared("t2va", device)[1])
