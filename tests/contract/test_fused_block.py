# SPDX-License-Identifier: Apache-2.0
"""A step with the plugin's kernels is the host's step: same layers, same rounding, whatever stands between blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from vllm_omni.diffusion.models.minimax_h3.denoise_loop import MiniMaxH3DenoiseBranch as HostBranch

from tests.contract.dit_inputs import (
    TASKS,
    forward_inputs,
    host_dit,
    host_velocity,
    make_request,
    random_weights,
)
from vllm_h3_plugin.checkpoint.synthetic import tiny_dit
from vllm_h3_plugin.host.bench.step_models import RandomWeights, Request, build_plugin
from vllm_h3_plugin.host.denoise_branch import MiniMaxH3DenoiseBranch, known_timesteps
from vllm_h3_plugin.host.fused_block import FusedSiluAndMul, MiniMaxH3DiTBlock, fuse
from vllm_h3_plugin.host.step_kernels import choose_kernels
from vllm_h3_plugin.memory.requests import RequestSize

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = tiny_dit(layers=3, refiner_layers=1, hidden=128, heads=4, head_dim=32, ffn=256)


def backend_of(dit: Any) -> Any:
    return dit.blocks[0].mlp.fc1.quant_method.backend


@pytest.fixture(scope="module")
def dit(device: torch.device) -> Any:
    return host_dit(CONFIG, random_weights(CONFIG), device, "fp8-tensor")


@contextmanager
def fused(dit: Any) -> Iterator[Any]:
    """The DiT with the plugin's steps, and as it was afterwards."""
    activations = [block.mlp.act_fn for block in dit.blocks]
    assert fuse(dit, choose_kernels(torch.device("cpu"), backend_of(dit))) is None
    try:
        yield dit
    finally:
        for block, activation in zip(dit.blocks, activations, strict=True):
            block._kernels, block._next, block._begun, block.mlp.act_fn = None, (), None, activation


