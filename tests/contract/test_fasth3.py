# SPDX-License-Identifier: Apache-2.0
"""A FastH3 adapter in the stream of weights, against sums made in the Diffusers layout, in which it is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.contract import test_load_faults as load_faults
from tests.contract.adapter_inputs import denoise_with, same, tables_of
from tests.contract.dit_inputs import Weights, diffusers_weights, host_dit, precision_plan, random_weights
from vllm_h3_plugin.checkpoint.adapter import check_adapter
from vllm_h3_plugin.checkpoint.adapter_layout import fasth3_role
from vllm_h3_plugin.checkpoint.synthetic import SynthSpec, tiny_dit, write_checkpoint
from vllm_h3_plugin.checkpoint.synthetic.adapters import AdapterSpec, write_adapter
from vllm_h3_plugin.errors import LoadError
from vllm_h3_plugin.host import loading
from vllm_h3_plugin.host.adaln import ADALN
from vllm_h3_plugin.host.fused_adapter import FusedAdapter
from vllm_h3_plugin.host.quant_config import H3QuantizationConfig
from vllm_h3_plugin.host.standalone import build_dit, finish_loading
from vllm_h3_plugin.quantization.contract import choose_backend
from vllm_h3_plugin.quantization.cutlass_fp8 import system_facts

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = tiny_dit(layers=2, refiner_layers=1, hidden=128, heads=4, head_dim=32, ffn=256)
STEPS = 4


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(CONFIG)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("fasth3"), AdapterSpec("fasth3", CONFIG))


@pytest.fixture(scope="module")
def fused(path: Path, device: torch.device) -> FusedAdapter:
    return FusedAdapter(check_adapter(path, CONFIG), CONFIG)


@pytest.fixture(scope="module")
def student(fused: FusedAdapter, weights: Weights) -> Weights:
    """The checkpoint with the adapter in it, in the native layout."""
    return {name: tensor.clone() for name, tensor in fused.stream(weights.items())}


def test_every_tensor_is_the_base_plus_what_the_file_says(path: Path, weights: Weights, student: Weights) -> None:
    base, made = diffusers_weights(CONFIG, weights), diffusers_weights(CONFIG, student)
    wanted = {name: tensor.float().clone() for name, tensor in base.items()}
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(path).items():
        split = fasth3_role(name)
        assert split is not None
        module, role = split
        if role in ("a", "b"):
            factors.setdefault(module, {})[role] = tensor.float()
        else:
            wanted[f"{module}.{'bias' if role == 'diff_b' else 'weight'}"] += tensor.float()
    for module, pair in factors.items():
        wanted[f"{module}.weight"] += pair["b"] @ pair["a"]
    changed = 0
    for name, tensor in made.items():
        assert tensor.dtype is base[name].dtype
        assert torch.allclose(tensor.float(), wanted[name], rtol=2**-7, atol=1e-5), name
        changed += not torch.equal(tensor, base[name])
    assert changed == len({name for name in wanted if not torch.equal(wanted[name], base[name].float())})
    assert changed == 45 and len(made) == 52, "the rest are norms that the file leaves alone"


def test_a_table_made_after_the_fusion_is_resident_adaln_to_the_bit(
    weights: Weights, student: Weights, device: torch.device
) -> None:
    resident = denoise_with(host_dit(CONFIG, student, device), None, "t2va", STEPS)
    dit = build_dit(CONFIG, None, device, tables=True)
    loading.load_dit(dit, student, config=CONFIG, diffusers=False)
    finish_loading(dit)
    assert same(denoise_with(dit, tables_of(dit, CONFIG, student, device), "t2va", STEPS), resident)
    # Made before it, from the base's AdaLN and embedder, it is another model's.
    dit.time_embedder.table = None
    assert not same(denoise_with(dit, tables_of(dit, CONFIG, weights, device), "t2va", STEPS), resident)


def test_what_is_quantized_is_the_sum(
    student: Weights, weights: Weights, fused: FusedAdapter, device: torch.device
) -> None:
    plan = precision_plan("fp8", CONFIG)
    quantization = H3QuantizationConfig(plan, choose_backend(None, system_facts(device))[0])
    made = []
    for source in (student, dict(fused.stream(weights.items()))):
        dit = build_dit(CONFIG, quantization, device, tables=True)
        loading.load_dit(dit, source, config=CONFIG, diffusers=False)
        made.append(dit.blocks[1].attn.qkv_proj)
    assert torch.equal(made[0].weight.view(torch.uint8), made[1].weight.view(torch.uint8))
    base = host_dit(CONFIG, weights, device, "fp8").blocks[1].attn.qkv_proj
    assert not torch.equal(made[0].weight_scale, base.weight_scale)


def test_a_stream_may_leave_out_what_a_table_holds_and_nothing_else(fused: FusedAdapter, weights: Weights) -> None:
    short = [(name, tensor) for name, tensor in weights.items() if ADALN not in name]
    with pytest.raises(LoadError, match=r"never came, first .*adaln_proj"):
        list(fused.stream(short))
    assert len(list(fused.stream(short, lambda name: ADALN in name))) == len(short)
    fused.close()
    again = dict(fused.stream(short, lambda name: ADALN in name))
    assert not torch.equal(again["blocks.0.mlp.fc2.weight"], weights["blocks.0.mlp.fc2.weight"])


def test_the_loader_fills_every_part_of_a_model_with_the_student(
    path: Path, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through ``WeightLoading``, as a server loads: resident parameters, and the table that is made on the way."""
    checkpoint = write_checkpoint(tmp_path / "h3", SynthSpec(dit=CONFIG)).partitions[0]
    subject, states = load_faults.Subject(checkpoint, tmp_path / "cache", device), {}
    states["base"] = subject.load("bf16")[1]
    make_session, adapter = load_faults.make_session, check_adapter(path, CONFIG)
    monkeypatch.setattr(load_faults, "make_session", lambda *args: replace(make_session(*args), fused=adapter))
    for recipe in ("bf16", "bf16-table", "fp8"):
        states[recipe] = subject.load(recipe)[1]
    wanted = dict(FusedAdapter(adapter, CONFIG).stream(grouped(strip(states["base"])).items()))
    for name, tensor in grouped(strip(states["bf16"])).items():
        assert name not in wanted or torch.equal(tensor, wanted[name]), name
    resident, tabled = strip(states["bf16"]), strip(states["bf16-table"])
    assert len(resident.keys() & tabled.keys()) > 40
    assert all(torch.equal(tabled[name], resident[name]) for name in resident.keys() & tabled.keys())
    dit = build_dit(CONFIG, None, device, tables=True)
    tables = tables_of(dit, CONFIG, strip(states["bf16"]), device)
    tables.activate(load_faults.DEFAULT)
    assert tables.active is not None
    for recipe in ("bf16-table", "fp8"):
        assert torch.equal(tables.active.values, states[recipe]["table of transformer"])
    again, state = subject.load("fp8")
    assert again.origin == "snapshot"
    assert all(torch.equal(_bytes(state[name]), _bytes(states["fp8"][name])) for name in state)


def strip(state: Weights) -> Weights:
    """The DiT's tensors by native name."""
    return {name.removeprefix("transformer."): t for name, t in state.items() if name.startswith("transformer.")}


def grouped(resident: Weights) -> Weights:
    """A loaded DiT's tensors with qkv rows by head again, as a checkpoint has them."""
    shape = (3, CONFIG.num_attention_heads, CONFIG.attention_head_dim)
    return {
        name: tensor.unflatten(0, shape).transpose(0, 1).flatten(0, 2) if "qkv_proj" in name else tensor
        for name, tensor in resident.items()
    }


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor
