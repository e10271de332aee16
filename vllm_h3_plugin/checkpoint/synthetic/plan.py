# SPDX-License-Identifier: Apache-2.0
"""How each tensor of a synthetic checkpoint is put together from random rows, in either layout.

Fused tensors are made of the streams that the split layout stores alone (``q``, ``k``, ``v``; ``gate``, ``up``), so
that the native and the Diffusers checkpoint of one seed hold the same weights without either being built first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vllm_h3_plugin.checkpoint.layout import (
    FP32_BUFFERS,
    FP32_TENSORS,
    DitConfig,
    TensorSpec,
    TextEncoderConfig,
    dit_tensors,
    text_encoder_tensors,
    to_diffusers,
)
from vllm_h3_plugin.checkpoint.synthetic.values import Distribution, RowStream, encode


@dataclass(frozen=True)
class TensorPlan:
    """One tensor: what it is, and the streams that its rows come from.

    Attributes:
        spec: name, shape and dtype as written.
        key: names the random numbers; the native name, scoped by part.
        streams: stream name -> rows that the whole stream has.
        segments: (stream name, rows), in the order of the tensor's rows.
        outliers: whether some rows of each stream are made large.
    """

    spec: TensorSpec
    key: str
    streams: tuple[tuple[str, int], ...]
    segments: tuple[tuple[str, int], ...]
    distribution: Distribution
    outliers: bool = False

    def data(self, seed: int) -> Iterator[bytes]:
        """The tensor's bytes, a few MB at a time."""
        if self.spec.name in FP32_BUFFERS:
            yield _inv_freq(self.spec.numel)
            return
        width = math.prod(self.spec.shape[1:])
        streams = {
            name: RowStream(
                seed,
                f"{self.key}#{name}",
                rows=rows,
                width=width,
                distribution=self.distribution,
                outliers=self.outliers,
            )
            for name, rows in self.streams
        }
        for name, rows in self.segments:
            for values in streams[name].take(rows):
                yield encode(values, self.spec.dtype)


def _inv_freq(count: int) -> bytes:
    """RoPE's inverse frequencies: 10000^-(2i / 2n), i = 0 … n-1 (MiniMaxH3Rope)."""
    exponent = np.arange(0, 2 * count, 2, dtype=np.float32) / np.float32(2 * count)
    return encode(1.0 / np.float32(10000.0) ** exponent, "F32")


def _distribution(spec: TensorSpec) -> Distribution:
    """Values for which activations keep their scale through a network of any width."""
    name = spec.name
    if len(spec.shape) == 1:
        if name.endswith(".bias"):
            return Distribution(0.0, 0.1 if ".adaln_proj." in name else 0.02)
        return Distribution(1.0, 0.02)  # a norm's weight
    if name.endswith("embed_tokens.weight"):
        return Distribution(0.0, 1.0)
    if name.endswith(("pos_embed.weight", "patch_embed.proj.weight")):
        return Distribution(0.0, 0.02)
    fan_in = math.prod(spec.shape[1:])
    return Distribution(0.0, (0.3 if ".adaln_proj." in name else 1.0) / math.sqrt(fan_in))


def _takes_outliers(name: str, spec: TensorSpec) -> bool:
    """The linears that a recipe may quantize: not FP32, not AdaLN, not the vision tower, no embedding."""
    kept = name in FP32_TENSORS or ".adaln_proj." in name or "visual" in name or "embed_tokens" in name
    return len(spec.shape) == 2 and not kept


def dit_plans(config: DitConfig, *, layout: str, scope: str, outliers: bool) -> list[TensorPlan]:
    """Plans of every DiT tensor in ``native`` or ``diffusers`` layout; ``scope`` keeps two DiTs of one seed apart."""
    result: list[TensorPlan] = []
    for spec in dit_tensors(config).values():
        streams, native = _native_rows(spec, config)
        distribution, large = _distribution(spec), outliers and _takes_outliers(spec.name, spec)
        key = f"{scope}.{spec.name}"
        if layout == "native":
            result.append(TensorPlan(spec, key, streams, native, distribution, large))
            continue
        for target in to_diffusers(spec.name):
            segments = {
                "whole": native,
                "swapped": native[::-1],
                **{name: ((name, rows),) for name, rows in streams},
            }[target.piece]
            shape = (sum(rows for _, rows in segments), *spec.shape[1:])
            wanted = tuple((name, rows) for name, rows in streams if name in dict(segments))
            written = TensorSpec(target.name, shape, spec.dtype)
            result.append(TensorPlan(written, key, wanted, segments, distribution, large))
    return result


def _native_rows(
    spec: TensorSpec, config: DitConfig
) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
    rows = spec.shape[0]
    if spec.name.endswith(".attn.qkv_proj.weight"):
        streams = tuple((name, rows // 3) for name in ("q", "k", "v"))
        head = tuple((name, config.attention_head_dim) for name in ("q", "k", "v"))
        return streams, head * config.num_attention_heads
    if spec.name.endswith(".mlp.fc1.weight"):
        halves = (("gate", rows // 2), ("up", rows // 2))
        return halves, halves
    return (("all", rows),), (("all", rows),)


def text_plans(config: TextEncoderConfig, *, outliers: bool) -> list[TensorPlan]:
    """Plans of every text encoder tensor, and of the final norm that the files hold and the host drops."""
    specs = list(text_encoder_tensors(config).values())
    specs.append(TensorSpec("model.language_model.norm.weight", (config.hidden_size,), "BF16"))
    return [
        TensorPlan(
            spec,
            f"text_encoder.{spec.name}",
            (("all", spec.shape[0]),),
            (("all", spec.shape[0]),),
            _distribution(spec),
            outliers and _takes_outliers(spec.name, spec),
        )
        for spec in specs
    ]
