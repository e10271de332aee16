# SPDX-License-Identifier: Apache-2.0
"""What a precision plan weighs: resident parameters and bytes by layer, part and precision. Imports no torch.

Counted on one rank without tensor parallelism. What a request needs on top (activations, caches) is not in here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from vllm_h3_plugin.checkpoint.layout import (
    DitConfig,
    LinearSpec,
    TensorSpec,
    TextEncoderConfig,
    dit_tensors,
    linear_layers,
    text_encoder_tensors,
)
from vllm_h3_plugin.quantization.plan import ADALN_SUFFIX, PrecisionPlan
from vllm_h3_plugin.quantization.precision import Precision
from vllm_h3_plugin.quantization.recipe import Adaln

GIB = 2**30
_SCALE_BYTES = 4
_WORDS = {"BF16": Precision.BF16, "F32": Precision.FP32}


@dataclass(frozen=True)
class Weight:
    """Parameters that share a part and a precision.

    Attributes:
        label: module path of a linear layer or a group of them; for the rest, what it is.
        part: ``transformer``, ``text_encoder``, ``vision`` or ``vae``.
        precision: of the weights; biases and scales are counted with them.
        rule: number of the deciding rule, from 1; None for what is no linear layer.
        count: number of linear layers, or of tensors for the rest.
        parameters: weights and biases.
        nbytes: resident bytes.
    """

    label: str
    part: str
    precision: Precision
    rule: int | None
    count: int
    parameters: int
    nbytes: int


@dataclass(frozen=True)
class Total:
    """Sum over some weights."""

    parameters: int
    nbytes: int

    @property
    def gib(self) -> float:
        """Bytes in GiB (2^30)."""
        return self.nbytes / GIB


def linear_bytes(spec: LinearSpec, precision: Precision) -> int:
    """Resident bytes of one linear layer: weight, FP32 scales, and bias (never quantized)."""
    weight = spec.in_features * spec.out_features * precision.weight_bytes
    scales = precision.scale_count(spec.out_features) * _SCALE_BYTES
    bias = spec.out_features * (4 if precision is Precision.FP32 else 2) if spec.bias else 0
    return weight + scales + bias


def linear_weights(plan: PrecisionPlan, linears: Iterable[LinearSpec]) -> list[Weight]:
    """One entry per linear layer, in module order. AdaLN that is kept as a table has no resident bytes."""
    numbers = {rule: number for number, rule in enumerate(plan.recipe.rules, 1)}
    result = []
    for spec in linears:
        given = plan[spec.path]
        on_disk = plan.recipe.adaln is Adaln.TABLE and spec.path.endswith(ADALN_SUFFIX)
        nbytes = 0 if on_disk else linear_bytes(spec, given.precision)
        result.append(Weight(spec.path, spec.part, given.precision, numbers[given.rule], 1, spec.parameters, nbytes))
    return result


def other_weights(dit: DitConfig, text: TextEncoderConfig, vision: Precision = Precision.BF16) -> list[Weight]:
    """Norms, embeddings and everything else that is no linear layer, one entry per part and dtype.

    Args:
        vision: what the vision tower is resident in; it is BF16 in the files.
    """
    linears = linear_layers(dit, text)
    taken = {(spec.part == "transformer", source) for spec in linears for source in spec.sources}
    tensors: dict[tuple[str, str], list[TensorSpec]] = {}
    for in_dit, specs in ((True, dit_tensors(dit)), (False, text_encoder_tensors(text))):
        for name, tensor in specs.items():
            if (in_dit, name) not in taken:
                visual = name.startswith("model.visual.")
                part = "transformer" if in_dit else "vision" if visual else "text_encoder"
                if part == "vision" and vision is Precision.FP32:
                    tensor = replace(tensor, dtype="F32")
                tensors.setdefault((part, tensor.dtype), []).append(tensor)
    return [
        Weight(
            "(norms, embeddings, other)",
            part,
            _WORDS[dtype],
            None,
            len(group),
            sum(tensor.numel for tensor in group),
            sum(tensor.nbytes for tensor in group),
        )
        for (part, dtype), group in tensors.items()
    ]


def grouped(weights: Iterable[Weight]) -> list[Weight]:
    """Put layers that differ in their index alone on one line: ``blocks.{0..49}.attn.qkv_proj``.

    Layers of one group share precision and rule; a gap in the indices is spelled out (``{0..3,7}``).
    """
    groups: dict[tuple[str, str, str, Precision, int | None], list[tuple[int | None, Weight]]] = {}
    for weight in weights:
        before, index, after = _split_index(weight.label)
        key = (weight.part, before, after, weight.precision, weight.rule)
        groups.setdefault(key, []).append((index, weight))
    result = []
    for (part, before, after, precision, rule), members in groups.items():
        indices = [index for index, _ in members if index is not None]
        total = total_of(weight for _, weight in members)
        result.append(
            Weight(
                before + (_ranges(indices) if indices else "") + after,
                part,
                precision,
                rule,
                sum(weight.count for _, weight in members),
                total.parameters,
                total.nbytes,
            )
        )
    return result


def total_of(weights: Iterable[Weight]) -> Total:
    """Sum of parameters and bytes."""
    listed = list(weights)
    return Total(sum(weight.parameters for weight in listed), sum(weight.nbytes for weight in listed))


def _split_index(path: str) -> tuple[str, int | None, str]:
    segments = path.split(".")
    for position, segment in enumerate(segments):
        if segment.isdigit():
            before = "".join(f"{name}." for name in segments[:position])
            after = "".join(f".{name}" for name in segments[position + 1 :])
            return before, int(segment), after
    return path, None, ""


def _ranges(indices: list[int]) -> str:
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    if len(indices) == 1:
        return str(indices[0])
    return "{" + ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs) + "}"
