# SPDX-License-Identifier: Apache-2.0
"""Ascend's operators in plain torch on the CPU, strict about what the hardware demands.

Arithmetic as documented (torch_npu 2.10.0.post4, ``_op_plugin_docs.py``): ``npu_dynamic_quant`` is
``round(x * 127 / rowMax(|x|))``; ``npu_quant_matmul`` sums in INT32, then scales in FP32, adds a floating bias and
rounds once to the output's dtype. All-zero rows get scale 0, so that nothing depends on what their values are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Call:
    """One ``npu_quant_matmul``."""

    m: int
    k: int
    n: int
    bias: torch.dtype | None
    output: torch.dtype
    nz: bool


@dataclass
class EmulatedNpu:
    """Stands in the place of the module ``torch_npu``.

    Args:
        refuse_cast: what ``npu_format_cast`` raises, if anything.
    """

    refuse_cast: str | None = None
    calls: list[Call] = field(default_factory=list)
    nz: set[int] = field(default_factory=set)

    def npu_dynamic_quant(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[M, K]`` -> INT8 ``[M, K]``, FP32 ``[M]``."""
        assert input.ndim > 1 and input.dtype in (torch.bfloat16, torch.float16) and input.numel() > 0
        wide = input.float()
        amax = wide.abs().amax(dim=-1, keepdim=True)
        values = (wide * (127.0 / amax)).nan_to_num(nan=0.0).round().clamp(-128, 127).to(torch.int8)
        return values, (amax / 127.0).squeeze(-1)

    def npu_format_cast(self, input: torch.Tensor, acl_format: int) -> torch.Tensor:
        """The same values; remembers that they are in FRACTAL_NZ."""
        if self.refuse_cast:
            raise RuntimeError(self.refuse_cast)
        assert acl_format == 29 and input.is_contiguous() and input.dtype is torch.int8
        self.nz.add(input.data_ptr())
        return input

    def npu_quant_matmul(
        self,
        x1: torch.Tensor,
        x2: torch.Tensor,
        scale: torch.Tensor,
        *,
        pertoken_scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """``[M, K] @ [K, N]`` -> ``[M, N]``."""
        (m, k), (k2, n) = x1.shape, x2.shape
        assert x1.dtype is x2.dtype is torch.int8 and k == k2 and m > 0
        assert k <= 65535 and n <= 65535
        assert scale.dtype is torch.float32 and scale.shape == (n,)
        assert pertoken_scale is not None and pertoken_scale.dtype is torch.float32 and pertoken_scale.shape == (m,)
        assert output_dtype in (torch.bfloat16, torch.float16)
        assert bias is None or (bias.shape == (n,) and bias.dtype in (output_dtype, torch.float32))
        nz = x2.data_ptr() in self.nz
        self.calls.append(Call(m, k, n, None if bias is None else bias.dtype, output_dtype, nz))
        y = (x1.double() @ x2.double()).float() * scale * pertoken_scale[:, None]
        return (y if bias is None else y + bias).to(output_dtype)
