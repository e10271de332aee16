# SPDX-License-Identifier: Apache-2.0
"""Attention backends of the plugin, as the host's attention layer wants them."""

from __future__ import annotations

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl

from vllm_h3_plugin.attention.prefix_sdpa import prefix_sdpa


class PrefixSDPAImpl(SDPAImpl):
    """SDPA that drops pad rows by slicing; falls back to the host's masked form only if handed a mask."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """See :func:`prefix_sdpa`; the valid length is the one H3 publishes as ``extra["valid_kv_length"]``."""
        if attn_metadata is not None and attn_metadata.attn_mask is not None:
            return self._forward_impl(query, key, value, attn_metadata)
        valid = query.shape[1]
        if attn_metadata is not None and query.shape[1] == key.shape[1]:
            valid = int(attn_metadata.extra.get("valid_kv_length", valid))
        return prefix_sdpa(query, key, value, valid=valid, scale=self.softmax_scale, causal=self.causal)


class PrefixSDPABackend(SDPABackend):
    """Mask-free SDPA. ``supports_prefix_kv_slicing`` makes H3 build no mask (minimax_h3_transformer.py:557-574)."""

    supports_prefix_kv_slicing = True

    @staticmethod
    def get_name() -> str:
        return "SDPA"

    @staticmethod
    def get_impl_cls() -> type[SDPAImpl]:
        return PrefixSDPAImpl


class MaskedSDPAImpl(SDPAImpl):
    """The host's own SDPA with its mask, made callable on an out-of-tree platform."""

    # AttentionImpl.forward dispatches by platform and raises for out-of-tree ones (attention/backends/abstract.py).
    forward = SDPAImpl.forward_cuda


class MaskedSDPABackend(SDPABackend):
    """What ``--diffusion-attention-backend TORCH_SDPA`` selects on the reference platform."""

    @staticmethod
    def get_impl_cls() -> type[SDPAImpl]:
        return MaskedSDPAImpl
