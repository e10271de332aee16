# SPDX-License-Identifier: Apache-2.0
"""Compare the tensors that a part's files hold with those that the model needs: names, shapes, dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from vllm_h3_plugin.checkpoint.faults import FaultLog
from vllm_h3_plugin.checkpoint.layout import TensorSpec
from vllm_h3_plugin.checkpoint.shard_set import ShardSet


def compare(
    folder: Path,
    expected: Mapping[str, TensorSpec],
    shards: ShardSet,
    log: FaultLog,
    *,
    ignored: Callable[[str], bool] = lambda name: False,
) -> None:
    """Note every tensor that is absent, extra, or of another shape or dtype than ``config.json`` makes it.

    Tensors of a shard that is itself at fault are not reported again.

    Args:
        ignored: names that the host reads and drops; they may be there or not.
    """
    held = {tensor.name for tensor in shards.tensors}
    absent = [
        (folder, f"tensor {name}", "no shard holds it, and the model needs it")
        for name in expected
        if name not in held and name not in shards.lost
    ]
    if shards.files or shards.lost:
        log.add_many("tensor_absent", absent, fix="Download this part's shards and index of one release.")
    extra = [
        (tensor.file, f"tensor {tensor.name}", "the model that config.json describes has no place for it")
        for tensor in shards.tensors
        if tensor.name not in expected and not ignored(tensor.name)
    ]
    log.add_many("tensor_extra", extra, fix="config.json and shards are of different models: take both from one.")
    shapes, dtypes = [], []
    for tensor in shards.tensors:
        spec = expected.get(tensor.name)
        if spec is None:
            continue
        what = f"tensor {tensor.name}"
        if tensor.shape != spec.shape:
            why = f"its shape is {list(tensor.shape)} and config.json makes it {list(spec.shape)}"
            shapes.append((tensor.file, what, why))
        elif tensor.dtype != spec.dtype:
            dtypes.append((tensor.file, what, f"it is {tensor.dtype} and the release has it in {spec.dtype}"))
    log.add_many("tensor_shape", shapes, fix="config.json and shards are of different models: take both from one.")
    log.add_many(
        "tensor_dtype",
        dtypes,
        fix="Use the original BF16 release: this server quantizes while it loads, and reads no converted weights.",
    )
