# SPDX-License-Identifier: Apache-2.0
"""The five contracts and the CUTLASS backend on a real CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vllm_h3_plugin.checkpoint.layout import linear_layers
from vllm_h3_plugin.checkpoint.synthetic.spec import tiny_dit, tiny_text
from vllm_h3_plugin.host import contracts, loading
from vllm_h3_plugin.host.quant_config import H3QuantizationConfig
from vllm_h3_plugin.host.register import register
from vllm_h3_plugin.host.standalone import build_dit, finish_loading, single_rank
from vllm_h3_plugin.quantization.contract import choose_backend
from vllm_h3_plugin.quantization.cutlass_fp8 import system_facts
from vllm_h3_plugin.quantization.plan import plan
from vllm_h3_plugin.quantization.recipe import load_recipe


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    register()
    with single_rank() as device:
        yield device


@pytest.mark.parametrize("contract", contracts.CONTRACTS, ids=lambda contract: contract.__name__)
def test_contract_holds_on_the_device(device: torch.device, contract: object) -> None:
    assert device.type == "cuda"
    print(contract(device))  # type: ignore[operator]


def test_the_device_computes_with_cutlass_and_not_with_a_stand_in(device: torch.device) -> None:
    backend, reason = choose_backend(None, system_facts(device))
    assert backend.name == "cutlass_fp8", reason


@pytest.mark.parametrize("layer", ["fc1", "fc2"])
def test_linears_of_the_real_width_agree_with_the_reference_backend(device: torch.device, layer: str) -> None:
    """CUTLASS and plain torch multiply the same FP8 bytes; only how the sums are taken and rounded differs.

    One linear at a time: a second one would quantize the first one's last-bit differences anew.
    """
    config = tiny_dit(layers=1, hidden=5376, heads=56, head_dim=128, ffn=14336)
    precisions = plan(load_recipe("fp8"), linear_layers(config, tiny_text()))
    source = contracts.random_tensors(config)
    outputs = []
    for name in ("cutlass_fp8", "reference"):
        backend, _ = choose_backend(name, system_facts(device))
        dit = build_dit(config, H3QuantizationConfig(precisions, backend), device)
        loading.load_dit(dit, source, config=config, diffusers=False)
        finish_loading(dit)
        linear = getattr(dit.blocks[0].mlp, layer)
        generator = torch.Generator(device=device).manual_seed(7)
        x = torch.randn(257, linear.input_size, dtype=torch.bfloat16, device=device, generator=generator)
        outputs.append(linear(x)[0].float())
        del dit, linear
    cutlass, reference = outputs
    # Hopper's FP8 tensor cores sum with fewer bits than FP32 (seen: 0.0037), and both round to BF16 once.
    assert ((cutlass - reference).norm() / reference.norm()).item() < 0.005
