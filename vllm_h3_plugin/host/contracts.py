# SPDX-License-Identifier: Apache-2.0
"""The five contracts of loading H3 quantized, each checked on a small real host model.

Each of them was broken once by a host or a patch, and none showed as an error: the clip was just noise. They run in the
test suite on both hosts and, by ``vllm-h3 doctor``, inside an image before it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vllm_h3_plugin.checkpoint.layout import DitConfig, TextEncoderConfig, dit_tensors, linear_layers
from vllm_h3_plugin.checkpoint.loader import LoadReport
from vllm_h3_plugin.checkpoint.synthetic.spec import tiny_dit, tiny_text
from vllm_h3_plugin.conditioning.schedule import Roles, schedule
from vllm_h3_plugin.errors import H3Error, one_line
from vllm_h3_plugin.host import loading
from vllm_h3_plugin.host.adaln import ADALN, LayerProjections
from vllm_h3_plugin.host.quant_config import H3QuantizationConfig
from vllm_h3_plugin.host.standalone import build_dit, finish_loading, single_rank
from vllm_h3_plugin.quantization.contract import choose_backend
from vllm_h3_plugin.quantization.cutlass_fp8 import system_facts
from vllm_h3_plugin.quantization.plan import PrecisionPlan, plan
from vllm_h3_plugin.quantization.precision import Precision
from vllm_h3_plugin.quantization.recipe import load_recipe

_DTYPE = {"F32": torch.float32, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Outcome:
    """Result of one contract."""

    name: str
    ok: bool
    detail: str


@dataclass
class Subject:
    """A small DiT, loaded under a recipe, with the tensors that it was loaded from."""

    config: DitConfig
    plan: PrecisionPlan
    source: dict[str, torch.Tensor]
    dit: torch.nn.Module
    report: LoadReport

    @property
    def block(self) -> torch.nn.Module:
        """The first transformer block."""
        return self.dit.blocks[0]  # type: ignore[index,return-value]


def random_tensors(config: DitConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights of every tensor of a DiT in the native layout, ``N(0, 1/K)``, in the checkpoint's dtypes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, spec in dit_tensors(config).items():
        values = torch.randn(spec.shape, generator=generator, dtype=torch.float32) / max(1, spec.shape[-1]) ** 0.5
        tensors[name] = values.to(_DTYPE[spec.dtype])
    return tensors


def quantizing_recipe(device: torch.device) -> str:
    """The recipe that the contracts are checked with: the default one of the device's kind."""
    return "int8" if device.type == "npu" else "fp8"


def load_subject(recipe_name: str, device: torch.device, config: DitConfig | None = None) -> Subject:
    """Build and load a small DiT under a packaged recipe, through the plugin's loader. Needs ``single_rank``."""
    config = config or tiny_dit(hidden=128, heads=4, head_dim=32, ffn=256)
    text: TextEncoderConfig = tiny_text()
    precision_plan = plan(load_recipe(recipe_name), linear_layers(config, text))
    quantization = None
    if precision_plan.quantized:
        backend, _ = choose_backend(None, system_facts(device), precision_plan.recipe.method or "fp8")
        quantization = H3QuantizationConfig(precision_plan, backend)
    source = random_tensors(config)
    dit = build_dit(config, quantization, device)
    report = loading.load_dit(dit, source, config=config, diffusers=False)
    finish_loading(dit)
    return Subject(config, precision_plan, source, dit, report)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ContractError(what)


class ContractError(H3Error):
    """A contract does not hold."""


def qkv_layout(device: torch.device) -> str:
    """Rows grouped per head ``[q, k, v]`` become ``[q, k, v]`` exactly once."""
    subject = load_subject("bf16", device)
    heads, width = subject.config.num_attention_heads, subject.config.attention_head_dim
    grouped = subject.source["blocks.0.attn.qkv_proj.weight"].to(device)
    loaded = subject.block.attn.qkv_proj.weight  # type: ignore[union-attr]
    for part, third in enumerate(("q", "k", "v")):
        for head in range(heads):
            want = grouped[(3 * head + part) * width : (3 * head + part + 1) * width]
            got = loaded[(part * heads + head) * width : (part * heads + head + 1) * width]
            _require(torch.equal(want, got), f"{third} of head {head} is not where the host's attention reads it")
    return f"{3 * heads} slices of {width} rows in place"


def loader_contract(device: torch.device) -> str:
    """Every parameter is filled once, through weight loaders of two arguments and of three, and none in part."""
    subject = load_subject(quantizing_recipe(device), device)
    filled = {name for name, _ in subject.dit.named_parameters()} | {"rope.inv_freq"}
    scales = {name for name in filled if name.endswith(".weight_scale")}
    _require(subject.report.params == filled - scales, f"unfilled: {sorted(filled - scales - subject.report.params)}")
    _require(subject.report.tensors == len(subject.source), "a tensor of the checkpoint was not used")
    short = dict(list(subject.source.items())[1:])
    dit = build_dit(subject.config, None, device)
    try:
        loading.load_dit(dit, short, config=subject.config, diffusers=False)
    except H3Error as exc:
        _require(next(iter(subject.source)) in str(exc), "the error for a missing tensor does not name it")
    else:
        raise ContractError("a checkpoint without one tensor was loaded")
    return f"{len(subject.report.params)} parameters, each once"


