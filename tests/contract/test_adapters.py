# SPDX-License-Identifier: Apache-2.0
"""Adapters of every kind on every backend: what they add is BF16's, and one that is refused leaves no trace.

Outlier rows are those of :func:`tests.contract.dit_inputs.with_outlier_rows`, 32 times as large as the others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm_omni.diffusion.models.minimax_h3 import lora as host_turbo
from vllm_omni.diffusion.models.minimax_h3.npu import lora as host_flashgen
from vllm_omni.errors import OmniClientError

from tests.contract.adapter_inputs import FUSED, Served, minus, same, serve
from tests.contract.dit_inputs import Weights, cosine, random_weights, with_outlier_rows
from tests.unit.quantization.npu_emulation import EmulatedNpu
from vllm_h3_plugin.checkpoint.adapter import check_adapter
from vllm_h3_plugin.checkpoint.adapter_layout import DitConfig, parse_turbo_name, turbo_file
from vllm_h3_plugin.checkpoint.synthetic import tiny_dit
from vllm_h3_plugin.checkpoint.synthetic.adapters import BREAKS, AdapterSpec, Break, write_adapter
from vllm_h3_plugin.errors import HostError
from vllm_h3_plugin.host import adapter_shapes
from vllm_h3_plugin.host.adapter_shapes import flashgen_constants, loaders_for, turbo_constants
from vllm_h3_plugin.pins import HostPin
from vllm_h3_plugin.quantization.npu_int8 import NpuInt8
from vllm_h3_plugin.quantization.reference import Reference

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = tiny_dit(layers=3, refiner_layers=1, hidden=128, heads=4, head_dim=32, ffn=256)
STEPS = 8
LATENTS_COSINE, DELTA_COSINE = 0.995, 0.98


@pytest.fixture(scope="module")
def weights() -> Weights:
    return with_outlier_rows(CONFIG, random_weights(CONFIG), 32.0)


@pytest.fixture(scope="module")
def turbo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("turbo"), AdapterSpec("turbo", CONFIG))


@pytest.fixture(scope="module")
def bf16(weights: Weights, device: torch.device) -> Served:
    return serve("bf16", CONFIG, weights, device, steps=STEPS, tasks=("fl2va",))


BACKENDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "fp8": ("fp8", lambda: None),
    "fp8, fused": ("fp8" + FUSED, lambda: None),
    "int8 reference": ("int8", lambda: Reference("int8")),
    "int8 reference, fused": ("int8" + FUSED, lambda: Reference("int8")),
    "npu_int8": ("int8", lambda: NpuInt8(ops=EmulatedNpu())),
    "npu_int8, fused": ("int8" + FUSED, lambda: NpuInt8(ops=EmulatedNpu())),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_turbo_adds_to_quantized_layers_what_it_adds_to_bf16(
    backend: str, weights: Weights, bf16: Served, turbo: Path, device: torch.device
) -> None:
    recipe, make = BACKENDS[backend]
    server = serve(recipe, CONFIG, weights, device, steps=STEPS, backend=make(), tasks=("fl2va",))
    results = []
    for served in (server, bf16):
        served.adapter(turbo)
        results.append(served.denoise("fl2va"))
        served.adapter(None)
        assert same(served.denoise("fl2va"), served.before["fl2va"])
    deltas = [minus(made, served.before["fl2va"]) for made, served in zip(results, (server, bf16), strict=True)]
    for part in (0, 1):
        assert cosine(results[0][part], results[1][part]) > LATENTS_COSINE
        assert cosine(deltas[0][part], deltas[1][part]) > DELTA_COSINE
        assert deltas[1][part].norm() > 0.05 * results[1][part].norm(), "the adapter must matter"
    server.adapter(turbo, 0.0)
    assert same(server.denoise("fl2va"), server.before["fl2va"]), "scale 0 is not the base model"


def test_an_adapter_on_another_base_is_told_from_one_without_effect(
    weights: Weights, bf16: Served, turbo: Path, device: torch.device
) -> None:
    """The bounds above fail where the low-rank part is lost, as it was for people who tried it under FP8."""
    server = serve("fp8", CONFIG, weights, device, steps=STEPS, tasks=("fl2va",))
    bf16.adapter(turbo)
    wanted = minus(bf16.denoise("fl2va"), bf16.before["fl2va"])
    bf16.adapter(None)
    lost = minus(server.before["fl2va"], bf16.before["fl2va"])
    assert abs(cosine(lost[0], wanted[0])) < 0.5


def test_switching_between_adapters_leaves_nothing_behind(
    weights: Weights, turbo: Path, device: torch.device, tmp_path: Path
) -> None:
    server = serve("fp8" + FUSED, CONFIG, weights, device, tasks=("t2va",))
    peft = write_adapter(tmp_path, AdapterSpec("peft", CONFIG, seed=5))
    alone = {}
    for number, path in ((7, turbo), (8, peft)):
        server.adapter(path, number=number)
        alone[path] = server.denoise("t2va")
        server.adapter(None)
    assert not same(alone[turbo], alone[peft])
    for path, scale in ((peft, 1.0), (turbo, 1.0), (peft, 0.5), (turbo, 0.5), (peft, 1.0), (turbo, 1.0)):
        server.adapter(path, scale, 7 if path is turbo else 8)
        made = server.denoise("t2va")
        assert same(made, alone[path]) == (scale == 1.0)
    server.adapter(None)
    assert same(server.denoise("t2va"), server.before["t2va"])


@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_adapter_is_refused_and_the_next_clip_has_the_same_bits(
    broken: Break, weights: Weights, turbo: Path, device: torch.device, tmp_path: Path
) -> None:
    server = serve("fp8" + FUSED, CONFIG, weights, device, tasks=("t2va",))
    server.adapter(turbo)
    with_turbo = server.denoise("t2va")
    bad = write_adapter(tmp_path, AdapterSpec("turbo", CONFIG, broken=broken))
    with pytest.raises(OmniClientError, match=f"{bad.name}"):
        server.adapter(bad, number=9)
    server.adapter(None)
    assert same(server.denoise("t2va"), server.before["t2va"])
    server.adapter(turbo)
    assert same(server.denoise("t2va"), with_turbo)


def test_without_the_check_the_host_would_take_a_nan_and_fail_in_the_middle_of_a_clip(
    weights: Weights, device: torch.device, tmp_path: Path
) -> None:
    server = serve("fp8", CONFIG, weights, device, tasks=("t2va",))
    bad = write_adapter(tmp_path, AdapterSpec("turbo", CONFIG, broken="nan"))
    found = check_adapter(write_adapter(tmp_path / "good", AdapterSpec("turbo", CONFIG)), CONFIG)
    server.manager.pipeline.adapter_rules = SimpleNamespace(dit=CONFIG, check=lambda path: found)
    server.adapter(bad)
    with pytest.raises(ValueError, match="must be finite"):
        server.denoise("t2va")


@pytest.mark.parametrize("steps", [4, 8])
def test_every_turbo_file_of_the_family_is_served_on_both_hosts(
    steps: int, weights: Weights, device: torch.device, tmp_path: Path, host_pin: HostPin
) -> None:
    """0.28 knows the 4-step file alone, by name and alpha."""
    server = serve("bf16-table", CONFIG, weights, device, tasks=("t2va",))
    path = write_adapter(tmp_path, AdapterSpec("turbo", CONFIG, steps=steps, alpha=64.0))
    server.adapter(path)
    half = server.denoise("t2va")
    whole = write_adapter(tmp_path / "whole", AdapterSpec("turbo", CONFIG, steps=steps, alpha=128.0))
    server.adapter(whole, 0.5, number=8)
    assert same(server.denoise("t2va"), half), "alpha is not honoured"
    pipeline = server.manager.pipeline
    extra = 1 if host_pin.name == "ascend" else 0
    spec = () if host_pin.name == "ascend" else (pipeline._turbo_lora_specs[7],)
    asked = SimpleNamespace(
        num_inference_steps=steps + extra,
        extra_args={"flow_shift": 6.0},
        lora_request=SimpleNamespace(lora_int_id=7),
    )
    pipeline._validate_turbo_sampling(asked, *spec)
    for change in ({"num_inference_steps": steps + extra + 1}, {"extra_args": {}}, {"extra_args": {"flow_shift": 7}}):
        with pytest.raises(OmniClientError, match="turbo"):
            pipeline._validate_turbo_sampling(SimpleNamespace(**{**vars(asked), **change}), *spec)


def test_the_real_models_tables_are_the_hosts_constants(tmp_path: Path) -> None:
    real = DitConfig()
    for module, constants in ((host_turbo, turbo_constants(real)), (host_flashgen, flashgen_constants(real))):
        for name, value in constants.items():
            assert getattr(module, name) == value, name
    assert host_turbo._TURBO_RANK == 128 and host_flashgen._NATIVE_RANK == 64
    assert host_flashgen._NATIVE_HEADS_PER_GROUP == 1


@pytest.mark.only_host("nvidia", reason="0.28 knows one file name")
def test_a_turbo_name_says_to_us_what_it_says_to_the_host() -> None:
    for name in (turbo_file(8), turbo_file(4, "ref2v"), turbo_file(8, res_768p=False), "other.safetensors"):
        ours, theirs = parse_turbo_name(name), host_turbo.parse_turbo_filename(name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert set(ours.tasks) == set(theirs.supported_tasks)
            assert (ours.steps, ours.video_shift, ours.audio_shift) == (
                theirs.denoise_steps, theirs.video_shift, theirs.audio_shift
            )  # fmt: skip


def test_the_hosts_constants_are_back_after_a_load_and_a_lost_one_is_noticed(
    turbo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(vars(host_turbo)), dict(vars(host_flashgen))
    adapter = check_adapter(turbo, CONFIG)
    with pytest.raises(ZeroDivisionError), loaders_for(CONFIG, adapter):
        assert vars(host_turbo)["_TURBO_EXPECTED_RAW_TARGETS"] != before[0]["_TURBO_EXPECTED_RAW_TARGETS"]
        raise ZeroDivisionError
    assert (dict(vars(host_turbo)), dict(vars(host_flashgen))) == before
    monkeypatch.setattr(adapter_shapes, "flashgen_constants", lambda config: {"_NO_SUCH": 1})
    with pytest.raises(HostError, match="_NO_SUCH"), loaders_for(CONFIG, adapter):
        pass


def test_flashgen_is_served_beside_resident_adaln(weights: Weights, bf16: Served, tmp_path: Path) -> None:
    path = write_adapter(tmp_path, AdapterSpec("flashgen", CONFIG))
    bf16.adapter(path, number=11)
    assert not same(bf16.denoise("fl2va"), bf16.before["fl2va"])
    assert bf16.manager.pipeline._lora_sigma_schedules[11].num_inference_steps == 4
    layer = bf16.dit.get_submodule("blocks.1.attn.qkv_proj")
    x = torch.randn(5, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        added = (layer(x)[0] - layer.base_layer(x)[0]).double()
    factors = load_file(path)
    a, b = (factors[f"transformer.blocks.1.attn.qkv_proj.lora_{side}.default.weight"].double() for side in "AB")
    heads, width = CONFIG.num_attention_heads, CONFIG.attention_head_dim
    grouped = (x.double() @ a.T @ b.T).unflatten(1, (heads, 3, width))
    wanted = grouped.transpose(1, 2).flatten(1)  # the file has [q, k, v] by head, the host [all q, all k, all v]
    assert cosine(added, wanted) > 0.999
    bf16.adapter(None)
    assert same(bf16.denoise("fl2va"), bf16.before["fl2va"])
