# SPDX-License-Identifier: Apache-2.0
"""Write safetensors shards tensor by tensor: only the header and a few MB of one tensor are ever in memory.

The safetensors library's writers want every tensor of a file at once, which a true-width checkpoint does not allow.
Format: 8 bytes little-endian header length, a JSON header padded with spaces to a multiple of 8, the data.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vllm_h3_plugin.checkpoint.layout import TensorSpec
from vllm_h3_plugin.checkpoint.synthetic.plan import TensorPlan
from vllm_h3_plugin.checkpoint.synthetic.spec import MAX_SHARD_BYTES

Progress = Callable[[int], None]


def header(specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """Header of a safetensors file that holds ``specs`` one after the other, its length in front."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"} if metadata is None else dict(metadata)}
    offset = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def split(plans: Sequence[TensorPlan], limit: int | None) -> list[list[TensorPlan]]:
    """Cut a part into shards of at most ``limit`` bytes of data (a larger tensor gets a shard of its own)."""
    total = sum(plan.spec.nbytes for plan in plans)
    limit = min(MAX_SHARD_BYTES, -(-total // 2)) if limit is None else limit
    shards: list[list[TensorPlan]] = [[]]
    used = 0
    for plan in plans:
        if shards[-1] and used + plan.spec.nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(plan)
        used += plan.spec.nbytes
    return shards


def write_part(
    folder: Path, stem: str, plans: Sequence[TensorPlan], *, seed: int, limit: int | None, progress: Progress
) -> None:
    """Write one part's shards and its index (``STEM.safetensors.index.json``).

    Args:
        stem: file name without number and suffix: ``diffusion_pytorch_model`` or ``model``.
        progress: called with the number of bytes just written.
    """
    folder.mkdir(parents=True)
    shards = split(plans, limit)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        with (folder / name).open("wb") as file:
            file.write(header([plan.spec for plan in shard]))
            for plan in shard:
                for block in plan.data(seed):
                    file.write(block)
                    progress(len(block))
                weight_map[plan.spec.name] = name
    total = sum(plan.spec.nbytes for plan in plans)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
