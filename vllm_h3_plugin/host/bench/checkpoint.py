# SPDX-License-Identifier: Apache-2.0
"""A checkpoint to measure with, written as fast as the disk takes it.

``vllm-h3 synth`` draws every value of 34 GB anew, which takes minutes. Here each tensor is one block of random numbers
over and over, from a place of its own: as finite and as spread as real weights, and as far from compressible.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from zlib import crc32

import numpy as np

from vllm_h3_plugin.checkpoint.atomic import fsync, gib
from vllm_h3_plugin.checkpoint.layout import FP32_BUFFERS
from vllm_h3_plugin.checkpoint.page_cache import drop
from vllm_h3_plugin.checkpoint.synthetic import (
    SynthSpec,
    VitVae,
    planned_bytes,
    tiny_dit,
    tiny_text,
    true_width_text,
)
from vllm_h3_plugin.checkpoint.synthetic.plan import TensorPlan, dit_plans, text_plans
from vllm_h3_plugin.checkpoint.synthetic.shards import write_part
from vllm_h3_plugin.checkpoint.synthetic.side_files import write_side_files
from vllm_h3_plugin.checkpoint.synthetic.vaes import write_vaes, write_vit_vae
from vllm_h3_plugin.checkpoint.synthetic.values import Distribution, RowStream, encode
from vllm_h3_plugin.errors import UsageError

_BLOCK_VALUES = 1 << 23  # 16 MiB in BF16


@dataclass(frozen=True)
class RepeatedPlan(TensorPlan):
    """A tensor whose values come from one block."""

    def data(self, seed: int) -> Iterator[bytes]:
        """The tensor's bytes, up to a block at a time."""
        if self.spec.name in FP32_BUFFERS:
            yield from super().data(seed)
            return
        block = _block(seed, self.distribution, self.spec.dtype)
        item = len(block) // _BLOCK_VALUES
        left = self.spec.nbytes
        start = crc32(self.key.encode()) % _BLOCK_VALUES * item
        while left:
            piece = block[start : start + left]
            yield piece  # type: ignore[misc]  # a view of bytes: len() and write() take it as they take bytes
            left -= len(piece)
            start = 0


@cache
def _values(seed: int) -> np.ndarray:
    stream = RowStream(seed, "block", rows=_BLOCK_VALUES >> 10, width=1 << 10, distribution=Distribution(0.0, 1.0))
    return np.concatenate([values.ravel() for values in stream.take(_BLOCK_VALUES >> 10)])


@cache
def _block(seed: int, distribution: Distribution, dtype: str) -> memoryview:
    values = _values(seed) * np.float32(distribution.std) + np.float32(distribution.mean)
    return memoryview(encode(values, dtype))


def spec_of(*, true_width: bool, layers: int, text_layers: int) -> SynthSpec:
    """A tiny checkpoint or one of the real widths, of so many DiT blocks and text encoder layers."""
    if not true_width:
        return SynthSpec(dit=tiny_dit(layers=layers), text=tiny_text(layers=text_layers))
    wide = tiny_dit(layers=layers, refiner_layers=2, hidden=5376, heads=56, head_dim=128, ffn=14336)
    return SynthSpec(dit=wide, text=true_width_text(layers=text_layers))


def require_room(folder: Path, needed: int) -> None:
    """Check that a run's files fit on a folder's disk, before anything is written.

    Raises:
        UsageError: they do not; names what is needed and free in GiB.
    """
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise UsageError(
            f"{folder} needs {gib(needed)} and {gib(free)} are free",
            why="the checkpoint, its snapshot and its AdaLN tables would not fit",
            fix="Name a folder on another disk with --work-dir, or ask for fewer --layers.",
            needed_bytes=needed,
            free_bytes=free,
        )


def write(folder: Path, spec: SynthSpec, progress: Callable[[int], None] = lambda written: None) -> Path:
    """Write ``folder/FL2VA`` and bring it to the disk, out of the page cache; returns it.

    Args:
        progress: called with the bytes just written; they add up to ``planned_bytes(spec)``.
    """
    partition = spec.partitions[0]
    root = folder / partition.folder
    dit = dit_plans(spec.dit, layout=spec.layout, scope=f"{partition.folder}.transformer", outliers=False)
    text = text_plans(spec.text, outliers=False)
    for name, stem, plans in (("transformer", "diffusion_pytorch_model", dit), ("text_encoder", "model", text)):
        repeated = _repeated(plans)
        write_part(root / name, stem, repeated, seed=spec.seed, limit=spec.shard_bytes, progress=progress)
    _block.cache_clear()
    _values.cache_clear()
    write_vaes(root)
    write_side_files(root, partition, spec)
    files = sorted(root.rglob("*.safetensors"))
    for file in files:
        fsync(file)
    drop(files)
    return root


def write_video_vae(folder: Path, vae: VitVae) -> None:
    """Write a ``video_vae/`` folder with the released network."""
    write_vit_vae(folder, vae, _repeated(vae.plans("video_vae")))
    _block.cache_clear()
    _values.cache_clear()


def _repeated(plans: Sequence[TensorPlan]) -> list[RepeatedPlan]:
    return [RepeatedPlan(**{field.name: getattr(plan, field.name) for field in fields(plan)}) for plan in plans]


__all__ = ["RepeatedPlan", "planned_bytes", "require_room", "spec_of", "write", "write_video_vae"]
