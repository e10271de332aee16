# SPDX-License-Identifier: Apache-2.0
"""What INT8 costs over a forward and a denoise of the host's DiT, by the reference and by Ascend's operators emulated.

One linear with INT8 weights and activations is off by 1.1 % on Gaussian data, and a forward, with BF16's own rounding
in it, by 1.8 to 2.0 %: gates are about 0.5, so that the error of every block reaches the output (``random_weights``). A
cosine of 0.999 is the least; the ceiling of 2.5 %, a cosine of 0.9997, fails if a bit is lost (tested below).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from tests.contract.dit_inputs import (
    Latents,
    cosine,
    denoise,
    forward_inputs,
    host_velocity,
    make_request,
    precision_plan,
    random_weights,
    relative_error,
)
from tests.unit.quantization.npu_emulation import EmulatedNpu
from vllm_h3_plugin.checkpoint.synthetic import tiny_dit
from vllm_h3_plugin.errors import HostError, LoadError
from vllm_h3_plugin.host import loading, npu_text
from vllm_h3_plugin.host.quant_config import H3QuantizationConfig
from vllm_h3_plugin.host.standalone import build_dit, finish_loading
from vllm_h3_plugin.host.step_kernels import choose_kernels
from vllm_h3_plugin.quantization import int8
from vllm_h3_plugin.quantization.contract import QuantBackend
from vllm_h3_plugin.quantization.npu_int8 import NpuInt8
from vllm_h3_plugin.quantization.reference import Reference

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = tiny_dit(layers=3, refiner_layers=1, hidden=128, heads=4, head_dim=32, ffn=256)
WEIGHTS = random_weights(CONFIG)
FLOOR, CEILING, COSINE = 0.005, 0.025, 0.999


def dit_of(device: torch.device, backend: QuantBackend | None, *, fused: bool = False) -> torch.nn.Module:
    """The host's DiT in INT8 by a backend, or in BF16 without one."""
    from vllm_h3_plugin.host.fused_block import fuse

    given = precision_plan("int8" if backend else "bf16", CONFIG)
    dit = build_dit(CONFIG, H3QuantizationConfig(given, backend) if backend else None, device)
    loading.load_dit(dit, WEIGHTS, config=CONFIG, diffusers=False)
    finish_loading(dit)
    loading.check_precisions(dit, "transformer", given)
    if fused and backend is not None:
        assert fuse(dit, choose_kernels(device, backend)) is None
    return dit


class Subject:
    def __init__(self, device: torch.device) -> None:
        self.request = make_request("fl2va", device)
        self.inputs = forward_inputs(self.request, 0.4, 0.3)
        self.forward = cache(lambda backend: self.velocity(dit_of(device, backend)))
        self.device = device

    def velocity(self, dit: torch.nn.Module) -> Latents:
        return host_velocity(dit, self.request, self.inputs)


@pytest.fixture(scope="module")
def subject(device: torch.device) -> Subject:
    return Subject(device)


def close(got: Latents, want: Latents) -> bool:
    pairs = list(zip(got, want, strict=True))
    return all(cosine(*pair) > COSINE for pair in pairs) and max(relative_error(*pair) for pair in pairs) < CEILING


@pytest.mark.parametrize("backend", [Reference("int8"), NpuInt8(ops=EmulatedNpu())], ids=lambda backend: backend.name)
def test_a_forward_in_int8_is_close_to_bf16(
    backend: QuantBackend, subject: Subject, record_property: Callable[[str, object], None]
) -> None:
    want = subject.forward(None)
    got = subject.forward(backend)
    pairs = list(zip(got, want, strict=True))
    record_property(f"int8_dit_cosine_{backend.name}", min(cosine(*pair) for pair in pairs))
    assert close(got, want), [(relative_error(*pair), cosine(*pair)) for pair in pairs]
    assert min(relative_error(*pair) for pair in pairs) > FLOOR


def test_a_denoise_in_int8_is_close_to_bf16(subject: Subject, device: torch.device) -> None:
    latents = [denoise(dit_of(device, backend), subject.request, 4) for backend in (Reference("int8"), None)]
    assert close(*latents)


