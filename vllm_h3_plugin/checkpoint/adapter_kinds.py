# SPDX-License-Identifier: Apache-2.0
"""Names, pairs, shapes and dtypes of an adapter's tensors, kind by kind, against the model's own tables."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_h3_plugin.checkpoint.adapter_layout import (
    BASE_MODEL,
    DEFAULT_A,
    DEFAULT_B,
    FLASHGEN_ALPHA,
    FLASHGEN_FILE,
    FLASHGEN_RANK,
    FLASHGEN_STEPS,
    PEFT_RANKS,
    PLAIN_A,
    PLAIN_B,
    TURBO_RANK,
    DitConfig,
    Factors,
    fasth3_modules,
    fasth3_role,
    flashgen_layers,
    native_linears,
    turbo_layers,
)
from vllm_h3_plugin.checkpoint.adapter_values import EXPONENT
from vllm_h3_plugin.checkpoint.faults import FaultLog
from vllm_h3_plugin.checkpoint.layout import FP32_LAYERS
from vllm_h3_plugin.checkpoint.safetensors_header import ShardFile, TensorRecord, read_header
from vllm_h3_plugin.errors import AdapterError

_AGAIN = "Download it again; if it is whole, it was made for another model."
_OTHER = "Use an adapter that was made for this checkpoint; `vllm-h3 inspect` tells what it is."
_PREFIXES = ("base_model.model.", "transformer.")


def turbo(header: ShardFile, config: DitConfig) -> tuple[int, int]:
    """(rank, layers) of a Turbo file.

    Raises:
        AdapterError: it does not fit.
    """
    pairs = _pairs(header, DEFAULT_A, DEFAULT_B)
    return _all_of(header, pairs, turbo_layers(config), TURBO_RANK)


def flashgen(header: ShardFile, config: DitConfig) -> tuple[int, int]:
    """(rank, layers) of a FlashGen file.

    Raises:
        AdapterError: it does not fit.
    """
    pairs = _pairs(header, DEFAULT_A, DEFAULT_B)
    bare = {name.removeprefix("transformer."): pair for name, pair in pairs.items()}
    for name in pairs:
        if not name.startswith("transformer.") and name in flashgen_layers(config):
            raise _error(header, f"{name}{DEFAULT_A}", "a FlashGen file's names begin with `transformer.`", _AGAIN)
    return _all_of(header, bare, flashgen_layers(config), FLASHGEN_RANK)


def flashgen_metadata(header: ShardFile) -> None:
    """Hold a FlashGen file's name and metadata against what the host takes (``npu/lora.py``).

    Raises:
        AdapterError: it is of another version.
    """
    said, file = header.metadata, header.path
    if file.name != FLASHGEN_FILE:
        why = "the host takes a FlashGen file by its published name alone"
        raise AdapterError(f"adapter {file}", why=why, fix=f"Name it {FLASHGEN_FILE}, if that is what it is.")
    tasks = {part.strip().lower() for part in said.get("tasks", "").split(",") if part.strip()}
    positions = [part for part in said.get("base_schedule", "").split(",") if part.strip()]
    wanted = {
        "qkv_layout": (said.get("qkv_layout"), "grouped"),
        "lora_rank": (said.get("lora_rank"), str(FLASHGEN_RANK)),
        "lora_alpha": (_whole(said.get("lora_alpha")), _whole(str(FLASHGEN_ALPHA))),
        "tasks": (",".join(sorted(tasks)), "t2va"),
        "base_schedule positions": (len(positions), FLASHGEN_STEPS + 1),
    }
    for key, (found, expected) in wanted.items():
        if found != expected:
            why = f"FlashGen v1.0 has {expected!r}"
            raise AdapterError(f"adapter {file}: {key} {found!r} in its metadata", why=why, fix=_AGAIN)


def fasth3(header: ShardFile, config: DitConfig) -> tuple[int, int]:
    """(largest rank, linear layers changed) of a FastH3 v1 adapter.

    Raises:
        AdapterError: it does not fit, or it is the variant with sparse attention.
    """
    modules = fasth3_modules(config)
    factors: dict[str, dict[str, TensorRecord]] = {}
    counts = {"low_rank_tensors": 0, "diff_tensors": 0, "set_weight_tensors": 0}
    for record in header.tensors:
        split = fasth3_role(record.name)
        if split is not None and split[1] == "set":
            raise _sparse(header, record)
        if split is None or split[0] not in modules:
            raise _unknown(header, record.name, split[0] if split else record.name, list(modules))
        module, role = split
        _dtype(header, record)
        native, shapes = modules[module]
        if role in ("a", "b"):
            counts["low_rank_tensors"] += 1
            factors.setdefault(module, {})[role] = record
            continue
        counts["diff_tensors"] += 1
        wanted = shapes.get("bias" if role == "diff_b" else "weight")
        if wanted is None:
            raise _error(header, record.name, f"{module} has no bias in this model", _OTHER)
        if native.endswith(("attn.qkv_proj", "mlp.fc1")):
            why = "it is a whole difference of a matrix that the native layout fuses, which the host cannot place"
            raise _error(header, record.name, why, "Use an adapter with low-rank factors there, as the release has.")
        _shape(header, record, wanted)
    rank = 0
    for module, pair in factors.items():
        native, shapes = modules[module]
        high, wide = shapes["weight"]
        rank = max(rank, _pair(header, module, pair, Factors(wide, high), None))
    _thirds(header, factors)
    _counts(header, counts)
    _every_block(header, factors, config)
    return rank, len(factors)


def fasth3_metadata(header: ShardFile) -> None:
    """Whether a FastVideo container is the FastH3 release for H3 (``fasth3.py`` ``_is_fasth3_release``).

    Raises:
        AdapterError: it is another.
    """
    said = header.metadata
    identity, base = said.get("finetuned_model", ""), said.get("base_model")
    student = identity.lower().startswith("fastvideo/") and "fasth3" in identity.lower()
    if not student or (base is not None and base.casefold() != BASE_MODEL.casefold()):
        raise AdapterError(
            f"adapter {header.path}",
            why=f"it is a FastVideo container of {identity or 'no model that it names'} over {base or 'no base'}, and "
            f"only FastH3 over {BASE_MODEL} is known",
            fix="Use the release's dense-datafree/adapter_model.safetensors.",
        )


def peft(header: ShardFile, config: DitConfig, said: Mapping[str, Any], source: Path) -> tuple[int, int]:
    """(rank, layers) of a generic PEFT adapter in native names.

    Args:
        said: its ``adapter_config.json``.
        source: that file.

    Raises:
        AdapterError: it does not fit.
    """
    rank = said.get("r")
    if type(rank) is not int or not 1 <= rank <= PEFT_RANKS[-1]:
        why = f"a rank is a whole number from 1 to {PEFT_RANKS[-1]}"
        raise AdapterError(f"adapter {source}: r={rank!r}", why=why, fix="Train it with a smaller rank.")
    if said.get("peft_type", "LORA") != "LORA" or said.get("use_dora") or said.get("bias", "none") != "none":
        what = {key: said.get(key) for key in ("peft_type", "use_dora", "bias") if key in said}
        raise AdapterError(f"adapter {source}: {what}", why="only plain LoRA is served", fix="Train it as plain LoRA.")
    layers = native_linears(config)
    pairs = {}
    for name, pair in _pairs(header, PLAIN_A, PLAIN_B).items():
        bare = name
        for prefix in _PREFIXES:
            bare = bare.removeprefix(prefix)
        if bare not in layers:
            raise _unknown(header, next(iter(pair.values())).name, bare, list(layers))
        if bare in FP32_LAYERS:
            fix = "Use an adapter that leaves the timestep embedder alone." if "embedder" in bare else "Leave it out."
            raise _error(header, name, "this layer is FP32, and the host's low-rank path is BF16", fix)
        if bare.endswith("attn.qkv_proj"):
            raise _error(
                header,
                name,
                "a PEFT adapter of the fused qkv_proj does not say whether its rows are grouped by head",
                "Save it with to_q, to_k and to_v apart, as Turbo files are.",
            )
        pairs[bare] = pair
    for bare, pair in pairs.items():
        _pair(header, bare, pair, layers[bare], rank)
    return rank, len(pairs)


def _pairs(header: ShardFile, a: str, b: str) -> dict[str, dict[str, TensorRecord]]:
    """Layer -> its factors; names are as the file has them."""
    pairs: dict[str, dict[str, TensorRecord]] = {}
    for record in header.tensors:
        side, end = ("a", a) if record.name.endswith(a) else ("b", b)
        if not record.name.endswith(end):
            raise _error(header, record.name, f"it is no factor: names end in {a} or {b}", _AGAIN)
        _dtype(header, record)
        pairs.setdefault(record.name.removesuffix(end), {})[side] = record
    return pairs


def _all_of(
    header: ShardFile, pairs: Mapping[str, dict[str, TensorRecord]], layers: Mapping[str, Factors], rank: int
) -> tuple[int, int]:
    unknown = next((name for name in pairs if name not in layers), None)
    if unknown is not None:
        raise _unknown(header, next(iter(pairs[unknown].values())).name, unknown, list(layers))
    for name, pair in pairs.items():
        _pair(header, name, pair, layers[name], rank)
    missing = [name for name in layers if name not in pairs]
    if missing:
        why = f"{len(missing)} of {len(layers)} layers have no factors, first {missing[0]}"
        raise AdapterError(f"adapter {header.path} is not whole", why=why, fix=_AGAIN, missing=missing[:8])
    return rank, len(pairs)


def _pair(header: ShardFile, layer: str, pair: Mapping[str, TensorRecord], want: Factors, rank: int | None) -> int:
    """The rank of a layer's two factors."""
    for side in ("a", "b"):
        if side not in pair:
            name = next(iter(pair.values())).name
            raise _error(header, name, f"its lora_{side.upper()} is missing: factors go in pairs", _AGAIN)
    a, b = pair["a"], pair["b"]
    if len(a.shape) != 2 or len(b.shape) != 2:
        odd = a if len(a.shape) != 2 else b
        raise _error(header, odd.name, f"its shape is {list(odd.shape)}, and a factor is a matrix", _AGAIN)
    has = a.shape[0]
    if b.shape[1] != has:
        raise _error(header, b.name, f"its rank is {b.shape[1]} and that of {a.name} is {has}", _AGAIN)
    if rank is not None and has != rank:
        raise _error(header, a.name, f"its rank is {has}, and this adapter's is {rank}", _AGAIN)
    _shape(header, a, (has, want.wide))
    _shape(header, b, (want.high, has))
    return has


