# SPDX-License-Identifier: Apache-2.0
"""Turbo adapters beside the plugin's layers: found by the host's names, added to the same base, gone without a trace.

The host's own manager and its own loader of Turbo files do the work, on a pipeline that has a DiT and nothing else. The
file is a synthetic one in the published layout.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_omni.diffusion.models.minimax_h3 import pipeline_minimax_h3 as host_pipeline
from vllm_omni.errors import OmniClientError
from vllm_omni.lora.request import LoRARequest

from tests.contract.adapter_inputs import FUSED, Served, same, serve
from tests.contract.dit_inputs import Weights, random_weights
from vllm_h3_plugin.checkpoint.adapter_layout import turbo_layers
from vllm_h3_plugin.checkpoint.synthetic import tiny_dit
from vllm_h3_plugin.checkpoint.synthetic.adapters import AdapterSpec, write_adapter
from vllm_h3_plugin.host.adapters import CheckedAdapters, refuse_adapter_of_adaln
from vllm_h3_plugin.host.bench.lora import BarePipeline

CONFIG = tiny_dit(layers=2, refiner_layers=1, hidden=128, heads=4, head_dim=32, ffn=256)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(CONFIG)


@pytest.fixture(scope="module")
def servers(weights: Weights, device: torch.device) -> dict[str, Served]:
    recipes = ("bf16", "bf16-table", "fp8", "fp8" + FUSED)
    return {recipe: serve(recipe, CONFIG, weights, device) for recipe in recipes}


@pytest.fixture(scope="module")
def turbo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Turbo file whose low-rank part is about half as large as the base's."""
    return write_adapter(tmp_path_factory.mktemp("turbo"), AdapterSpec("turbo", CONFIG, steps=4))


@pytest.mark.parametrize("task", ["t2va", "fl2va"])
def test_with_an_adapter_a_table_denoises_to_the_bits_of_resident_adaln(
    task: str, servers: dict[str, Served], turbo: Path
) -> None:
    results = []
    for recipe in ("bf16", "bf16-table"):
        servers[recipe].adapter(turbo)
        results.append(servers[recipe].denoise(task))
        assert not same(results[-1], servers[recipe].before[task]), "the adapter changes nothing"
    assert same(*results)


@pytest.mark.parametrize("task", ["t2va", "fl2va"])
def test_fused_steps_hand_the_low_rank_path_the_activation_before_quantization(
    task: str, servers: dict[str, Served], turbo: Path
) -> None:
    plain, fused = servers["fp8"], servers["fp8" + FUSED]
    assert same(fused.before[task], plain.before[task])
    for scale in (1.0, 0.5):
        plain.adapter(turbo, scale)
        fused.adapter(turbo, scale)
        result = fused.denoise(task)
        assert same(result, plain.denoise(task)) and not same(result, fused.before[task])
    fused.adapter(None)
    assert same(fused.denoise(task), fused.before[task])


@pytest.mark.parametrize("recipe", ["bf16", "bf16-table", "fp8", "fp8" + FUSED])
def test_without_the_adapter_the_bits_of_before_are_back(recipe: str, servers: dict[str, Served], turbo: Path) -> None:
    server = servers[recipe]
    for _ in range(2):
        server.adapter(turbo)
        assert not same(server.denoise("t2va"), server.before["t2va"])
        server.adapter(None)
        assert same(server.denoise("t2va"), server.before["t2va"])


