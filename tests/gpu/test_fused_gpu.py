# SPDX-License-Identifier: Apache-2.0
"""On a CUDA device: fused kernels against the host's own and plain torch, and a whole step that asks nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.contract.dit_inputs import cosine, forward_inputs, host_velocity, make_request, precision_plan
from vllm_h3_plugin.attention.qk_norm_rope import qk_norm_rope_
from vllm_h3_plugin.attention.rotary import qk_norm_rope
from vllm_h3_plugin.checkpoint.synthetic.spec import tiny_dit
from vllm_h3_plugin.host import contracts, loading
from vllm_h3_plugin.host.bench.step_models import RandomWeights, Request, build_plugin
from vllm_h3_plugin.host.denoise_branch import MiniMaxH3DenoiseBranch
from vllm_h3_plugin.host.fused_block import fuse
from vllm_h3_plugin.host.quant_config import H3QuantizationConfig
from vllm_h3_plugin.host.register import register
from vllm_h3_plugin.host.standalone import build_dit, finish_loading, single_rank
from vllm_h3_plugin.host.step_kernels import StepKernels, choose_kernels, composed
from vllm_h3_plugin.memory.requests import RequestSize
from vllm_h3_plugin.quantization import fused
from vllm_h3_plugin.quantization.activation import QuantizedActivation
from vllm_h3_plugin.quantization.cutlass_fp8 import CutlassFp8
from vllm_h3_plugin.quantization.fused_probe import disagreement

HIDDEN, FFN, INNER, EPS = 5376, 14336, 7168, 1e-5
TIES = 5e-6
"""Share of values that may differ by one rounding step: sums are taken in another order (seen: 1e-6)."""

CONFIG = tiny_dit(layers=3, refiner_layers=1, hidden=HIDDEN, heads=56, head_dim=128, ffn=FFN)


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    register()
    with single_rank() as device:
        yield device


@pytest.fixture(scope="module")
def kernels(device: torch.device) -> StepKernels:
    return choose_kernels(device, CutlassFp8())


def normal(*shape: int, seed: int = 0, factor: float = 1.0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32) * factor).bfloat16()


def arguments(rows: int, factor: float = 1.0) -> dict[str, tuple[Any, ...]]:
    shift, scale, gate = normal(9, 6 * HIDDEN, seed=1).chunk(6, dim=-1)[:3]
    index = torch.randint(0, 9, (rows,), device="cuda")
    x, branch, weight = (
        normal(rows, HIDDEN, seed=2, factor=factor),
        normal(rows, HIDDEN, seed=3),
        normal(HIDDEN, seed=4),
    )
    modulation = (weight, shift, scale, index, EPS)
    return {
        "norm_modulate": (x, *modulation),
        "gate_norm_modulate": (x, gate, branch, *modulation),
        "silu_mul": (normal(rows, 2 * FFN, seed=5, factor=factor),),
        "quantize": (normal(rows, INNER, seed=6, factor=factor),),
    }


def run(kernels: fused.FusedKernels, name: str, given: tuple[Any, ...]) -> tuple[torch.Tensor, QuantizedActivation]:
    result = getattr(kernels, name)(*given, keep=True)
    return result if isinstance(result, tuple) else (result.values.float(), result)


def differing(got: QuantizedActivation, want: QuantizedActivation) -> float:
    return (got.values.view(torch.uint8) != want.values.view(torch.uint8)).float().mean().item()


def test_every_kernel_compiles_and_is_right_on_this_device(kernels: StepKernels) -> None:
    assert [probe.name for probe in kernels.probes if not probe.ok] == []
    assert set(kernels.fused.source.values()) == {"Triton"} and kernels.rotates_in_place


@pytest.mark.parametrize("rows", [1, 63, 1001, 6016])
@pytest.mark.parametrize("name", fused.KERNELS)
def test_bytes_are_those_of_the_hosts_kernels_and_quantization(kernels: StepKernels, name: str, rows: int) -> None:
    given = arguments(rows)[name]
    residual, got = run(kernels.fused, name, given)
    expected, want = run(composed(CutlassFp8()), name, given)
    assert disagreement(got, want) is None
    if name in ("silu_mul", "quantize"):
        assert differing(got, want) <= TIES and torch.equal(got.scale, want.scale)
    else:
        assert differing(got, want) <= max(TIES, 2 / got.values.numel()) or rows < 100
    assert name != "gate_norm_modulate" or (residual != expected).float().mean() <= TIES


@pytest.mark.parametrize("factor", [1e-6, 1e-2, 1e3])
@pytest.mark.parametrize("name", fused.KERNELS)
def test_magnitudes_are_those_of_plain_torch(kernels: StepKernels, name: str, factor: float) -> None:
    given = arguments(257, factor)[name]
    assert disagreement(run(kernels.fused, name, given)[1], run(fused.TWINS, name, given)[1]) is None


def test_a_token_of_zeros_and_the_edges_of_the_format(kernels: StepKernels) -> None:
    x = normal(8, INNER)
    x[1] = 0
    x[2] = 448.0
    x[3] = -448.0
    x[4, 7] = 3e38
    got, want = kernels.fused.quantize(x), fused.TWINS.quantize(x)
    assert torch.equal(got.scale, want.scale)
    assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
    assert got.values.float().abs().max() == 448


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", fused.KERNELS)
def test_what_is_not_finite_spoils_its_own_row_and_shows(kernels: StepKernels, name: str, bad: float) -> None:
    given = arguments(16)[name]
    clean = run(kernels.fused, name, given)[1]
    given[0][5, 11] = bad
    spoiled = run(kernels.fused, name, given)[1]
    product = spoiled.values[5].float() * spoiled.scale[5]
    assert not torch.isfinite(product).all(), "it must not look like a number"
    others = torch.arange(16, device="cuda") != 5
    assert torch.equal(spoiled.values.view(torch.uint8)[others], clean.values.view(torch.uint8)[others])


@pytest.mark.parametrize("rows", [1, 77, 6016])
def test_queries_and_keys_are_those_of_the_hosts_kernel(device: torch.device, rows: int) -> None:
    from vllm_omni.diffusion.layers.fused_qk_norm_rope import fused_qk_norm_rope

    qkv, rope = normal(rows, 3 * INNER), normal(rows, 96, seed=1)
    weights = normal(128, seed=2), normal(128, seed=3)
    q, k, v = (part.reshape(rows, 56, 128).clone() for part in qkv.chunk(3, dim=-1))
    host = fused_qk_norm_rope(q, k, *weights, rope, EPS)
    qk_norm_rope_(qkv, *weights, rope, EPS, heads=56)
    got = [part.reshape(rows, 56, 128) for part in qkv.chunk(3, dim=-1)]
    assert torch.equal(got[2], v)
    for mine, theirs, source, weight in zip(got, host, (q, k), weights, strict=False):
        assert (mine != theirs).float().mean() < 1e-4
        twin = qk_norm_rope(source, weight, rope, EPS)
        assert ((mine.float() - twin.float()).norm() / twin.float().norm()) < 1e-3


def build(device: torch.device, recipe: str, *, stock: bool = False) -> Any:
    precisions = precision_plan(recipe, CONFIG)
    quantization = H3QuantizationConfig(precisions, CutlassFp8()) if precisions.quantized else None
    dit = build_dit(CONFIG, quantization, device, stock=stock)
    loading.load_dit(dit, contracts.random_tensors(CONFIG), config=CONFIG, diffusers=False)
    finish_loading(dit)
    return dit


@pytest.fixture(scope="module")
def plugin(device: torch.device, kernels: StepKernels) -> Any:
    dit = build(device, "fp8-tensor")
    assert fuse(dit, kernels) is None
    return dit


def test_a_whole_step_in_fp8_is_near_the_stock_hosts_in_bf16(plugin: Any, device: torch.device) -> None:
    stock = build(device, "bf16", stock=True)
    for task in ("t2va", "ref2va"):
        request = make_request(task, device)
        inputs = forward_inputs(request, 0.25, 0.5)
        for got, want in zip(
            host_velocity(plugin, request, inputs), host_velocity(stock, request, inputs), strict=True
        ):
            assert cosine(got, want) > 0.998


def test_a_step_asks_the_device_nothing_and_leaves_nothing(plugin: Any, device: torch.device) -> None:
    request = make_request("t2va", device)
    branch = object.__new__(MiniMaxH3DenoiseBranch)
    branch.__dict__.update(request.branch.__dict__)

    def step(timestep: float) -> None:
        inputs = branch.forward_kwargs(
            video_rows=request.noise[0],
            audio_rows=request.noise[1],
            t_video=timestep,
            t_audio=timestep,
            imgvid_cond_timestep=0.999,
            audio_ref_cond_timestep=1.0,
        )
        with torch.inference_mode():
            plugin(**inputs)

    step(0.0)
    step(0.1)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(2, 8):
            step(number / 10)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == held
    plugin.forget_request()
    assert torch.cuda.memory_allocated() <= held


def test_a_step_of_what_is_served_asks_the_device_nothing(device: torch.device) -> None:
    """As above with AdaLN in a table and the plugin's attention, and with the inputs of the step."""
    model = build_plugin(RandomWeights(CONFIG, device))
    request = Request(model, RequestSize(256, 256, 22, text_tokens=60), device)

    def step() -> None:
        model.dit(**request.branch.forward_kwargs(**request.step))

    with torch.inference_mode():
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(6):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == held
