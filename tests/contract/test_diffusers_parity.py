# SPDX-License-Identifier: Apache-2.0
"""The host's DiT, filled by the plugin's loader, computes what Diffusers' own H3 transformer computes.

The two share no code: Diffusers' model (0.40) has its own modules, splits q, k and v, keeps ``[up, gate]`` and knows no
pad rows. Both get the same weights and inputs, for each task, with two to four distinct timesteps.

* In FP32 both round every operation to 24 bits. They do the same operations, and all that may differ is the order in
  which a GEMM sums: the host's q, k and v are one GEMM, Diffusers' are three. Where this was measured (x86-64) they
  agree to the bit. The tolerance of 1e-5 leaves room for BLAS libraries that choose another order: each of some fifty
  sums on the way may then differ by a few times 2^-24 = 6e-8.
* In BF16, as served, both round to 8 bits about twelve times in a block (twice each: norm, modulation, residual; once:
  qkv, q/k norm, RoPE, attention, SiLU·up, fc2), each time by 2^-9/sqrt(3) = 0.11 % on average. Independent roundings
  add up in squares: sqrt(12) * 0.11 % = 0.4 % of a block's output, and somewhat more after three blocks and the
  refiner. Measured: 0.8 %, the same for both. 1.5 % fails if the roundings become three times as many. Sharper: the
  host is not further from the FP32 result than Diffusers in BF16 is, by more than a tenth.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.contract.dit_inputs import (
    TASKS,
    Latents,
    Request,
    Weights,
    diffusers_dit,
    diffusers_velocity,
    forward_inputs,
    host_dit,
    host_in_fp32,
    host_velocity,
    make_request,
    random_weights,
    relative_error,
)
from vllm_h3_plugin.checkpoint import dit_placement, loader
from vllm_h3_plugin.checkpoint.synthetic import tiny_dit

CONFIG = tiny_dit(layers=3, refiner_layers=2, hidden=128, heads=4, head_dim=32, ffn=256)
T_VIDEO, T_AUDIO = 0.3, 0.6
pytestmark = pytest.mark.usefixtures("one_thread")

FP32_TOLERANCE = 1e-5
BF16_TOLERANCE = 0.015
# What any of the faults below costs at least; a network that computes something else entirely is near sqrt(2).
FAULT = 0.2


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(CONFIG)


@pytest.fixture(scope="module", params=TASKS)
def request_of_task(request: pytest.FixtureRequest, device: torch.device) -> Request:
    return make_request(request.param, device)


@pytest.fixture(scope="module")
def oracle(weights: Weights) -> torch.nn.Module:
    """Diffusers' model in FP32."""
    return diffusers_dit(CONFIG, weights, fp32=True)


def _errors(got: Latents, want: Latents) -> tuple[float, float]:
    return relative_error(got[0], want[0]), relative_error(got[1], want[1])


def test_requests_hold_what_their_task_needs(request_of_task: Request) -> None:
    """Or the comparisons below would prove less than they say."""
    branch = request_of_task.branch
    timesteps = forward_inputs(request_of_task, T_VIDEO, T_AUDIO)["unique_timesteps"]
    conditions = sum(anchor is not None for anchor in (request_of_task.video_anchor, request_of_task.audio_anchor))
    assert branch.used_len < branch.seq_len
    assert len(timesteps) == 2 + conditions


def test_velocities_agree_in_fp32(
    weights: Weights, oracle: torch.nn.Module, request_of_task: Request, device: torch.device
) -> None:
    inputs = forward_inputs(request_of_task, T_VIDEO, T_AUDIO)
    want = diffusers_velocity(oracle, request_of_task, inputs)
    with host_in_fp32(host_dit(CONFIG, weights, device)) as dit:
        got = host_velocity(dit, request_of_task, inputs)
    assert got[0].dtype == want[0].dtype == torch.float32
    assert max(_errors(got, want)) < FP32_TOLERANCE


def test_bf16_as_served_is_as_close_to_fp32_as_diffusers_is(
    weights: Weights, oracle: torch.nn.Module, request_of_task: Request, device: torch.device
) -> None:
    inputs = forward_inputs(request_of_task, T_VIDEO, T_AUDIO)
    want = diffusers_velocity(oracle, request_of_task, inputs)
    ours = _errors(host_velocity(host_dit(CONFIG, weights, device), request_of_task, inputs), want)
    mixed = diffusers_dit(CONFIG, weights, fp32=False)
    theirs = _errors(diffusers_velocity(mixed, request_of_task, inputs), want)
    for our_error, their_error in zip(ours, theirs, strict=True):
        assert 1e-4 < our_error < BF16_TOLERANCE
        assert our_error < 1.1 * their_error


def _exchange_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dit_placement, "first_half", loader.second_half)
    monkeypatch.setattr(dit_placement, "second_half", loader.first_half)


def _leave_qkv_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dit_placement, "ungroup_qkv", lambda weight, **_: weight)


def _ungroup_qkv_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    once = loader.ungroup_qkv
    monkeypatch.setattr(dit_placement, "ungroup_qkv", lambda weight, **how: once(once(weight, **how), **how))


@pytest.mark.parametrize("put_back", [_exchange_halves, _leave_qkv_grouped, _ungroup_qkv_twice])
def test_a_fault_of_the_loader_is_noticed(
    put_back: Callable[[pytest.MonkeyPatch], None],
    weights: Weights,
    oracle: torch.nn.Module,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = make_request("t2va", device)
    inputs = forward_inputs(request, T_VIDEO, T_AUDIO)
    want = diffusers_velocity(oracle, request, inputs)
    put_back(monkeypatch)
    errors = _errors(host_velocity(host_dit(CONFIG, weights, device), request, inputs), want)
    assert min(errors) > FAULT > BF16_TOLERANCE


@pytest.mark.parametrize(("t_video", "t_audio"), [(T_AUDIO, T_VIDEO), (T_VIDEO, T_VIDEO)], ids=["exchanged", "shared"])
def test_a_timestep_in_the_wrong_place_is_noticed(
    t_video: float, t_audio: float, weights: Weights, oracle: torch.nn.Module, device: torch.device
) -> None:
    """Video and audio have timesteps of their own, and the output shows which row got which."""
    request = make_request("t2va", device)
    want = diffusers_velocity(oracle, request, forward_inputs(request, T_VIDEO, T_AUDIO))
    with host_in_fp32(host_dit(CONFIG, weights, device)) as dit:
        got = host_velocity(dit, request, forward_inputs(request, t_video, t_audio))
    assert max(_errors(got, want)) > 100 * FP32_TOLERANCE
