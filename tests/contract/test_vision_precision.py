# SPDX-License-Identifier: Apache-2.0
"""The vision tower in FP32: the same weights, the pixel values as they were made, and nothing else in FP32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_h3_plugin.checkpoint.read_only import ReadOnlyTensor, read_only
from vllm_h3_plugin.checkpoint.synthetic import SynthSpec, tiny_dit, write_checkpoint
from vllm_h3_plugin.quantization.precision import Precision

GRID = torch.tensor([[1, 8, 12]])
PATCH = 3 * 2 * 16 * 16


@pytest.fixture(scope="module", autouse=True)
def _threads(one_thread: None) -> None:
    """Small tensors."""


@pytest.fixture(scope="module")
def folder(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("vision") / "H3", SynthSpec(dit=tiny_dit(layers=1))).partitions[0]


@pytest.fixture
def encoder(folder: Path, device: torch.device) -> Iterator[Any]:
    """The host's text encoder with weights, as it is in the pipeline."""
    from vllm_omni.diffusion.models.minimax_h3.encoder import MiniMaxH3Qwen3VLEncoder

    from vllm_h3_plugin.checkpoint.inventory import take_inventory
    from vllm_h3_plugin.checkpoint.reader import WeightSource
    from vllm_h3_plugin.host.adaln import finish_loading
    from vllm_h3_plugin.host.bench.pipeline import omni_world
    from vllm_h3_plugin.host.loading import shapes_of, text_encoder_loader

    with omni_world():
        from vllm_omni.diffusion.distributed.parallel_state import get_world_group

        made = MiniMaxH3Qwen3VLEncoder(
            str(folder / "text_encoder"), device=device, load_model=True, encoder_group=get_world_group()
        )
        part = take_inventory(folder, None).partitions[0].part("text_encoder")
        text_encoder_loader(made, shapes_of(part)).from_checkpoint(WeightSource(part))
        finish_loading(made)
        yield made


def plan(precision: Precision) -> Any:
    return SimpleNamespace(vision=precision)


def pixels() -> torch.Tensor:
    """As the image processor makes them: bytes, scaled to [-1, 1]."""
    values = torch.randint(0, 256, (96, PATCH), generator=torch.Generator().manual_seed(0))
    return (values.to(torch.float32) / 255 - 0.5) / 0.5


def seen(encoder: Any) -> Any:
    """What the text decoder is given of a picture: merged features and DeepStack's."""
    taken: dict[str, Any] = {}

    def text_model(inputs: torch.Tensor, positions: Any, **named: Any) -> Any:
        taken.update(inputs=inputs, deepstack=named["deepstack_visual_embeds"])
        return inputs

    ids = torch.tensor([1, *[encoder.image_token_id] * 24, 2])
    text_model.embed_tokens = encoder.text_model.embed_tokens  # type: ignore[attr-defined]
    del encoder._modules["text_model"]
    encoder.text_model = text_model
    encoder.vision.to(torch.device("cpu"))
    encoder.encode_ids(ids, pixel_values=pixels(), image_grid_thw=GRID)
    return taken


def reference(encoder: Any) -> torch.Tensor:
    """The tower in FP64."""
    tower = encoder.vision.double()
    try:
        features, _ = tower(pixels().double(), GRID)
    finally:
        tower.to(torch.bfloat16)
    return features


def test_bf16_is_left_as_the_host_has_it(encoder: Any) -> None:
    from vllm_h3_plugin.host.vision import widen_vision

    before = dict(vars(encoder))
    widen_vision(encoder, plan(Precision.BF16))
    assert {parameter.dtype for parameter in encoder.vision.parameters()} == {torch.bfloat16}
    assert vars(encoder) == before
    widen_vision(torch.nn.Module(), plan(Precision.FP32))  # a rank without a text encoder


def test_fp32_has_the_same_weights_and_is_nearer_to_the_truth(encoder: Any) -> None:
    from vllm_h3_plugin.host.vision import widen_vision

    weights = {name: value.clone() for name, value in encoder.vision.named_parameters()}
    truth = reference(encoder)
    stock = encoder.vision(pixels().to(torch.bfloat16), GRID)[0]
    widen_vision(encoder, plan(Precision.FP32))
    for name, value in encoder.vision.named_parameters():
        assert value.dtype is torch.float32 and value.equal(weights[name].float()), name
    wide = encoder.vision(pixels(), GRID)[0]
    errors = [float((found.double() - truth).norm().detach() / truth.norm().detach()) for found in (stock, wide)]
    assert wide.dtype is torch.float32 and errors[1] < 1e-5 < 1e-3 < errors[0]


def test_the_tower_gets_pixel_values_that_were_never_bf16(encoder: Any) -> None:
    from vllm_h3_plugin.host.vision import widen_vision

    widen_vision(encoder, plan(Precision.FP32))
    given: list[torch.Tensor] = []
    encoder.vision.patch_embed.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    taken = seen(encoder)
    assert given[0].dtype is torch.float32 and given[0].equal(pixels())
    assert taken["inputs"].dtype is torch.bfloat16, "the text decoder goes on in BF16"


def test_pixel_values_that_the_host_sent_between_ranks_are_taken_as_they_came(encoder: Any) -> None:
    from vllm_h3_plugin.host.vision import widen_vision

    widen_vision(encoder, plan(Precision.FP32))
    assert encoder.vision(pixels().to(torch.bfloat16), GRID)[0].dtype is torch.float32


def test_tf32_is_off_in_the_tower_and_as_it_was_afterwards(encoder: Any) -> None:
    from vllm_h3_plugin.host.vision import widen_vision

    widen_vision(encoder, plan(Precision.FP32))
    cudnn, inside = torch.backends.cudnn, []
    before = cudnn.allow_tf32
    cudnn.allow_tf32 = True
    try:
        encoder.vision.merger.register_forward_pre_hook(lambda module, args: inside.append(cudnn.allow_tf32))
        encoder.vision(pixels(), GRID)
        assert inside == [False] and cudnn.allow_tf32 is True
    finally:
        cudnn.allow_tf32 = before


def test_weights_that_all_ranks_share_are_not_written(encoder: Any) -> None:
    from vllm_h3_plugin.host.vision import widen_vision

    norm = encoder.vision.merger.norm
    shared = read_only(norm.weight.detach().clone())
    norm.weight = torch.nn.Parameter(shared, requires_grad=False)
    assert isinstance(norm.weight.data, ReadOnlyTensor) or isinstance(norm.weight, ReadOnlyTensor)
    widen_vision(encoder, plan(Precision.FP32))
    assert not isinstance(norm.weight, ReadOnlyTensor) and norm.weight.dtype is torch.float32
