# SPDX-License-Identifier: Apache-2.0
"""Fused steps: their twins, the probe that judges them, and the kernels themselves under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from vllm_h3_plugin.quantization import fp8, fused
from vllm_h3_plugin.quantization.activation import QuantizedActivation
from vllm_h3_plugin.quantization.fused_probe import disagreement, probe
from vllm_h3_plugin.quantization.precision import Precision
from vllm_h3_plugin.quantization.reference import Reference

ROWS, WIDTH, EPS = 7, 160, 1e-5


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def modulation() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shift, scale and gate as AdaLN hands them out: columns of one tensor."""
    return normal(6, 3 * WIDTH, seed=1).chunk(3, dim=-1)  # type: ignore[return-value]


INDEX = torch.tensor([0, 5, 2, 2, 1, 4, 3])
WEIGHT = 1 + normal(WIDTH, seed=2) / 4


def same(got: QuantizedActivation, values: torch.Tensor, scale: torch.Tensor) -> bool:
    return torch.equal(got.values.view(torch.uint8), values.view(torch.uint8)) and torch.equal(got.scale, scale)


def test_each_step_is_the_quantization_of_what_separate_kernels_make() -> None:
    shift, scale, gate = modulation()
    x, branch, wide = normal(ROWS, WIDTH, seed=3), normal(ROWS, WIDTH, seed=4), normal(ROWS, 2 * WIDTH, seed=5)
    given = (WEIGHT, shift, scale, INDEX, EPS)
    plain = fused.norm_modulate(x, *given)
    assert same(fused.TWINS.norm_modulate(x, *given), *fp8.quantize_activation(plain))
    updated, plain = fused.gate_norm_modulate(x, gate, branch, *given)
    residual, got = fused.TWINS.gate_norm_modulate(x, gate, branch, *given, keep=True)
    assert torch.equal(residual, updated) and same(got, *fp8.quantize_activation(plain))
    assert got.original is not None and torch.equal(got.original, plain)
    assert same(fused.TWINS.silu_mul(wide), *fp8.quantize_activation(fused.silu_mul(wide)))
    assert same(fused.TWINS.quantize(x), *fp8.quantize_activation(x))


def test_modulation_is_taken_by_each_rows_index() -> None:
    shift, scale, _ = modulation()
    x = normal(ROWS, WIDTH, seed=3)
    together = fused.norm_modulate(x, WEIGHT, shift, scale, INDEX, EPS)
    for row in range(ROWS):
        alone = fused.norm_modulate(x[row : row + 1], WEIGHT, shift, scale, INDEX[row : row + 1], EPS)
        assert torch.equal(alone[0], together[row])


def test_the_norm_is_the_one_that_torch_has() -> None:
    shift, scale = torch.zeros(1, WIDTH).bfloat16(), torch.zeros(1, WIDTH).bfloat16()
    x = normal(ROWS, WIDTH, seed=3)
    got = fused.norm_modulate(x, WEIGHT, shift, scale, torch.zeros(ROWS, dtype=torch.long), EPS)
    want = torch.nn.functional.rms_norm(x.float(), (WIDTH,), WEIGHT.float(), EPS)
    assert (got.float() - want).abs().max() <= want.abs().max() * 2**-8


def test_a_multiplication_of_quantized_tokens_is_the_backends_own() -> None:
    backend = Reference()
    weight, x, bias = normal(48, WIDTH, seed=6), normal(ROWS, WIDTH, seed=3), normal(48, seed=7)
    packed = backend.pack(*backend.quantize_weight(weight, Precision.FP8_CHANNEL, path="w"))
    quantized = QuantizedActivation(*backend.quantize_tokens(x))
    assert torch.equal(backend.matmul(quantized, packed, bias), backend.apply(x, packed, bias))


def test_an_activation_that_was_not_kept_is_not_made_up() -> None:
    activation = fused.TWINS.quantize(normal(ROWS, WIDTH))
    with pytest.raises(AssertionError, match="not kept"):
        activation.reshape(-1, WIDTH)
    kept = fused.TWINS.quantize(normal(ROWS, WIDTH), keep=True)
    assert torch.equal(kept.reshape(-1, WIDTH), normal(ROWS, WIDTH))


def test_a_kernel_that_does_not_compile_is_not_used_and_says_why() -> None:
    def broken() -> str | None:
        raise RuntimeError("PassManager::run failed\nand more")

    result = probe("silu_mul", broken)
    assert not result.ok and "RuntimeError: PassManager::run failed" in result.reason
    assert "and more" not in result.reason and "host's kernels stand in" in result.reason