@pytest.mark.parametrize("recipe", ["bf16-table", "fp8"])
def test_every_layer_that_the_adapter_names_is_found(recipe: str, servers: dict[str, Served], turbo: Path) -> None:
    servers[recipe].adapter(turbo)
    blocks = ("blocks.0", "blocks.1", "token_refiner.blocks.0")
    layers = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
    assert set(servers[recipe].manager._lora_modules) == {
        f"transformer.{b}.{layer}" for b in blocks for layer in layers
    }


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize(
    ("path", "targets", "swapped"),
    [
        ("blocks.1.attn.qkv_proj", ("attn.to_q", "attn.to_k", "attn.to_v"), False),
        ("blocks.1.attn.out_proj", ("attn.to_out.0",), False),
        ("blocks.1.mlp.fc1", ("ff.net.0.proj",), True),
        ("blocks.1.mlp.fc2", ("ff.net.2",), False),
    ],
)
def test_an_fp8_layer_with_an_adapter_is_the_fp8_base_plus_the_low_rank_part(
    path: str, targets: tuple[str, ...], swapped: bool, scale: float, servers: dict[str, Served], turbo: Path
) -> None:
    server = servers["fp8"]
    server.adapter(turbo, scale)
    layer = server.dit.get_submodule(path)
    x = torch.randn(9, layer.base_layer.input_size_per_partition, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        base = layer.base_layer.quant_method.apply(layer.base_layer, x)
        together = layer(x)[0]
    assert layer.base_layer.weight.dtype is torch.float8_e4m3fn
    factors = load_file(turbo)
    parts = []
    for target in targets:
        a, b = (factors[f"transformer_blocks.1.{target}.lora_{side}.default.weight"].double() for side in "AB")
        parts.append(x.double() @ a.T @ b.T * scale)
    low = torch.cat(parts, dim=1)
    if swapped:  # the file has [up, gate], the host [gate, up]
        low = torch.cat(low.chunk(2, dim=1)[::-1], dim=1)
    wanted = base.double() + low
    error = (together.double() - wanted).norm() / wanted.norm()
    assert low.norm() > 0.1 * base.double().norm()
    assert error < 2**-7


def test_the_fp8_denoise_changes_with_the_adapter_and_its_scale(servers: dict[str, Served], turbo: Path) -> None:
    server = servers["fp8"]
    server.adapter(turbo)
    full = server.denoise("t2va")
    server.adapter(turbo, 0.5)
    half = server.denoise("t2va")
    assert not same(full, half) and not same(half, server.before["t2va"])


def peft(folder: Path, modules: dict[str, tuple[int, int]]) -> Path:
    """A generic PEFT adapter in the native layout."""
    tensors = {}
    for name, (wide, high) in modules.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.full((8, wide), 0.1, dtype=torch.bfloat16)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.full((high, 8), 0.1, dtype=torch.bfloat16)
    targets = sorted({name.rsplit(".", 1)[-1] for name in modules})
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"r": 8, "lora_alpha": 8, "target_modules": targets, "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


FC2 = {"blocks.0.mlp.fc2": (256, CONFIG.hidden_size)}
BEHIND = {
    "adaln": {"blocks.0.adaln_proj.linear": (CONFIG.time_embed_dim, CONFIG.adaln_out_features)},
    "embedder": {"time_embedder.proj_out": (CONFIG.time_embed_hidden_size, CONFIG.time_embed_dim)},
}

WAY_OUT = {"adaln": '"adaln": "resident"', "embedder": "leaves the timestep embedder alone"}


@pytest.mark.parametrize("kind", BEHIND)
@pytest.mark.parametrize("recipe", ["bf16-table", "fp8"])
def test_an_adapter_of_what_the_table_holds_is_refused_with_the_way_out(
    recipe: str, kind: str, servers: dict[str, Served], turbo: Path, tmp_path: Path
) -> None:
    server, path = servers[recipe], peft(tmp_path / "adapter", {**FC2, **BEHIND[kind]})
    server.adapter(None)
    name, way_out = next(iter(BEHIND[kind])), WAY_OUT[kind]
    with pytest.raises(OmniClientError, match=rf"adapter .*{path.name}.*{name}.*{way_out}"):
        server.manager.set_active_adapter(LoRARequest(lora_name="a", lora_int_id=9, lora_path=str(path)))
    assert server.manager.list_adapters() in ([], [7])
    assert same(server.denoise("t2va"), server.before["t2va"])


def test_with_resident_adaln_the_same_adapter_takes_effect(
    weights: Weights, device: torch.device, tmp_path: Path
) -> None:
    server = serve("bf16", CONFIG, weights, device)
    server.adapter(peft(tmp_path / "adapter", BEHIND["adaln"]))
    assert not same(server.denoise("t2va"), server.before["t2va"])


def test_left_to_itself_the_host_would_say_nothing_of_the_embedder(
    weights: Weights, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve("bf16-table", CONFIG, weights, device)
    monkeypatch.setattr(BarePipeline, "_has_tables", lambda self: False)
    server.manager.pipeline.adapter_rules = None
    server.adapter(peft(tmp_path / "adapter", BEHIND["embedder"]))
    assert list(server.manager._lora_modules) == ["transformer.time_embedder.proj_out"]
    assert same(server.denoise("t2va"), server.before["t2va"])


def test_an_adapter_in_a_file_of_another_kind_is_refused_when_it_is_bound(servers: dict[str, Served]) -> None:
    pipeline = servers["fp8"].manager.pipeline
    with pytest.raises(OmniClientError, match=r'changes blocks\.0\.adaln_proj\.linear.*"adaln": "resident"'):
        pipeline._validate_diffusion_lora_binding(
            lora_model=SimpleNamespace(id=3, loras={"blocks.0.adaln_proj.linear": None}),
            bound_lora_names=frozenset(),
        )


@pytest.mark.parametrize(
    "name",
    [
        "transformer.blocks.3.adaln_proj.linear.lora_A.default.weight",  # FlashGen
        "transformer_blocks.3.adaln_proj.linear.lora_B.weight",  # FastH3
        "norm_out.linear.diff",
        "base_model.model.final_layer.adaln_proj.linear.lora_A.weight",
    ],
)
def test_names_of_every_known_layout_are_recognised(name: str) -> None:
    with pytest.raises(OmniClientError, match=r'x\.safetensors changes.*"adaln": "resident"'):
        refuse_adapter_of_adaln("x.safetensors", ["blocks.0.attn.out_proj.lora_A.weight", name])


@pytest.mark.parametrize("name", ["time_embedder.linear_1.lora_A.weight", "transformer.time_embedder.proj_in"])
def test_an_adapter_of_the_embedder_is_not_sent_to_resident_adaln(name: str) -> None:
    with pytest.raises(OmniClientError, match=r"x\.safetensors changes .*leaves the timestep embedder alone") as caught:
        refuse_adapter_of_adaln("x.safetensors", [name])
    assert "resident" not in str(caught.value)


def test_turbos_names_are_no_table_matter(turbo: Path) -> None:
    refuse_adapter_of_adaln(turbo, [f"{name}.lora_A.default.weight" for name in turbo_layers(CONFIG)])


def test_the_served_pipeline_refuses_them() -> None:
    from vllm_h3_plugin.host.pipeline import MiniMaxH3Pipeline

    order = MiniMaxH3Pipeline.__mro__
    assert order.index(CheckedAdapters) < order.index(host_pipeline.MiniMaxH3Pipeline)
