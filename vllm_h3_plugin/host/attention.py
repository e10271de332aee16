# SPDX-License-Identifier: Apache-2.0
"""Attention of the plugin inside the host's attention layers: what each layer runs, decided once after a DiT is built.

The host's ``Attention`` layer stays, with its parallel strategies; only its backend class and the implementation that
it calls are replaced. Every class that is put in says ``supports_prefix_kv_slicing``, upon which H3 builds no mask and
publishes how many rows hold tokens (minimax_h3_transformer.py:557-574). Nothing here reads from the device, except when
a size is first seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger
from vllm_omni.diffusion.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadata
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl
from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3Attention
from vllm_omni.platforms import current_omni_platform

from vllm_h3_plugin.attention.choice import Chooser
from vllm_h3_plugin.attention.device import cuda_chooser, cuda_low_bit
from vllm_h3_plugin.attention.exact import Run, valid_prefix
from vllm_h3_plugin.attention.low_bit import refuse
from vllm_h3_plugin.attention.prefix_sdpa import prefix_sdpa
from vllm_h3_plugin.host.attention_named import named_backend, probe_named, refuse_substitute
from vllm_h3_plugin.quantization.recipe import AttentionPrecision

logger = init_logger(__name__)


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
    """Mask-free SDPA of the reference platform."""

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


class PrefixImpl(AttentionImpl):
    """Runs any kernel that takes no mask on the rows that hold tokens.

    Args:
        run: the kernel, or the choice among kernels.
        softmax_scale: scale of the scores.
    """

    def __init__(self, run: Run, softmax_scale: float) -> None:
        self.run = run
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """``[1, Sq, heads, head_dim]`` queries on the valid keys; pad queries give finite rows that nobody reads.

        Raises:
            ValueError: a mask was handed in, or the valid length is outside of the keys.
        """
        if attn_metadata is not None:
            if attn_metadata.attn_mask is not None:
                raise ValueError("attention of this plugin takes no mask, and the host made one")
            valid = attn_metadata.extra.get("valid_kv_length")
            if valid is not None:
                # After an exchange between ranks the keys are those of the whole sequence, as in cudnn_attn.py.
                key, value = valid_prefix(key, value, int(valid))
        return self.run(query, key, value, self.softmax_scale)


class ChosenBackend(AttentionBackend):
    """What stands in a layer for which the user named no backend: see :mod:`vllm_h3_plugin.attention.choice`."""

    supports_prefix_kv_slicing = True

    @staticmethod
    def get_name() -> str:
        return "H3_CHOSEN"

    @staticmethod
    def get_impl_cls() -> type[PrefixImpl]:
        return PrefixImpl

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return []


class Fp8Backend(ChosenBackend):
    """Attention in FP8, by a recipe."""

    @staticmethod
    def get_name() -> str:
        return "H3_FP8"


class Int8Backend(ChosenBackend):
    """Attention in INT8, by a recipe."""

    @staticmethod
    def get_name() -> str:
        return "H3_INT8"


_LOW_BIT = {AttentionPrecision.FP8: Fp8Backend, AttentionPrecision.INT8: Int8Backend}
_SLICED = ("TORCH_SDPA", "SAGE_ATTN")
"""Backends of the host that take no mask, or are slow with one, and are right without: their keys are sliced."""


@dataclass(frozen=True)
class Kit:
    """What a device brings: the choice among its exact kernels, and its attention in few bits (which may refuse)."""

    chooser: Chooser
    low_bit: Callable[[AttentionPrecision], Run]


@dataclass(frozen=True)
class Installed:
    """What a DiT's attention layers run.

    Attributes:
        blocks, refiner: for people; ``chosen by measurement``, ``fp8``, or the host's backend and why it stayed.
        chooser: the one that serves all layers; None where no layer uses it.
    """

    blocks: str
    refiner: str
    chooser: Chooser | None

    def facts(self) -> Mapping[str, Any]:
        """For `/v1/h3/info`: what runs, and every choice so far with its times."""
        chosen = [str(choice) for choice in self.chooser.choices] if self.chooser else []
        return {"blocks": self.blocks, "refiner": self.refiner, "chosen": chosen}


def install(
    dit: torch.nn.Module,
    *,
    precision: AttentionPrecision = AttentionPrecision.EXACT,
    folder: Path | None = None,
    batched: bool = False,
    kit: Kit | None = None,
) -> Installed:
    """Decide what the attention layers of a DiT run. Call it after the DiT is built; weights are not needed.

    On CUDA, layers without a named backend take the fastest exact kernel, measured at the first use of a size; with
    ``precision`` the blocks (never the token refiner) run in fewer bits. A backend that the user named stays:
    TORCH_SDPA and SAGE_ATTN without a mask, any other as the host has it, each tried once on a small input. Elsewhere
    nothing changes.

    Args:
        dit: the host's, or a subclass.
        precision: the recipe's.
        folder: where measurements are remembered.
        batched: whether several requests may share one forward (``max_num_seqs`` above 1). A host backend that keeps
            them apart by ``cu_seqlens`` then stays.
        kit: of the device; made for the current CUDA device if None.

    Raises:
        BackendError: ``precision`` cannot run here or contradicts a flag, a named backend cannot run, or the host put
            another in its place.
    """
    if kit is None:
        if not current_omni_platform.is_cuda():
            if precision is not AttentionPrecision.EXACT:
                raise refuse(precision, f"it needs a CUDA device and this is {current_omni_platform.device_type!r}")
            kept = f"{_blocks_of(dit)[0][1].attention.attn_backend.get_name()} of the platform"
            return Installed(kept, kept, None)
        device = torch.device("cuda", torch.cuda.current_device())
        kit = Kit(cuda_chooser(device, folder, logger.info), lambda wanted: cuda_low_bit(wanted, device))
    low_bit = None
    said: dict[bool, str] = {}
    probed: set[str] = set()
    for name, attention in _blocks_of(dit):
        layer, refiner = attention.attention, name.startswith("token_refiner.")
        wanted = AttentionPrecision.EXACT if refiner else precision
        named = named_backend(layer)
        if named is not None:
            refuse_substitute(layer, named)
        stays = _why_it_stays(layer, named, batched)
        if stays is not None and wanted is not AttentionPrecision.EXACT:
            raise refuse(wanted, stays)
        if wanted is not AttentionPrecision.EXACT:
            low_bit = low_bit or kit.low_bit(wanted)
            _replace(layer, _LOW_BIT[wanted], low_bit)
            said[refiner] = wanted.value
        elif stays is None:
            _replace(layer, ChosenBackend, kit.chooser.attend)
            said[refiner] = "chosen by measurement"
        else:
            if named in _SLICED and not layer.use_ring:
                _slice_keys(layer)
                stays += ", without a mask"
            if named is not None and named not in probed and not layer.use_ring:
                probe_named(attention, named, kit.chooser)
                probed.add(named)
            said[refiner] = f"{layer.attn_backend.get_name()}: {stays}"
    logger.info("attention of the blocks: %s; of the token refiner: %s", said.get(False), said.get(True))
    used = any(text == "chosen by measurement" for text in said.values())
    return Installed(said.get(False, ""), said.get(True, ""), kit.chooser if used else None)


def _blocks_of(dit: torch.nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in dit.named_modules() if isinstance(module, MiniMaxH3Attention)]


def _why_it_stays(layer: Any, named: str | None, batched: bool) -> str | None:
    """Why the host's backend is not replaced; None if it is."""
    if layer.use_ring:
        return "ring attention passes keys from rank to rank in a kernel of the host's"
    if layer._kv_cache_dtype not in (None, "float"):
        return f"the host was asked for {layer._kv_cache_dtype} keys and values"
    if named is not None:
        return f"{named} was named"
    if batched and layer.attn_backend.supports_multi_doc_packed_varlen():
        return "several requests may share a forward, and it keeps them apart"
    return None


def _replace(layer: Any, backend: type[ChosenBackend], run: Run) -> None:
    layer.attn_backend = backend
    layer.attention = PrefixImpl(run, layer.softmax_scale)


def _slice_keys(layer: Any) -> None:
    """The host's own implementation behind sliced keys; its backend keeps its name and says that it needs no mask."""
    host_impl, host_backend = layer.attention, layer.attn_backend

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        return host_impl.forward(q, k, v, None)

    layer.attn_backend = type(f"Prefix{host_backend.__name__}", (host_backend,), {"supports_prefix_kv_slicing": True})
    layer.attention = PrefixImpl(run, layer.softmax_scale)
