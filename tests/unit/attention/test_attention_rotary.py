# SPDX-License-Identifier: Apache-2.0
"""The probe of the kernel that rotates in place: what is wrong with it is seen, whatever it is."""

from __future__ import annotations

import pytest
import torch

from vllm_h3_plugin.attention import qk_norm_rope as kernel
from vllm_h3_plugin.attention.rotary import in_place_fault, qk_norm_rope

CPU = torch.device("cpu")


def right(
    qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, rope: torch.Tensor, eps: float, *, heads: int
) -> None:
    """Stands for the Triton kernel."""
    inner = heads * kernel.HEAD_DIM
    for start, weight in ((0, q_weight), (inner, k_weight)):
        part = qkv[:, start : start + inner]
        part.copy_(qk_norm_rope(part.reshape(-1, heads, kernel.HEAD_DIM), weight, rope, eps).flatten(1))


def test_a_kernel_that_does_what_the_twin_does_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "qk_norm_rope_", right)
    assert in_place_fault(CPU) is None


@pytest.mark.parametrize(
    ("row", "column", "value", "said"),
    [
        (3, 5, float("nan"), "relative error nan"),
        (3, 7168 + 5, float("nan"), "relative error nan"),
        (3, 5, 50.0, "relative error"),
        (0, 2 * 7168, 1.0, "it changed the values"),
    ],
)
def test_a_kernel_that_is_wrong_anywhere_is_not(
    monkeypatch: pytest.MonkeyPatch, row: int, column: int, value: float, said: str
) -> None:
    def wrong(qkv: torch.Tensor, *more: object, **named: object) -> None:
        right(qkv, *more, **named)  # type: ignore[arg-type]
        qkv[row, column] = value

    monkeypatch.setattr(kernel, "qk_norm_rope_", wrong)
    assert said in str(in_place_fault(CPU))
