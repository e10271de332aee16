# SPDX-License-Identifier: Apache-2.0
"""Scaled dot-product attention over the valid prefix of a packed row, without a mask.

H3 packs one request's tokens in front of padding up to a multiple of 64 rows. A boolean mask over the padding forces
``scaled_dot_product_attention`` off its fast kernels; the valid rows are a contiguous prefix, so slicing says the same.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def prefix_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, valid: int, scale: float, causal: bool = False
) -> torch.Tensor:
    """Attend within the first ``valid`` rows; rows behind them come back as zeros.

    Args:
        query: ``[batch, rows, heads, head_dim]``; key and value likewise, with the same or a divisor number of heads.
        valid: number of rows in front that hold tokens, ``1 <= valid <= rows``.
        scale: softmax scale.
        causal: whether row *i* sees only rows up to *i*.

    Returns:
        ``[batch, rows, heads, head_dim]`` in the dtype of ``query``.

    Raises:
        ValueError: ``valid`` is outside ``1..rows``.
    """
    rows = query.shape[1]
    if not 0 < valid <= min(rows, key.shape[1]):
        raise ValueError(f"valid rows must be within 1..{min(rows, key.shape[1])}, got {valid}")
    attended = scaled_dot_product_attention(
        query[:, :valid].transpose(1, 2),
        key[:, :valid].transpose(1, 2),
        value[:, :valid].transpose(1, 2),
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    ).transpose(1, 2)
    if valid == rows:
        return attended
    out = attended.new_zeros((query.shape[0], rows, query.shape[2], value.shape[3]))
    out[:, :valid] = attended
    return out
