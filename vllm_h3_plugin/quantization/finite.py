# SPDX-License-Identifier: Apache-2.0
"""Weights that no scale can cover are refused before they are quantized."""

from __future__ import annotations

import torch

from vllm_h3_plugin.errors import RecipeError


def check_finite(weight: torch.Tensor, amax: torch.Tensor, path: str) -> None:
    """Refuse NaN and infinity.

    Args:
        weight: ``[N, K]`` floating point.
        amax: its absolute maxima, of any shape; NaN and infinity come through in them.
        path: module path of the layer, for the message.

    Raises:
        RecipeError: names the layer and the first bad rows.
    """
    if bool(torch.isfinite(amax).all()):
        return
    bad = (~torch.isfinite(weight)).any(dim=1).nonzero().flatten()
    shown = ", ".join(str(int(row)) for row in bad[:5]) + (", …" if len(bad) > 5 else "")
    raise RecipeError(
        f"{path}: {len(bad)} of {weight.shape[0]} weight rows hold NaN or infinity (rows {shown})",
        why="no scale covers them, and they would spread to every token",
        fix="The checkpoint is damaged: compare its shards' checksums with the release, download bad ones again.",
        path=path,
        rows=len(bad),
    )