def _shape(header: ShardFile, record: TensorRecord, want: tuple[int, ...]) -> None:
    if record.shape != want:
        why = f"its shape is {list(record.shape)}, and this model takes {list(want)}: it was made for another width"
        raise _error(header, record.name, why, _OTHER)


def _dtype(header: ShardFile, record: TensorRecord) -> None:
    if record.dtype not in EXPONENT:
        why = f"it is {record.dtype}; an adapter runs beside the weights unquantized"
        raise _error(header, record.name, why, f"Use the file in {', '.join(EXPONENT)}.")


def _unknown(header: ShardFile, tensor: str, name: str, known: list[str]) -> AdapterError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    why = f"this model has no layer {name}" + (f"; the nearest is {near[0]}" if near else "")
    return _error(header, tensor, why, _OTHER)


def _sparse(header: ShardFile, record: TensorRecord) -> AdapterError:
    return _error(
        header,
        record.name,
        "it is FastH3's variant with Video Sparse Attention, whose gates mean something to that kernel alone, and this "
        "plugin's attention is exact",
        "Use the release's dense variant (dense-datafree/adapter_model.safetensors).",
    )


def _thirds(header: ShardFile, factors: Mapping[str, Mapping[str, TensorRecord]]) -> None:
    """q, k and v are one matrix in the native layout: a change comes for all three or for none."""
    for module in factors:
        if module.endswith((".to_q", ".to_k", ".to_v")):
            stem = module[:-1]
            for third in "qkv":
                if f"{stem}{third}" not in factors:
                    raise _error(header, module, f"{stem}{third} has no factors, and q, k and v are one matrix", _AGAIN)


