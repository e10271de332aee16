# SPDX-License-Identifier: Apache-2.0
"""Exact kernels without masks, and what a device is expected to pick."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from vllm_h3_plugin.attention.exact import (
    MATH_ROWS,
    AttentionShape,
    exact_kernels,
    flash_package,
    reference_rows,
    valid_prefix,
)
from vllm_h3_plugin.attention.preference import NAMES, DeviceFacts, availability, explain, preference

CPU = DeviceFacts("cpu", "cpu", None, torch.__version__, None, None)
H200 = DeviceFacts("cuda", "H200", 90, "2.11.0", 91002, "fa3 (fa3_fwd 0.0.3)")


def kernel(name, facts=CPU, flash=None):
    return next(kernel for kernel in exact_kernels(facts, flash) if kernel.name == name)


def qkv(rows, heads=3, dim=32, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)
    # One tensor cut in three, as the QKV projection leaves it: rows are not behind one another.
    fused = torch.randn(1, rows, 3 * heads * dim, generator=generator, dtype=dtype)
    return [x.view(1, rows, heads, dim) for x in fused.split(heads * dim, -1)]


@pytest.mark.parametrize("name", ["flash", "math"])
@pytest.mark.parametrize(("rows", "valid"), [(64, 50), (128, 65), (64, 64), (64, 1), (1, 1)])
def test_sliced_keys_say_what_a_mask_over_pad_rows_says(name, rows, valid):
    q, k, v = qkv(rows)
    mask = torch.arange(rows)[None, None, None] < valid
    masked = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=0.2
    ).transpose(1, 2)
    out = kernel(name).run(q, *valid_prefix(k, v, valid), 0.2)
    assert out.shape == q.shape
    # Pad queries too: they are rows like others, and finite.
    assert torch.allclose(out, masked, atol=1e-6)


def test_what_stands_in_pad_rows_does_not_matter():
    q, k, v = (x.clone() for x in qkv(64))
    before = kernel("math").run(q, *valid_prefix(k, v, 40), 0.2)
    k[:, 40:], v[:, 40:] = float("nan"), float("inf")
    assert torch.equal(kernel("math").run(q, *valid_prefix(k, v, 40), 0.2), before)


def test_slicing_copies_nothing():
    _, k, v = qkv(64)
    short = valid_prefix(k, v, 40)
    assert [x.data_ptr() for x in short] == [k.data_ptr(), v.data_ptr()] and short[0].shape[1] == 40
    assert valid_prefix(k, v, 64)[0] is k


@pytest.mark.parametrize("valid", [0, -1, 65])
def test_a_valid_length_outside_of_the_rows_is_refused(valid):
    _, k, v = qkv(64)
    with pytest.raises(ValueError, match=f"within 1..64, got {valid}"):
        valid_prefix(k, v, valid)


def test_reference_rows_are_the_first_rows_of_the_first_head():
    q, k, v = qkv(70)
    want = kernel("math").run(q, k, v, 0.2)[0, :9, 0]
    assert torch.allclose(reference_rows(q, k, v, 0.2, 9), want, atol=1e-5)


def test_a_flash_package_is_called_without_mask_and_its_denominator_dropped():
    def function(q, k, v, *, softmax_scale, causal):
        assert (softmax_scale, causal) == (0.2, False)
        return q + 1, torch.zeros(1)

    q, k, v = qkv(8)
    assert torch.equal(kernel("fa3", H200, function).run(q, k, v, 0.2), q + 1)
    assert torch.equal(flash_package(lambda q, k, v, **_: q)(q, k, v, 0.2), q)


def test_kernels_refuse_what_they_cannot_take_with_a_reason():
    one = AttentionShape(1, 1, 56, 128, torch.bfloat16)
    large = AttentionShape(6016, 6000, 56, 128, torch.bfloat16)
    wide = AttentionShape(64, 64, 56, 128, torch.float32)
    assert "single key" in kernel("cudnn", H200).supports(one).reason
    assert kernel("math", H200).supports(one)
    assert str(MATH_ROWS) in kernel("math", H200).supports(large).reason
    assert "float32" in kernel("cudnn", H200).supports(wide).reason
    assert not kernel("fa3", H200, flash=None).supports(large), "described but not handed in"


@pytest.mark.parametrize("capability", [None, 80, 86, 90, 100, 103, 120, 121])
def test_every_kernel_of_a_gpu_has_one_place_in_the_order(capability):
    order = preference(capability)
    assert len(set(order)) == len(order) and set(order) <= set(NAMES)
    assert capability is None or {"cudnn", "flash", "memory_efficient", "math", "fa3"} <= set(order)
    assert tuple(availability(capability, 91002, "fa3")) == order


def test_an_h200_picks_fa3_and_says_what_else_it_measures():
    text = explain(90, availability(90, 91002, H200.flash))
    assert text.startswith("attention on SM 9.0: fa3 (fa3 (fa3_fwd 0.0.3))") and "cudnn" in text


def test_a_gb10_picks_cudnn_and_says_why_not_fa3():
    text = explain(121, availability(121, 91002, H200.flash))
    assert text.startswith("attention on SM 12.1: cudnn (cuDNN 91002)")
    assert "fa3: fa3 has no kernels for SM 12.1" in text


def test_a_gb10_with_an_old_cudnn_says_which_it_needs():
    text = explain(121, availability(121, 90100, None))
    assert text.startswith("attention on SM 12.1: flash") and "90500" in text


def test_a_device_without_a_kernel_is_said_to_have_none():
    nothing = {name: type(support)(False, "gone") for name, support in availability(90, None, None).items()}
    assert "no exact kernel can run" in explain(90, nothing)


def test_explaining_imports_no_torch():
    code = "import sys, vllm_h3_plugin.attention.preference; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_views_that_32_bit_offsets_cannot_reach_are_copied_for_every_kernel(monkeypatch):
    """A clip of 15 s at 768p has 109 184 rows: its fused QKV is more than 2^31 elements."""
    from vllm_h3_plugin.attention import exact

    monkeypatch.setattr(exact, "_INT32_MAX", 40 * 3 * 2 * 128 - 1)
    fused = torch.randn(1, 40, 3 * 2 * 128)
    q, k, v = (part.view(1, 40, 2, 128) for part in fused.split(256, -1))
    seen = []

    def function(q, k, v, **options):
        seen.extend((q, k, v))
        return q

    exact.flash_package(function)(q, k, v, 0.1)
    assert all(x.is_contiguous() for x in seen) and torch.equal(seen[1], k)
    seen.clear()
    exact.flash_package(function)(q[:, :39], k[:, :39], v[:, :39], 0.1)
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in (q, k, v)], "within reach nothing is copied"
