# SPDX-License-Identifier: Apache-2.0
"""The text encoder's vision tower in FP32, where the recipe says so.

The host casts the tower to BF16 and hands it pixel values in BF16 (``minimax_h3/encoder.py``, ``__init__`` and
``_encode``). Here its BF16 weights become FP32 once they are loaded, which changes no value; it gets the pixel values
as the image processor made them, and its matrix products and convolution run without TF32. What it returns goes on in
BF16 as before: the text decoder is not touched.

With several text encoder ranks the host sends pixel values between them in BF16 (``_distribute_encode_inputs``); there
the tower computes in FP32 on those.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_h3_plugin.quantization.plan import PrecisionPlan
from vllm_h3_plugin.quantization.precision import Precision


def widen_vision(encoder: Any, plan: PrecisionPlan) -> None:
    """Give a loaded text encoder the vision tower of its recipe; nothing to do where that is BF16.

    Args:
        encoder: the host's ``MiniMaxH3Qwen3VLEncoder``; one that is not loaded on this rank has no tower.
    """
    tower = getattr(encoder, "vision", None)
    if tower is None or plan.vision is not Precision.FP32:
        return
    for module in tower.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype is torch.bfloat16:
                # A parameter of its own: the old one may be a view of a base that all ranks share.
                module._parameters[name] = torch.nn.Parameter(parameter.detach().float(), requires_grad=False)
    _Pixels(encoder, tower)


class _Pixels:
    """Hands the tower the pixel values that the encoder was given, past the host's cast to BF16."""

    def __init__(self, encoder: Any, tower: Any) -> None:
        self._given: list[torch.Tensor] = []
        self._encode, self._forward = encoder._encode, tower.forward
        encoder._encode, tower.forward = self.encode, self.forward

    def encode(self, input_ids: torch.Tensor, **vision: Any) -> Any:
        """In the place of the encoder's ``_encode``, which runs the tower on pictures and then on videos."""
        both = (vision.get(name) for name in ("pixel_values", "pixel_values_videos"))
        self._given = [pixels for pixels in both if pixels is not None]
        try:
            return self._encode(input_ids, **vision)
        finally:
            self._given = []

    def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor) -> Any:
        """In the place of the tower's."""
        given = self._given.pop(0) if self._given else hidden_states
        pixels = given if given.shape == hidden_states.shape else hidden_states
        with _full_fp32():
            return self._forward(pixels.to(hidden_states.device, torch.float32), grid_thw)


@contextmanager
def _full_fp32() -> Iterator[None]:
    """Without TF32, which has BF16's exponent and 10 bits of mantissa."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