def test_a_bit_less_is_noticed(subject: Subject, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_rows = int8._quantize_rows

    def coarser(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (quantize_rows(values, scale) / 2).round().clamp(-63, 63).to(torch.int8) * 2

    monkeypatch.setattr(int8, "_quantize_rows", coarser)
    assert not close(subject.velocity(dit_of(device, Reference("int8"))), subject.forward(None))


def test_the_steps_that_end_in_int8_change_no_bit(subject: Subject, device: torch.device) -> None:
    """On Ascend the blocks run the host's kernels with the backend's quantization behind them."""
    ops = EmulatedNpu()
    fused = subject.velocity(dit_of(device, NpuInt8(ops=ops), fused=True))
    for got, want in zip(fused, subject.velocity(dit_of(device, NpuInt8(ops=EmulatedNpu()))), strict=True):
        assert torch.equal(got, want)
    assert ops.calls and all(call.nz for call in ops.calls)


def test_an_int8_layer_that_is_filled_only_in_part_is_named(device: torch.device) -> None:
    dit = build_dit(CONFIG, H3QuantizationConfig(precision_plan("int8", CONFIG), Reference("int8")), device)
    loader = dit.blocks[1].mlp.fc2.weight.weight_loader
    half = CONFIG.hidden_size // 2

    def forgets(param: torch.Tensor, loaded: torch.Tensor, *shard: object) -> None:
        before = param.data.clone()
        loader(param, loaded, *shard)
        param.data[half:] = before[half:]

    dit.blocks[1].mlp.fc2.weight._weight_loader = forgets
    with pytest.raises(LoadError, match=r"blocks\.1\.mlp\.fc2 is filled only in part"):
        loading.load_dit(dit, WEIGHTS, config=CONFIG, diffusers=False)


# The 0.28 host's MLP for NPU.


def patched(module: str, source: str, **names: object) -> object:
    """A function as if it came from ``module``."""
    space = {"__name__": module, "F": torch.nn.functional, **names}
    exec(source, space)
    return space["forward"]


RAW = "def forward(self, x):\n    return self.down_proj(npu_swiglu_from_packed(F.linear(x, self.gate_up_proj.weight)))"
BY_METHOD = "def forward(self, x):\n    return self.down_proj(npu_swiglu_from_packed(self.gate_up_proj(x)))"
NPU_MODULE = "vllm_omni.platforms.npu.models.minimax_h3"


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def try_with(forward: object, recipe: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, object]:
    mlp = npu_text.encoder.MiniMaxH3Qwen3VLTextMLP
    monkeypatch.setattr(mlp, "forward", forward)
    return npu_text.keep_quantized_text_mlp(precision_plan(recipe, CONFIG)), mlp.forward


def test_an_mlp_that_reads_raw_weights_is_replaced_where_the_text_encoder_is_quantized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = patched(NPU_MODULE, RAW, npu_swiglu_from_packed=swiglu)
    said, forward = try_with(raw, "int8-text", monkeypatch)
    assert "was replaced" in said and forward is not raw
    weight = {"gate_up": torch.randn(16, 4), "down": torch.randn(4, 8)}

    class Mlp:
        def gate_up_proj(self, x: torch.Tensor) -> torch.Tensor:
            return x @ weight["gate_up"].t()

        def down_proj(self, x: torch.Tensor) -> torch.Tensor:
            return x @ weight["down"].t()

    x = torch.randn(3, 4)
    want = swiglu(x @ weight["gate_up"].t()) @ weight["down"].t()
    assert torch.equal(forward(Mlp(), x), want)  # type: ignore[operator]


def test_the_mlp_of_a_plain_text_encoder_and_one_that_uses_its_layers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = patched(NPU_MODULE, RAW, npu_swiglu_from_packed=swiglu)
    assert try_with(raw, "int8", monkeypatch) == ("the text encoder is not quantized", raw)
    sound = patched(NPU_MODULE, BY_METHOD, npu_swiglu_from_packed=swiglu)
    assert try_with(sound, "int8-text", monkeypatch)[1] is sound


def test_an_unknown_mlp_that_reads_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for forward in (patched("some.plugin", RAW, npu_swiglu_from_packed=swiglu), patched(NPU_MODULE, RAW)):
        with pytest.raises(HostError, match="reads its layers' weights") as caught:
            try_with(forward, "int8-text", monkeypatch)
        assert "int8" in caught.value.fix


def test_the_hosts_own_mlp_stays(device: torch.device) -> None:
    assert "the host's own MLP" in npu_text.keep_quantized_text_mlp(precision_plan("int8-text", CONFIG))
