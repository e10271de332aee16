# SPDX-License-Identifier: Apache-2.0
"""The pipeline's stages in a :class:`HotCache`: what ``resident = "stage"`` of a profile does.

Why: a card that cannot hold text encoder, DiT and VAEs together holds the largest of them and takes turns.
How: each part's entry points are wrapped so that the part is on the device while one of them runs. Weights that the
base holds byte for byte come back from there; others (VAEs, weights that a backend packs into another order) from a
host copy of this rank.
Scope: only with H3_RESIDENT=stage. On Ascend weights then stay in ND: whether a storage in FRACTAL_NZ can be filled
from bytes is unknown. Run on no accelerator yet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_h3_plugin.checkpoint.safetensors_header import TensorRecord
from vllm_h3_plugin.checkpoint.shared_base import SharedBase
from vllm_h3_plugin.memory.hot_cache import HotCache, Source
from vllm_h3_plugin.quantization.contract import QuantBackend
from vllm_h3_plugin.quantization.npu_int8 import NpuInt8
from vllm_h3_plugin.settings import Settings

logger = init_logger(__name__)

ORDER = ("text_encoder", "dit", "vae")
_MODULES = {
    "text_encoder": ("text_encoder",),
    "dit": ("transformer", "transformers_ref"),
    "vae": ("video_vae", "audio_vae"),
}
_ENTRIES = {
    "text_encoder": ("encode_ids", "forward"),
    "dit": ("forward", "_embed", "refine_text"),
    "vae": ("encode_image", "encode_video", "encode_waveform", "decode_latent", "decode_with_chunks"),
}


class BaseBytes:
    """A record of the shared base as a :class:`Source`."""

    def __init__(self, base: SharedBase, part: str, record: TensorRecord) -> None:
        self._base, self._part, self._record = base, part, record

    def read_into(self, out: torch.Tensor, offset: int) -> None:
        """See :class:`Source`."""
        self._base.read_into(self._part, self._record, out, offset)

    def holds(self, data: torch.Tensor) -> bool:
        """Whether the record's bytes are these."""
        if data.numel() != self._record.nbytes:
            return False
        found = torch.empty_like(data)
        self.read_into(found, 0)
        return torch.equal(found, data)


def plain_weights(backend: QuantBackend | None, settings: Settings) -> None:
    """Before weights are packed: have the backend pack them so that they are no more than their bytes."""
    if settings.resident == "stage" and isinstance(backend, NpuInt8):
        backend.keep_plain("stages take turns on the card (H3_RESIDENT=stage)")


def keep_stages(pipeline: Any, settings: Settings, base: SharedBase | None) -> HotCache | None:
    """Put the pipeline's parts into a cache and wrap their entry points; None under ``resident = "all"``.

    What lies beside the DiT's card (a role map's, ``host/placed_parts.py``) takes no room there and stays.
    """
    if settings.resident == "all":
        return None
    card = next(pipeline.transformer.parameters()).device
    budget = None if settings.resident_gib is None else int(settings.resident_gib * 2**30)
    cache = HotCache(ORDER, budget)
    for stage in ORDER:
        modules = {name: getattr(pipeline, name, None) for name in _MODULES[stage]}
        tensors = {
            f"{name}/{label}": tensor
            for name, module in modules.items()
            if module is not None
            for label, tensor in (*module.named_parameters(), *module.named_buffers())
            if tensor.device == card
        }
        if not tensors:
            continue
        made = cache.add(stage, tensors, lambda label, data: _source(base, label, data))
        logger.info("H3 stage %s: %.2f GiB", stage, made.nbytes / 2**30)
        for module in filter(None, modules.values()):
            for entry in _ENTRIES[stage]:
                if callable(getattr(module, entry, None)):
                    setattr(module, entry, _within(cache, stage, getattr(module, entry)))
    cache.settle()
    return cache


def _source(base: SharedBase | None, label: str, data: torch.Tensor) -> Source | None:
    part, _, name = label.partition("/")
    record = base.entry(part, name) if base is not None and part in base.snapshot.parts else None
    if base is None or record is None:
        return None
    source = BaseBytes(base, part, record)
    return source if source.holds(data) else None


def _within(cache: HotCache, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        with cache.use(stage):
            return call(*args, **kwargs)

    return run