def _counts(header: ShardFile, counts: Mapping[str, int]) -> None:
    for key, found in counts.items():
        said = header.metadata.get(key)
        if said != str(found):
            why = f"its metadata say {key}={said!r} and it holds {found}"
            raise AdapterError(f"adapter {header.path} is not whole", why=why, fix=_AGAIN)


def _every_block(header: ShardFile, factors: Mapping[str, object], config: DitConfig) -> None:
    prefixes = [f"token_refiner.refiner_blocks.{i}." for i in range(config.token_refiner_num_layers)]
    prefixes += [f"transformer_blocks.{i}." for i in range(config.num_layers)]
    for prefix in prefixes:
        if not any(module.startswith(prefix) for module in factors):
            why = f"it does not change {prefix.rstrip('.')}, and FastH3 changes every block"
            raise AdapterError(f"adapter {header.path} is not whole", why=why, fix=_AGAIN)


def _whole(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def _error(header: ShardFile, tensor: str, why: str, fix: str) -> AdapterError:
    return AdapterError(f"adapter {header.path}: {tensor}", why=why, fix=fix, tensor=tensor)


def fasth3_changes(file: Path, config: DitConfig) -> frozenset[str]:
    """Native names of the tensors that a FastH3 adapter changes; it was found to fit."""
    header = read_header(file, FaultLog())
    found = set()
    for record in header.tensors if header is not None else ():
        split = fasth3_role(record.name)
        assert split is not None  # it was checked
        native, _ = fasth3_modules(config)[split[0]]
        found.add(f"{native}.{'bias' if split[1] == 'diff_b' else 'weight'}")
    return frozenset(found)
