# SPDX-License-Identifier: Apache-2.0
"""The five contracts of loading H3 quantized hold, and each notices when its fault is put back.

A contract that passes on a broken loader is worth nothing, so every fault that people met is made here on purpose.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vllm_h3_plugin.checkpoint import dit_placement, loader
from vllm_h3_plugin.errors import H3Error, LoadError
from vllm_h3_plugin.host import contracts, linear_method, loading, quant_config, quantizer
from vllm_h3_plugin.quantization import fp8
from vllm_h3_plugin.quantization.precision import Precision


def test_qkv_layout(device: torch.device) -> None:
    assert "in place" in contracts.qkv_layout(device)


def test_loader_contract(device: torch.device) -> None:
    assert "each once" in contracts.loader_contract(device)


def test_fc1_layout(device: torch.device) -> None:
    contracts.fc1_layout(device)


def test_fp8_quantizer(device: torch.device) -> None:
    assert "E4M3 per channel" in contracts.fp8_quantizer(device)


def test_adaln_bf16(device: torch.device) -> None:
    assert "unchanged" in contracts.adaln_bf16(device)


def _fails(contract: Callable[[torch.device], str], device: torch.device) -> str:
    with pytest.raises(H3Error) as caught:
        contract(device)
    return str(caught.value)


def test_qkv_layout_notices_rows_that_were_not_reordered(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dit_placement, "ungroup_qkv", lambda weight, **_: weight)
    assert "not where the host's attention reads it" in _fails(contracts.qkv_layout, device)


def test_qkv_layout_notices_rows_that_were_reordered_twice(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = loader.ungroup_qkv
    monkeypatch.setattr(dit_placement, "ungroup_qkv", lambda weight, **how: once(once(weight, **how), **how))
    assert "not where the host's attention reads it" in _fails(contracts.qkv_layout, device)


def test_fc1_layout_notices_gate_and_up_exchanged(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dit_placement, "first_half", loader.second_half)
    monkeypatch.setattr(dit_placement, "second_half", loader.first_half)
    assert "gate and up are exchanged" in _fails(contracts.fc1_layout, device)


def test_loader_contract_notices_a_two_argument_loader_where_three_come(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM-Omni 0.26 wrapped weight loaders in a closure of two arguments; fc1 passes a shard id as the third."""
    build = contracts.build_dit

    def with_short_loader(*args: object) -> torch.nn.Module:
        dit = build(*args)  # type: ignore[arg-type]
        parameter = dit.blocks[0].mlp.fc1.weight
        inner = parameter.weight_loader
        parameter.weight_loader = lambda param, tensor: inner(param, tensor)
        return dit

    monkeypatch.setattr(contracts, "build_dit", with_short_loader)
    message = _fails(contracts.loader_contract, device)
    assert "blocks.0.mlp.fc1.weight[0]" in message and "does not take 3 arguments" in message


def test_loader_contract_notices_a_layer_that_waits_for_more(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host would finalize such a layer in silence, rows unfilled."""
    call = loader.call_weight_loader

    def drop_one_up(target: loader.Placement, param: torch.Tensor, tensor: torch.Tensor) -> None:
        if (target.param, target.shard) != ("blocks.1.mlp.fc1.weight", 1):
            call(target, param, tensor)

    monkeypatch.setattr(quantizer, "call_weight_loader", drop_one_up)
    message = _fails(contracts.loader_contract, device)
    assert "transformer.blocks.1.mlp.fc1 is filled only in part" in message


def test_fp8_quantizer_notices_one_scale_per_tensor(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fp8.quantize_weight

    def per_tensor(weight: torch.Tensor, precision: Precision, **how: object) -> tuple[torch.Tensor, torch.Tensor]:
        return real(weight, Precision.FP8_TENSOR, path="")

    monkeypatch.setattr("vllm_h3_plugin.quantization.reference.fp8.quantize_weight", per_tensor, raising=True)
    assert "with 1 scales" in _fails(contracts.fp8_quantizer, device)


def _method_with(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[str], Precision | None]) -> None:
    """Make the quantization config build some layers in a wrong precision."""
    right = quant_config.H3QuantizationConfig.get_quant_method

    def get(self: quant_config.H3QuantizationConfig, layer: torch.nn.Module, prefix: str) -> object:
        precision = wrong(prefix)
        if precision is None or self.backend is None:
            return right(self, layer, prefix)
        return linear_method.QuantizedLinearMethod(self.backend, precision, prefix)

    monkeypatch.setattr(quant_config.H3QuantizationConfig, "get_quant_method", get)


def test_adaln_bf16_notices_adaln_in_fp8(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the stock host's ``--quantization fp8`` does."""
    _method_with(monkeypatch, lambda prefix: Precision.FP8_TENSOR if "adaln" in prefix else None)
    message = _fails(contracts.adaln_bf16, device)
    assert "adaln_proj.linear is resident as torch.float8_e4m3fn" in message and "bf16" in message


def test_adaln_bf16_notices_a_quantized_fp32_layer(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host hard-codes no quantization for the six FP32 layers; a host that stops doing so must be noticed."""
    build = contracts.build_dit

    def with_quantized_head(config: object, quantization: object, where: torch.device) -> torch.nn.Module:
        dit = build(config, quantization, where)  # type: ignore[arg-type]
        dit.video_patch_proj.weight.data = dit.video_patch_proj.weight.data.to(torch.bfloat16)
        return dit

    monkeypatch.setattr(contracts, "build_dit", with_quantized_head)
    message = _fails(contracts.adaln_bf16, device)
    assert "transformer.video_patch_proj is resident as torch.bfloat16" in message


def test_a_default_method_that_quantizes_everything_is_noticed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _method_with(monkeypatch, lambda prefix: Precision.FP8_CHANNEL if "condition_proj" not in prefix else None)
    with pytest.raises(LoadError, match="adaln_proj"):
        subject = contracts.load_subject("fp8", device)
        loading.check_precisions(subject.dit, "transformer", subject.plan)
