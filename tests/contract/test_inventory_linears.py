# SPDX-License-Identifier: Apache-2.0
"""The layout's names, shapes and dtypes are those of the modules that the host really builds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from vllm_h3_plugin.checkpoint.layout import (
    TensorSpec,
    dit_tensors,
    dit_tensors_diffusers,
    host_drops_text_tensor,
    linear_layers,
    text_encoder_tensors,
    to_diffusers,
)
from vllm_h3_plugin.checkpoint.synthetic import SynthSpec, tiny_dit, tiny_text, write_checkpoint

if TYPE_CHECKING:
    import torch

SPEC = SynthSpec(dit=tiny_dit(), text=tiny_text(layers=2))
DTYPES = {"BF16": "bfloat16", "F32": "float32"}
# In the files of a whole Qwen3-VL-32B, and without a place in H3.
DROPPED = (
    "lm_head.weight",
    "model.language_model.norm.weight",
    "model.language_model.layers.50.mlp.up_proj.weight",
    "model.language_model.layers.63.input_layernorm.weight",
)


def linears(root: Any, prefix: str) -> dict[str, dict[str, Any]]:
    import torch
    from vllm.model_executor.layers.linear import LinearBase

    found = {}
    for name, module in root.named_modules():
        bias = getattr(module, "bias", None) is not None
        if isinstance(module, LinearBase):
            sizes = [module.input_size, module.output_size]
            found[f"{prefix}.{name}"] = {"sizes": sizes, "bias": bias, "prefix": module.prefix}
        elif isinstance(module, torch.nn.Linear):
            sizes = [module.in_features, module.out_features]
            found[f"{prefix}.{name}"] = {"sizes": sizes, "bias": bias, "prefix": None}
    return found


def parameters(root: Any) -> dict[str, list[Any]]:
    tensors = {**dict(root.named_parameters()), **dict(root.named_buffers())}
    return {name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def built(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the host builds for a tiny checkpoint."""
    from vllm_omni.diffusion.models.minimax_h3.encoder import MiniMaxH3Qwen3VLEncoder
    from vllm_omni.diffusion.models.minimax_h3.fasth3 import _resolve_native_target

    from vllm_h3_plugin.host.standalone import build_dit

    partition = write_checkpoint(tmp_path_factory.mktemp("built") / "H3", SPEC).partitions[0]
    dit = build_dit(SPEC.dit, None, device)
    encoder = MiniMaxH3Qwen3VLEncoder(
        str(partition / "text_encoder"),
        device=device,
        load_model=True,
        encoder_group=SimpleNamespace(rank_in_group=0, world_size=1),
    )
    names = [*text_encoder_tensors(SPEC.text), *DROPPED]
    return {
        "linears": linears(dit, "transformer") | linears(encoder, "text_encoder"),
        "dit": parameters(dit),
        "encoder": parameters(encoder),
        "text_names": {name: encoder._map_weight_name(name) for name in names},
        "diffusers_names": {
            name: (_resolve_native_target(name.rpartition(".")[0]) or (None, None))[:2]
            for name in dit_tensors_diffusers(SPEC.dit)
        },
    }


def described(spec: TensorSpec) -> list[Any]:
    return [list(spec.shape), DTYPES[spec.dtype]]


def test_linear_layers_are_those_of_the_host(built) -> None:
    expected = {
        spec.path: [[spec.in_features, spec.out_features], spec.bias] for spec in linear_layers(SPEC.dit, SPEC.text)
    }
    assert {path: [item["sizes"], item["bias"]] for path, item in built["linears"].items()} == expected


def test_paths_are_the_prefixes_that_the_host_gives_its_quantization(built) -> None:
    """The DiT's prefixes carry no part name, the text encoder's do, and the vision tower is built unquantized."""
    for path, item in built["linears"].items():
        if path.startswith("text_encoder.vision."):
            assert item["prefix"] is None
        else:
            assert path.removeprefix("transformer.") == item["prefix"]


def test_dit_tensors_are_the_host_parameters(built) -> None:
    assert built["dit"] == {name: described(spec) for name, spec in dit_tensors(SPEC.dit).items()}


def test_text_encoder_tensors_fill_every_host_parameter(built) -> None:
    filled: dict[str, int] = {}
    for name, spec in text_encoder_tensors(SPEC.text).items():
        param, _ = built["text_names"][name]
        shape, dtype = built["encoder"][param]
        assert dtype == DTYPES[spec.dtype] and shape[1:] == list(spec.shape[1:])
        filled[param] = filled.get(param, 0) + spec.shape[0]
    assert filled == {name: shape[0] for name, (shape, _) in built["encoder"].items()}


def test_tensors_that_are_ignored_are_those_that_the_host_drops(built) -> None:
    for name, target in built["text_names"].items():
        assert host_drops_text_tensor(name) == (target is None), name


def back_to_native() -> dict[str, tuple[str, str]]:
    pieces = {"whole": "plain", "swapped": "swap_halves", "q": "q", "k": "k", "v": "v"}
    return {
        target.name: (name.rpartition(".")[0], pieces[target.piece])
        for name in dit_tensors(SPEC.dit)
        for target in to_diffusers(name)
    }


def test_diffusers_names_map_back_to_the_native_tensors_of_the_host(built) -> None:
    known = {name: target for name, target in built["diffusers_names"].items() if target != (None, None)}
    assert len(known) > 30
    assert known.items() <= back_to_native().items()


@pytest.mark.only_host("nvidia", reason="0.28.0 maps adapters, which leave the q, k and refiner norms out")
def test_the_host_knows_every_diffusers_name(built) -> None:
    assert built["diffusers_names"] == back_to_native()


def test_diffusers_tensors_are_those_of_the_diffusers_model() -> None:
    import torch
    from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel

    with torch.device("meta"):
        model = MiniMaxH3Transformer3DModel.from_config(SPEC.dit.to_diffusers())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes == {name: spec.shape for name, spec in dit_tensors_diffusers(SPEC.dit).items()}
