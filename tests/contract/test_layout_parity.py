# SPDX-License-Identifier: Apache-2.0
"""A DiT is the same to the bit whichever layout its checkpoint has, and whoever loads it: the plugin or the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.contract.dit_inputs import Weights, diffusers_weights, host_dit, precision_plan, random_weights
from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.checkpoint.layout import DitConfig
from vllm_h3_plugin.checkpoint.loader import tensors_of
from vllm_h3_plugin.checkpoint.reader import WeightSource
from vllm_h3_plugin.checkpoint.synthetic import SynthSpec, tiny_dit, tiny_text, write_checkpoint
from vllm_h3_plugin.host.standalone import build_dit
from vllm_h3_plugin.quantization import fp8

CONFIG = tiny_dit(layers=2, refiner_layers=1, hidden=64, heads=4, head_dim=16, ffn=128)
RECIPES = ("bf16", "fp8", "fp8-tensor")


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(CONFIG)


def differences(one: torch.nn.Module, other: torch.nn.Module) -> list[str]:
    """Names of parameters and persistent buffers that are not equal to the bit, dtype and shape included."""
    ours, theirs = tensors_of(one), tensors_of(other)
    found = sorted(ours.keys() ^ theirs.keys())
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        if a.dtype != b.dtype or not torch.equal(a.float(), b.float()):
            found.append(name)
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_native_and_diffusers_layouts_load_to_equal_parameters(
    recipe: str, weights: Weights, device: torch.device
) -> None:
    native = host_dit(CONFIG, weights, device, recipe)
    diffusers = host_dit(CONFIG, diffusers_weights(CONFIG, weights), device, recipe, diffusers=True)
    assert differences(native, diffusers) == []
    scales = {name for name in tensors_of(native) if name.endswith("weight_scale")}
    assert bool(scales) == (recipe != "bf16")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("transformer_blocks.1.attn.to_q.weight", "transformer_blocks.1.attn.to_k.weight"),
        ("transformer_blocks.0.norm1.weight", "transformer_blocks.0.norm2.weight"),
    ],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_exchanged_tensors_are_noticed(
    recipe: str, one: str, other: str, weights: Weights, device: torch.device
) -> None:
    wrong = diffusers_weights(CONFIG, weights)
    wrong[one], wrong[other] = wrong[other], wrong[one]
    native = host_dit(CONFIG, weights, device, recipe)
    assert differences(native, host_dit(CONFIG, wrong, device, recipe, diffusers=True)) != []


def _load_by_the_host(weights: Weights, recipe: str, device: torch.device, *, diffusers: bool) -> torch.nn.Module:
    """The host's own ``load_weights`` in BF16; then every weight that the recipe quantizes is quantized as a whole."""
    dit = build_dit(CONFIG, None, device)
    if diffusers:
        dit._diffusers_weights = True  # type: ignore[assignment]
    dit.load_weights(weights.items())  # type: ignore[operator]
    precisions = precision_plan(recipe, CONFIG)
    for path in precisions.quantized:
        name = path.removeprefix("transformer.")
        if path.startswith("transformer."):
            layer = dit.get_submodule(name)
            q, scale = fp8.quantize_weight(layer.weight.data, precisions[path].precision, path=path)
            layer.weight = torch.nn.Parameter(q.t(), requires_grad=False)
            layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    return dit


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plugin_loads_the_native_layout_as_the_host_does(
    recipe: str, weights: Weights, device: torch.device
) -> None:
    theirs = _load_by_the_host(weights, recipe, device, diffusers=False)
    assert differences(host_dit(CONFIG, weights, device, recipe), theirs) == []


@pytest.mark.only_host("nvidia", reason="0.28 reads no DiT in the Diffusers layout")
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plugin_loads_the_diffusers_layout_as_the_host_does(
    recipe: str, weights: Weights, device: torch.device
) -> None:
    split = diffusers_weights(CONFIG, weights)
    theirs = _load_by_the_host(split, recipe, device, diffusers=True)
    assert differences(host_dit(CONFIG, split, device, recipe, diffusers=True), theirs) == []


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One seed, written in both layouts, each in several shards."""
    root = tmp_path_factory.mktemp("layouts")
    text = tiny_text()
    return {
        layout: write_checkpoint(
            root / layout,
            SynthSpec(layout=layout, dit=CONFIG, text=text, outliers=True, shard_bytes=1_000_000, seed=7),  # type: ignore[arg-type]
        ).partitions[0]
        for layout in ("native", "diffusers")
    }


def _read(folder: Path) -> tuple[DitConfig, str, Weights]:
    partition = take_inventory(folder).require_clean().partitions[0]
    part = partition.part("transformer")
    assert partition.dit is not None and part.layout is not None
    return partition.dit, part.layout, dict(WeightSource(part))


@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpoints_of_one_seed_load_to_equal_parameters(
    recipe: str, written: dict[str, Path], device: torch.device
) -> None:
    """``rope.inv_freq`` included: stored in one layout, computed for the other, equal to the bit on x86-64.

    Whoever wrote a native checkpoint elsewhere may have used a ``pow`` that ends one unit in the last place away; that
    is what the checkpoint says then, and is loaded as it is.
    """
    loaded = []
    for layout, folder in written.items():
        config, found, tensors = _read(folder)
        assert found == layout and config == CONFIG
        loaded.append(host_dit(config, tensors, device, recipe, diffusers=layout == "diffusers"))
    assert [name for name in differences(*loaded) if name != "rope.inv_freq"] == []
    stored, computed = (dit.rope.inv_freq.view(torch.int32) for dit in loaded)  # type: ignore[union-attr]
    assert (stored - computed).abs().max() <= 1