def test_a_kernel_that_is_wrong_is_not_used_and_says_how() -> None:
    x = normal(64, WIDTH)
    want = fused.TWINS.quantize(x)
    far, many = want.values.view(torch.uint8).clone(), want.values.view(torch.uint8).clone()
    far[3, 5] ^= 0x40
    many[:, ::2] ^= 1
    assert "1 of 10240 values differ by more" in str(disagreement(activation(far, want.scale), want))
    assert "50.0% of values differ" in str(disagreement(activation(many, want.scale), want))
    assert "64 of 64 scales" in str(disagreement(QuantizedActivation(want.values, want.scale * 2), want))
    assert "64 of 64 scales" in str(disagreement(QuantizedActivation(want.values, want.scale * torch.nan), want))
    result = probe("quantize", lambda: disagreement(activation(far, want.scale), want))
    assert not result.ok and "values differ by more than a rounding step" in result.reason


def test_a_kernel_that_differs_in_a_tie_is_used() -> None:
    x = normal(64, WIDTH)
    want = fused.TWINS.quantize(x)
    tie = want.values.view(torch.uint8).clone()
    tie[3, 5] ^= 1
    result = probe("quantize", lambda: disagreement(activation(tie, want.scale), want))
    assert result.ok and "equal to its twin" in result.reason


def activation(values: torch.Tensor, scale: torch.Tensor) -> QuantizedActivation:
    return QuantizedActivation(values.view(fp8.E4M3), scale)


INTERPRETED = """
import torch
from vllm_h3_plugin.attention.qk_norm_rope import qk_norm_rope_
from vllm_h3_plugin.attention.rotary import qk_norm_rope
from vllm_h3_plugin.quantization import fused
from vllm_h3_plugin.quantization.fused_triton import TRITON

torch.manual_seed(0)

def near(got, want, name):
    # The interpreter truncates to BF16 and E4M3 where devices round: E4M3 then loses up to an eighth of a value.
    a, b = got.values.float() * got.scale, want.values.float() * want.scale
    error = ((a - b).norm() / b.norm()).item()
    assert error < 0.12, (name, error)
    assert (got.original is None) == (want.original is None)

for rows, width in ((5, 160), (3, 64)):
    shift, scale, gate = torch.randn(6, 3 * width).bfloat16().chunk(3, dim=-1)
    index = torch.randint(0, 6, (rows,))
    x, branch, wide = (torch.randn(rows, n).bfloat16() for n in (width, width, 2 * width))
    weight = torch.rand(width).bfloat16()
    for keep in (False, True):
        given = (weight, shift, scale, index, 1e-5)
        near(TRITON.norm_modulate(x, *given, keep=keep), fused.TWINS.norm_modulate(x, *given, keep=keep), "norm")
        r, a = TRITON.gate_norm_modulate(x, gate, branch, *given, keep=keep)
        s, b = fused.TWINS.gate_norm_modulate(x, gate, branch, *given, keep=keep)
        assert ((r.float() - s.float()).norm() / s.float().norm()) < 0.01
        near(a, b, "gate")
        near(TRITON.silu_mul(wide, keep=keep), fused.TWINS.silu_mul(wide, keep=keep), "silu")
        near(TRITON.quantize(wide, keep=keep), fused.TWINS.quantize(wide, keep=keep), "quantize")
    assert TRITON.quantize(wide[:0]).values.shape == (0, 2 * width)

heads, rows = 3, 4
qkv = torch.randn(rows, 3 * heads * 128).bfloat16()
rope = torch.rand(rows, 96).bfloat16()
weights = torch.rand(2, 128).bfloat16()
parts = [part.reshape(rows, heads, 128) for part in qkv.clone().chunk(3, dim=-1)]
qk_norm_rope_(qkv, weights[0], weights[1], rope, 1e-5, heads=heads)
got = [part.reshape(rows, heads, 128) for part in qkv.chunk(3, dim=-1)]
assert torch.equal(got[2], parts[2]), "values are not touched"
for i in range(2):
    want = qk_norm_rope(parts[i], weights[i], rope, 1e-5).float()
    assert ((got[i].float() - want).norm() / want.norm()) < 0.01
print("all near")
"""


def test_the_kernels_themselves_compute_their_twins_in_the_interpreter() -> None:
    """Structure, indices, strides and masks; how a device rounds is tested on one (tests/gpu)."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and "all near" in done.stdout, done.stderr[-2000:]
