# SPDX-License-Identifier: Apache-2.0
"""Random adapters of each published kind for a synthetic checkpoint, and broken ones for whoever tests refusals.

Factors are ``N(0, 1/wide)`` and ``N(0, strength² / rank)``, so that the low-rank part of a layer's output is about
``strength`` times as long as its input; whole differences are ``strength`` times as long as what they change.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from vllm_h3_plugin.checkpoint.adapter import CONFIG, WEIGHTS
from vllm_h3_plugin.checkpoint.adapter_layout import (
    BASE_MODEL,
    DEFAULT_A,
    DEFAULT_B,
    FASTH3_FORMAT,
    FASTH3_MODEL,
    FLASHGEN_ALPHA,
    FLASHGEN_FILE,
    FLASHGEN_FORMAT,
    FLASHGEN_POSITIONS,
    FLASHGEN_RANK,
    PLAIN_A,
    PLAIN_B,
    TURBO_FORMAT,
    TURBO_RANK,
    DitConfig,
    Factors,
    Kind,
    fasth3_modules,
    flashgen_layers,
    native_linears,
    turbo_file,
    turbo_layers,
)
from vllm_h3_plugin.checkpoint.layout import FP32_LAYERS, TensorSpec
from vllm_h3_plugin.checkpoint.synthetic.shards import header
from vllm_h3_plugin.checkpoint.synthetic.spec import tiny_dit
from vllm_h3_plugin.checkpoint.synthetic.values import Distribution, RowStream, encode
from vllm_h3_plugin.errors import UsageError

Break = Literal[
    "other-width",
    "other-model",
    "missing-pair",
    "missing-layer",
    "wrong-dtype",
    "truncated",
    "nan",
    "inf",
    "wrong-rank",
]
BREAKS: tuple[Break, ...] = get_args(Break)
_FASTH3_RANK, _PEFT_RANK = 16, 8
_PEFT_LAYERS = ("attn.out_proj", "mlp.fc1", "mlp.fc2")


@dataclass(frozen=True)
class AdapterSpec:
    """A synthetic adapter.

    Attributes:
        kind: see :mod:`vllm_h3_plugin.checkpoint.adapter_layout`.
        dit: shape of the model that it is for.
        steps: in a Turbo file's name.
        task: in a Turbo file's name: ``fl2v`` or ``ref2v``.
        res_768p: in a Turbo file's name: the shorter shift.
        alpha: of a Turbo file; None: it declares none.
        strength: length of what it adds, over the length of what is there.
        broken: make it one of these.
        seed: the same seed and options give the same bytes.
    """

    kind: Kind
    dit: DitConfig
    steps: int = 8
    task: str = "fl2v"
    res_768p: bool = True
    alpha: float | None = float(TURBO_RANK)
    strength: float = 0.5
    broken: Break | None = None
    seed: int = 0


@dataclass(frozen=True)
class _Tensor:
    """A tensor to write: ``std`` of its numbers, and dtype bits in place of the first number where it is broken."""

    spec: TensorSpec
    std: float
    first: bytes = b""


def write_adapter(folder: Path, spec: AdapterSpec) -> Path:
    """Write an adapter into a folder under its published file name.

    Returns:
        The path to serve: a file, or for PEFT the folder ``peft`` in it.

    Raises:
        UsageError: the file is there already.
    """
    tensors, metadata = _break(list(_tensors(spec)), spec), _metadata(spec)
    if spec.kind == "fasth3":
        ends = [tensor.spec.name.rpartition(".")[2] for tensor in tensors]
        metadata["low_rank_tensors"] = str(ends.count("weight"))
        metadata["diff_tensors"] = str(ends.count("diff") + ends.count("diff_b"))
        metadata["set_weight_tensors"] = "0"
    if spec.kind == "peft":
        folder = folder / "peft"
    name = {"turbo": turbo_file(spec.steps, spec.task, res_768p=spec.res_768p), "flashgen": FLASHGEN_FILE}
    path = folder / name.get(spec.kind, WEIGHTS)
    if path.exists():
        raise UsageError(f"{path} is there", why="nothing is overwritten", fix="Name another folder.", path=str(path))
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(header([tensor.spec for tensor in tensors], metadata))
        for tensor in tensors:
            for number, block in enumerate(_data(tensor, spec.seed)):
                file.write(tensor.first + block[len(tensor.first) :] if number == 0 else block)
        if spec.broken == "truncated":
            file.truncate(file.tell() - 64)
    part.replace(path)
    if spec.kind != "peft":
        return path
    targets = sorted({tensor.spec.name.split(".lora_")[0].rpartition(".")[2] for tensor in tensors})
    said = {"peft_type": "LORA", "r": _PEFT_RANK, "lora_alpha": _PEFT_RANK, "target_modules": targets, "bias": "none"}
    (folder / CONFIG).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    return folder


def _tensors(spec: AdapterSpec) -> Iterator[_Tensor]:
    dit = replace(spec.dit, **_wider(spec.dit)) if spec.broken == "other-width" else spec.dit
    if spec.kind == "turbo":
        yield from _factors(turbo_layers(dit), TURBO_RANK, spec, DEFAULT_A, DEFAULT_B)
    elif spec.kind == "flashgen":
        layers = {f"transformer.{name}": factors for name, factors in flashgen_layers(dit).items()}
        yield from _factors(layers, FLASHGEN_RANK, spec, DEFAULT_A, DEFAULT_B)
    elif spec.kind == "peft":
        layers = {name: made for name, made in native_linears(dit).items() if name.endswith(_PEFT_LAYERS)}
        prefixed = {f"base_model.model.{name}": made for name, made in layers.items()}
        yield from _factors(prefixed, _PEFT_RANK, spec, PLAIN_A, PLAIN_B)
    else:
        yield from _fasth3(dit, spec)


def _factors(layers: Mapping[str, Factors], rank: int, spec: AdapterSpec, a: str, b: str) -> Iterator[_Tensor]:
    for name, shape in layers.items():
        yield _Tensor(TensorSpec(f"{name}{a}", (rank, shape.wide), "BF16"), 1 / math.sqrt(shape.wide))
        yield _Tensor(TensorSpec(f"{name}{b}", (shape.high, rank), "BF16"), spec.strength / math.sqrt(rank))


def _fasth3(dit: DitConfig, spec: AdapterSpec) -> Iterator[_Tensor]:
    """Factors of every block's linears, AdaLN's among them; differences of norms, biases and the FP32 layers.

    Norms that 0.28 cannot place (``fasth3.py`` ``_BLOCK_TARGETS``) are left out, as training may leave them unchanged.
    """
    for module, (native, shapes) in fasth3_modules(dit).items():
        if native.endswith(("q_norm", "k_norm", "final_norm")):
            continue
        weight = shapes["weight"]
        if len(weight) == 2 and native not in FP32_LAYERS:
            # FastH3's factors have no alpha; AdaLN's weights are a third as large as the others'.
            small = 0.3 if "adaln_proj" in native else 1.0
            wide = Factors(weight[1], weight[0])
            scaled = replace(spec, strength=spec.strength * small)
            yield from _factors({module: wide}, _FASTH3_RANK, scaled, PLAIN_A, PLAIN_B)
        else:
            std = spec.strength * (0.1 if len(weight) == 1 else 1 / math.sqrt(weight[1]))
            yield _Tensor(TensorSpec(f"{module}.diff", weight, "BF16"), std)
        if "bias" in shapes:
            yield _Tensor(TensorSpec(f"{module}.diff_b", shapes["bias"], "BF16"), 0.05 * spec.strength)


def _wider(dit: DitConfig) -> dict[str, Any]:
    other = tiny_dit(hidden=dit.hidden_size + 64, heads=dit.num_attention_heads, head_dim=dit.attention_head_dim)
    names = (
        "hidden_size",
        "time_embed_hidden_size",
        "time_embed_dim",
        "adaln_out_features",
        "final_adaln_out_features",
    )
    return {name: getattr(other, name) for name in names}


def _break(tensors: list[_Tensor], spec: AdapterSpec) -> Sequence[_Tensor]:
    last = max(i for i, tensor in enumerate(tensors) if ".lora_B" in tensor.spec.name)
    if spec.broken == "missing-pair":
        return tensors[:last] + tensors[last + 1 :]
    if spec.broken == "missing-layer":
        gone = next(tensor.spec.name for tensor in tensors if "blocks.0." in tensor.spec.name).partition("blocks.0.")
        return [tensor for tensor in tensors if not tensor.spec.name.startswith(f"{gone[0]}{gone[1]}")]
    change: dict[str, Callable[[_Tensor], _Tensor]] = {
        "other-model": lambda t: replace(t, spec=replace(t.spec, name=f"double_blocks.0.{t.spec.name}")),
        "wrong-dtype": lambda t: replace(t, spec=replace(t.spec, dtype="F8_E4M3")),
        "nan": lambda t: replace(t, first=b"\xc0\x7f"),
        "inf": lambda t: replace(t, first=b"\x80\x7f"),
        "wrong-rank": lambda t: replace(t, spec=replace(t.spec, shape=(t.spec.shape[0], t.spec.shape[1] + 8))),
    }
    if spec.broken in change:
        tensors[last] = change[spec.broken](tensors[last])
    return tensors


def _data(tensor: _Tensor, seed: int) -> Iterator[bytes]:
    spec = tensor.spec
    width = math.prod(spec.shape[1:])
    rows = RowStream(seed, spec.name, rows=spec.shape[0], width=width, distribution=Distribution(0.0, tensor.std))
    for values in rows.take(spec.shape[0]):
        yield bytes(values.size) if spec.dtype == "F8_E4M3" else encode(values, spec.dtype)


def _metadata(spec: AdapterSpec) -> dict[str, str]:
    if spec.kind == "turbo":
        return {"key_format": TURBO_FORMAT} | ({} if spec.alpha is None else {"alpha": f"{spec.alpha:g}"})
    if spec.kind == "flashgen":
        return {
            "key_format": FLASHGEN_FORMAT,
            "qkv_layout": "grouped",
            "lora_rank": str(FLASHGEN_RANK),
            "lora_alpha": f"{FLASHGEN_ALPHA:g}",
            "tasks": "t2va",
            "base_schedule": ",".join(map(str, FLASHGEN_POSITIONS)),
        }
    if spec.kind == "fasth3":
        return {
            "format": FASTH3_FORMAT,
            "finetuned_model": FASTH3_MODEL,
            "base_model": BASE_MODEL,
            "rank": str(_FASTH3_RANK),
        }
    return {"format": "pt"}