def fc1_layout(device: torch.device) -> str:
    """fc1 is ``[gate, up]`` and the MLP computes ``fc2(silu(gate x) * up x)``."""
    subject = load_subject("bf16", device)
    mlp = subject.block.mlp
    x = torch.randn(5, subject.config.hidden_size, dtype=torch.bfloat16, device=device)
    gate, up = subject.source["blocks.0.mlp.fc1.weight"].to(device).chunk(2)
    down = subject.source["blocks.0.mlp.fc2.weight"].to(device)
    want = (torch.nn.functional.silu(x.float() @ gate.float().T) * (x.float() @ up.float().T)) @ down.float().T
    got = mlp(x)  # type: ignore[operator]
    error = ((got.float() - want).norm() / want.norm()).item()
    # BF16 rounds three times on the way (2^-9 each); swapped halves give an error near 1.
    _require(error < 0.02, f"relative error {error:.3f}: gate and up are exchanged or misplaced")
    return f"relative error {error:.4f}"


def fp8_quantizer(device: torch.device) -> str:
    """Quantized layers hold one scale per output channel and compute what the arithmetic says; on Ascend in INT8."""
    subject = load_subject(quantizing_recipe(device), device)
    counts = loading.check_precisions(subject.dit, "transformer", subject.plan)
    layer = subject.block.mlp.fc2  # type: ignore[union-attr]
    weight = subject.source["blocks.0.mlp.fc2.weight"].to(device).float()
    _require(layer.weight_scale.numel() == weight.shape[0], "not one scale per output channel")
    method = subject.plan.recipe.method
    largest = 127 if method == "int8" else 448
    want_scale = weight.abs().amax(dim=1) / largest
    _require(
        torch.allclose(layer.weight_scale.flatten(), want_scale, rtol=1e-6), f"scales are not max|row| / {largest}"
    )
    x = torch.randn(7, weight.shape[1], dtype=torch.bfloat16, device=device)
    error = ((layer(x)[0].float() - x.float() @ weight.T).norm() / (x.float() @ weight.T).norm()).item()
    # What weights and activations of each kind cost on Gaussian data (docs/PRECISION.md).
    word, kind, expected = ("int8", "INT8", 0.011) if method == "int8" else ("fp8_channel", "E4M3", 0.0375)
    _require(expected / 4 < error < expected * 1.6, f"relative error of one linear {error:.4f}, expected {expected}")
    return f"{counts.get(word, 0)} layers {kind} per channel, relative error {error:.4f}"


def adaln_bf16(device: torch.device) -> str:
    """Under the quantizing recipe AdaLN stays BF16, the six FP32 layers stay FP32, and a table is AdaLN to the bit."""
    subject = load_subject(quantizing_recipe(device), device)
    loading.check_precisions(subject.dit, "transformer", subject.plan)
    kept = 0
    for name, parameter in _unquantized(subject):
        _require(parameter.dtype is subject.source[name].dtype, f"{name} became {parameter.dtype}")
        _require(torch.equal(parameter, subject.source[name].to(device)), f"{name} changed its values")
        kept += 1
    rows = _table_is_adaln(subject, device)
    return f"{kept} AdaLN and FP32 tensors unchanged, {rows} table rows equal"


def _table_is_adaln(subject: Subject, device: torch.device) -> int:
    """Hold a table, built for a DiT without AdaLN weights, against the projections of one that has them."""
    dit: Any = build_dit(subject.config, None, device, tables=True)
    loading.load_dit(dit, subject.source, config=subject.config, diffusers=False)
    finish_loading(dit)
    steps = schedule((1.0, 0.6, 0.0), (1.0, 0.3, 0.0), Roles(image=True))
    embedder = {name: tensor for name, tensor in subject.source.items() if name.startswith("time_embedder.")}
    layers = LayerProjections(dit, steps, embedder)
    for name, tensor in subject.source.items():
        if ADALN in name:
            layers.add(name, tensor)
    dit.time_embedder.table = layers.finish()
    whole: Any = subject.dit
    with torch.inference_mode():
        for group in steps.groups:
            timesteps = torch.tensor(group, dtype=torch.float32, device=device)
            rows, embedding = dit.time_embedder(timesteps), whole.time_embedder(timesteps)
            for got, want in zip((*dit.blocks, dit.final_layer), (*whole.blocks, whole.final_layer), strict=True):
                pairs = zip(got.adaln_proj(rows), want.adaln_proj(embedding), strict=True)
                _require(all(torch.equal(a, b) for a, b in pairs), f"the AdaLN table differs at timesteps {group}")
    return steps.rows


def _unquantized(subject: Subject) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in subject.dit.named_parameters():
        precision = subject.plan.assignments.get(f"transformer.{name.rpartition('.')[0]}")
        if ".adaln_proj." in name or (precision is not None and precision.precision is Precision.FP32):
            yield name, parameter


CONTRACTS: tuple[Callable[[torch.device], str], ...] = (
    qkv_layout,
    loader_contract,
    fc1_layout,
    fp8_quantizer,
    adaln_bf16,
)


def run_contracts() -> list[Outcome]:
    """Check all five on this machine's device."""
    outcomes = []
    with single_rank() as device:
        for contract in CONTRACTS:
            try:
                outcomes.append(Outcome(contract.__name__, True, contract(device)))
            except H3Error as exc:
                outcomes.append(Outcome(contract.__name__, False, str(exc)))
            except Exception as exc:  # noqa: BLE001 - an operator that a device lacks raises what it likes
                outcomes.append(Outcome(contract.__name__, False, one_line(exc)))
    return outcomes
