# SPDX-License-Identifier: Apache-2.0
"""What the loaded pipeline really weighs, counted from its tensors and asked from the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import torch

from vllm_h3_plugin.checkpoint.read_only import ReadOnlyTensor


def measured_memory(pipeline: Any) -> dict[str, Any]:
    """For ``/v1/h3/info``.

    Returns:
        ``device``; ``parts``: bytes by part as ``memory.weights.PARTS`` names them; ``resident_bytes``:
        what the device's allocator has handed out (on the CPU: the parts' sum); ``load_peak_bytes``: the most that it
        had handed out since the process started; ``peak_bytes``: the same, up to now; ``rss_bytes`` of this process.
    """
    parts: dict[str, int] = {}
    for part, tensor in _tensors(pipeline):
        shared = isinstance(tensor, ReadOnlyTensor)
        parts[part] = parts.get(part, 0) + (tensor.nbytes if shared else tensor.untyped_storage().nbytes())
    for module, tables in pipeline._tables.items():
        part = _part(module, ".adaln_proj.")
        parts[part] = parts.get(part, 0) + tables.store.nbytes
    facts = {"device": str(pipeline.device), "parts": parts, **_now(pipeline.device, sum(parts.values()))}
    return {**facts, "load_peak_bytes": facts["peak_bytes"]}


def after_request(loaded: dict[str, Any], pipeline: Any) -> dict[str, Any]:
    """What :func:`measured_memory` said, with the numbers that a request changes."""
    return {**loaded, **_now(pipeline.device, loaded["resident_bytes"])}


def _now(device: torch.device, on_cpu: int) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "resident_bytes": torch.cuda.memory_allocated(device) if cuda else on_cpu,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if cuda else on_cpu,
        "rss_bytes": psutil.Process().memory_info().rss,
    }


def _tensors(pipeline: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(part as ``memory.weights.PARTS`` names it, tensor) of every storage once."""
    seen: set[int] = set()
    for module in ("transformer", "transformers_ref", "text_encoder", "video_vae", "audio_vae"):
        root = getattr(pipeline, module, None)
        if root is None:
            continue
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            # Views of the shared base lie in one mapping, whose storage they do not hand out.
            shared = isinstance(tensor, ReadOnlyTensor)
            pointer = tensor.data_ptr() if shared else tensor.untyped_storage().data_ptr()
            if pointer not in seen:
                seen.add(pointer)
                yield _part(module, name), tensor


def _part(module: str, name: str) -> str:
    if module == "transformers_ref":
        return "transformer_ref"
    if module == "text_encoder":
        return "vision" if name.startswith("vision") else "text_encoder"
    if module != "transformer":
        return module
    if ".adaln_proj." in name:
        return "adaln"
    return "dit" if name.startswith("blocks.") and ".norm" not in name else "refiner"