def equal(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("task", TASKS)
def test_a_fused_step_equals_the_hosts_bit_for_bit(dit: Any, device: torch.device, task: str) -> None:
    request = make_request(task, device)
    for timestep in (0.0, 0.25):
        inputs = forward_inputs(request, timestep, timestep / 2)
        want = host_velocity(dit, request, inputs)
        with fused(dit):
            assert equal(host_velocity(dit, request, inputs), want)
            assert equal(host_velocity(dit, request, inputs), want), "nothing is left of the last forward"


def test_blocks_are_fused_under_the_hosts_names(dit: Any) -> None:
    with fused(dit):
        block = dit.blocks[0]
        assert type(block).__name__ == "MiniMaxH3DiTBlock" and type(dit).__name__ == "MiniMaxH3DiTModel"
        assert isinstance(block, MiniMaxH3DiTBlock) and isinstance(block.mlp.act_fn, FusedSiluAndMul)
        assert [name for name, _ in block.named_children()] == ["norm1", "norm2", "attn", "mlp", "adaln_proj"]


@pytest.mark.parametrize("change", ["new tensor", "in place by a hook", "block left out", "other modulation"])
def test_what_a_cache_does_between_blocks_is_seen(dit: Any, device: torch.device, change: str) -> None:
    request = make_request("t2va", device)
    inputs = forward_inputs(request, 0.25, 0.5)

    def run() -> torch.Tensor:
        captured: dict[str, Any] = {}

        def keep(block: Any, args: Any, kwargs: Any) -> None:
            captured.setdefault("first", (args[0].clone(), kwargs))

        handle = dit.blocks[0].register_forward_pre_hook(keep, with_kwargs=True)
        with torch.inference_mode():
            dit(**inputs)
        handle.remove()
        x, kwargs = captured["first"]
        with torch.inference_mode():
            if change == "in place by a hook":
                hook = dit.blocks[0].register_forward_hook(lambda block, args, output: output.mul_(1.5))
                x = dit.blocks[1](dit.blocks[0](x, **kwargs), **kwargs)
                hook.remove()
                return dit.blocks[2](x, **kwargs)
            x = dit.blocks[0](x, **kwargs)
            if change == "new tensor":
                x = x * 1.5
            if change == "other modulation":
                kwargs = {**kwargs, "t_emb": kwargs["t_emb"] * 0.5}
            if change != "block left out":
                x = dit.blocks[1](x, **kwargs)
            return dit.blocks[2](x, **kwargs)

    want = run()
    with fused(dit):
        got = run()
        # What was begun for a block that was left out is not taken by a later forward.
        again = run()
        # Nor does it hold a request's rows while the clip is decoded.
        left = [block for block in dit.blocks if block._begun is not None]
        assert left == ([dit.blocks[1]] if change == "block left out" else [])
        dit.forget_request()
        assert all(block._begun is None for block in dit.blocks)
    assert torch.equal(got, want) and torch.equal(again, want)


def test_a_recipe_that_leaves_a_block_in_bf16_keeps_the_hosts_steps(device: torch.device) -> None:
    plain = host_dit(CONFIG, random_weights(CONFIG), device, "bf16")
    reason = fuse(plain, choose_kernels(torch.device("cpu"), backend_of(host_dit_with(device))))
    assert reason is not None and "blocks.0" in reason and "attn.qkv_proj" in reason and "not quantized" in reason
    assert all(block._kernels is None for block in plain.blocks)


def host_dit_with(device: torch.device) -> Any:
    return host_dit(CONFIG, random_weights(CONFIG), device, "fp8-tensor")


@pytest.mark.parametrize("task", TASKS)
def test_a_branch_tells_the_timesteps_that_the_host_asks_the_device_for(device: torch.device, task: str) -> None:
    request = make_request(task, device)
    branch = object.__new__(MiniMaxH3DenoiseBranch)
    branch.__dict__.update(request.branch.__dict__)
    for t_video, t_audio in ((0.0, 0.0), (0.1, 0.3), (0.9995, 0.5), (1.0, 1.0)):
        arguments = {
            "video_rows": request.noise[0],
            "audio_rows": request.noise[1],
            "t_video": t_video,
            "t_audio": t_audio,
            "imgvid_cond_timestep": max(t_video, 0.999),
            "audio_ref_cond_timestep": max(t_audio, 1.0),
        }
        want = HostBranch.forward_kwargs(request.branch, **arguments)
        got = branch.forward_kwargs(**arguments)
        assert got.keys() == want.keys()
        for name in ("x", "audio_x", "unique_timesteps", "inverse_indices"):
            assert torch.equal(got[name], want[name]) and got[name].dtype == want[name].dtype, name
        assert known_timesteps(got["unique_timesteps"]) == tuple(want["unique_timesteps"].tolist())


@pytest.mark.only_host("nvidia", reason="0.28 has no latent-mask edits")
def test_rows_with_timesteps_of_their_own_are_left_to_the_host(device: torch.device) -> None:
    request = make_request("t2va", device)
    branch = object.__new__(MiniMaxH3DenoiseBranch)
    branch.__dict__.update(request.branch.__dict__)
    targets = torch.linspace(0.1, 0.9, int(request.branch.update_mask.sum()))
    got = branch.forward_kwargs(
        video_rows=request.noise[0],
        audio_rows=request.noise[1],
        t_video=0.1,
        t_audio=0.2,
        imgvid_cond_timestep=0.999,
        audio_ref_cond_timestep=1.0,
        video_target_timesteps=targets,
        audio_target_timesteps=None,
    )
    assert len(got["unique_timesteps"]) > len(targets) and known_timesteps(got["unique_timesteps"]) is None


def test_what_a_request_fixes_is_computed_once_and_for_it_alone(dit: Any, device: torch.device) -> None:
    first, second = make_request("t2va", device, seed=1), make_request("t2va", device, seed=2)
    want = [host_velocity(fresh(dit), request, forward_inputs(request, 0.25, 0.5)) for request in (first, second)]
    calls: list[int] = []
    handle = dit.token_refiner.register_forward_hook(lambda *_: calls.append(1))
    try:
        for index in (0, 0, 1, 0, 0):
            request = (first, second)[index]
            assert equal(host_velocity(dit, request, forward_inputs(request, 0.25, 0.5)), want[index])
    finally:
        handle.remove()
    assert len(calls) == 3, "the prompt is refined when the request changes"
    fresh(dit)


def fresh(dit: Any) -> Any:
    dit.forget_request()
    return dit


def test_a_step_of_what_is_served_asks_no_tensor_for_its_values(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With FP8, tables and the plugin's attention, after the first step of a request. On a device each such question
    waits for it; tests/gpu holds that with torch's own check."""
    model = build_plugin(RandomWeights(CONFIG, device))
    request = Request(model, RequestSize(64, 64, 22, text_tokens=9), device)
    with torch.inference_mode():
        want = request.forward()

        def refuse(name: str) -> Any:
            def asked(*_: Any, **__: Any) -> Any:
                raise AssertionError(f"a step calls {name}()")

            return asked

        for name in ("item", "tolist", "cpu", "numpy", "unique", "nonzero", "__bool__", "__int__", "__index__"):
            monkeypatch.setattr(torch.Tensor, name, refuse(name))
        for name in ("unique", "nonzero"):
            monkeypatch.setattr(torch, name, refuse(name))
        again = request.branch.forward_kwargs(**request.step)
        got = model.dit(**again)
        monkeypatch.undo()
    assert equal(got, want)
