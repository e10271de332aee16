# SPDX-License-Identifier: Apache-2.0
"""Hold an adapter against the model before it touches a weight: kind, names, pairs, shapes, dtypes, values.

A file that does not fit would show as a clip of noise, as an error in the middle of a request, or not at all. Importing
this module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

from vllm_h3_plugin.checkpoint import adapter_kinds
from vllm_h3_plugin.checkpoint.adapter_layout import (
    FASTH3_FORMAT,
    FASTH3_STEPS,
    FLASHGEN_ALPHA,
    FLASHGEN_FORMAT,
    FLASHGEN_STEPS,
    TURBO_DEFAULT_ALPHA,
    TURBO_FORMAT,
    DitConfig,
    Kind,
    behind_table,
    parse_turbo_name,
)
from vllm_h3_plugin.checkpoint.adapter_values import refuse_values
from vllm_h3_plugin.checkpoint.faults import FaultLog
from vllm_h3_plugin.checkpoint.json_file import read_json
from vllm_h3_plugin.checkpoint.page_cache import drop
from vllm_h3_plugin.checkpoint.safetensors_header import ShardFile, read_header
from vllm_h3_plugin.errors import AdapterError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KINDS = "Turbo and FlashGen files, dense FastH3 v1 adapters and PEFT folders are known."


@dataclass(frozen=True)
class Adapter:
    """An adapter that fits the model.

    Attributes:
        kind: see :mod:`.adapter_layout`.
        path: as it was named.
        file: the weights.
        rank: of its factors; of the largest where they differ.
        alpha: the factors are multiplied by ``alpha / rank``; ``rank`` where nothing is said.
        tasks: kinds of clip that it was made for; empty: it does not say.
        steps: denoise evaluations that it was made for; None: any number.
        video_shift, audio_shift: of the schedule that it was made for; None: the checkpoint's.
        layers: linear layers that it changes.
        nbytes: of its tensors.
        adaln, embedder: the first of its names that changes AdaLN, and the timestep embedder; None if none does.
        identity: 16 hex digits of path, size, time of change and header.
        undeclared: what a Turbo file's metadata usually say and these do not.
    """

    kind: Kind
    path: Path
    file: Path
    rank: int
    alpha: float
    tasks: tuple[str, ...]
    steps: int | None
    video_shift: float | None
    audio_shift: float | None
    layers: int
    nbytes: int
    adaln: str | None
    embedder: str | None
    identity: str
    undeclared: tuple[str, ...] = ()

    @property
    def fused(self) -> bool:
        """Whether it becomes a part of the weights while they load, and cannot be taken off."""
        return self.kind == "fasth3"

    def as_dict(self) -> dict[str, Any]:
        """The adapter as a JSON object."""
        return {**asdict(self), "path": str(self.path), "file": str(self.file)}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Adapter:
        """What :meth:`as_dict` made, back again."""
        lists = {name: tuple(facts[name]) for name in ("tasks", "undeclared")}
        return cls(**{**facts, **lists, "path": Path(facts["path"]), "file": Path(facts["file"])})


_CHECKED: dict[tuple[object, ...], Adapter] = {}
_KEPT = 64
_ONE_AT_A_TIME = Lock()


def check_adapter(path: Path | str, config: DitConfig) -> Adapter:
    """Read an adapter's header and every value, and hold them against a DiT. A file that was found good is not read
    again while it keeps its size and time of change.

    Args:
        path: a safetensors file, or a folder with one.
        config: of the DiT that it is for.

    Raises:
        AdapterError: it does not fit; names the file, the tensor, the reason and the way out.
    """
    path = Path(path)
    file, peft = _weights(path)
    stat = file.stat()
    stamp = peft.stat().st_mtime_ns if peft is not None else 0
    key = (str(path), str(file), stat.st_size, stat.st_mtime_ns, stat.st_ino, stamp, config)
    with _ONE_AT_A_TIME:
        found = _CHECKED.get(key)
        if found is None:
            found = _check(path, file, peft, config)
            while len(_CHECKED) >= _KEPT:
                del _CHECKED[next(iter(_CHECKED))]
            _CHECKED[key] = found
    return found


def _weights(path: Path) -> tuple[Path, Path | None]:
    """The safetensors file, and the PEFT config beside it if the path is a PEFT folder."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise AdapterError(f"adapter {path}", why="it is no .safetensors file", fix="Give the file or its folder.")
        return path, None
    if not path.is_dir():
        raise AdapterError(f"adapter {path}", why="there is no such file or folder", fix="Check the path.")
    if (path / CONFIG).is_file():
        if not (path / WEIGHTS).is_file():
            raise AdapterError(f"adapter {path}", why=f"it has {CONFIG} and no {WEIGHTS}", fix="Download it again.")
        return path / WEIGHTS, path / CONFIG
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return files[0], None
    held = ", ".join(file.name for file in files[:4]) or "none"
    raise AdapterError(f"adapter {path}", why=f"it holds {len(files)} .safetensors files: {held}", fix="Name one file.")


def _check(path: Path, file: Path, peft: Path | None, config: DitConfig) -> Adapter:
    header = _header(file)
    kind = _kind(file, header, peft)
    if kind == "turbo":
        found = _turbo(file, header, config)
    elif kind == "flashgen":
        found = _flashgen(file, header, config)
    elif kind == "fasth3":
        found = _fasth3(file, header, config)
    else:
        assert peft is not None
        found = _peft(file, header, peft, config)
    refuse_values(header)
    drop([file])
    adaln, embedder = behind_table(record.name for record in header.tensors)
    nbytes = sum(record.nbytes for record in header.tensors)
    identity = sha256(f"{file}:{header.size}:{header.mtime_ns}:{header.tensors}".encode()).hexdigest()[:16]
    return Adapter(
        kind=kind, path=path, file=file, nbytes=nbytes, adaln=adaln, embedder=embedder, identity=identity, **found
    )


def _header(file: Path) -> ShardFile:
    log = FaultLog()
    header = read_header(file, log)
    if header is None:
        fault = log.faults[0]
        raise AdapterError(f"adapter {fault.what}", why=fault.why, fix=fault.fix, code=fault.code)
    if not header.tensors:
        raise AdapterError(f"adapter {file}", why="it holds no tensor", fix="Download it again.")
    return header


def _kind(file: Path, header: ShardFile, peft: Path | None) -> Kind:
    if peft is not None:
        return "peft"
    said = header.metadata
    if said.get("format") == FASTH3_FORMAT:
        return "fasth3"
    if said.get("key_format") == FLASHGEN_FORMAT:
        return "flashgen"
    if parse_turbo_name(file.name) is not None:
        if said.get("key_format", TURBO_FORMAT) != TURBO_FORMAT:
            why = f"its name is a Turbo file's and its metadata say key_format={said['key_format']!r}"
            raise AdapterError(f"adapter {file}", why=why, fix="Give it the name that it was published under.")
        return "turbo"
    if said.get("key_format") == TURBO_FORMAT or any(r.name.endswith(".lora_A.default.weight") for r in header.tensors):
        raise AdapterError(
            f"adapter {file}",
            why="its tensors are named as a Turbo file's, whose steps and shift stand in its file name alone, and this "
            "name says nothing of them",
            fix="Give it the name that it was published under, such as "
            "minimax_h3_fl2v_turbo_8step_v1.0_768p_bf16.safetensors.",
        )
    raise AdapterError(
        f"adapter {file}",
        why=f"its kind is not known: no {CONFIG} lies beside it, and neither its name nor its metadata say what it is "
        f"(its first tensor is {header.tensors[0].name})",
        fix=f"{_KINDS} An adapter of another model cannot be served.",
    )


def _turbo(file: Path, header: ShardFile, config: DitConfig) -> dict[str, Any]:
    name = parse_turbo_name(file.name)
    assert name is not None  # its kind
    rank, layers = adapter_kinds.turbo(header, config)
    alpha = number(file, header.metadata, "alpha", TURBO_DEFAULT_ALPHA)
    return {
        "rank": rank,
        "alpha": alpha,
        "tasks": name.tasks,
        "steps": name.steps,
        "video_shift": name.video_shift,
        "audio_shift": name.audio_shift,
        "layers": layers,
        "undeclared": tuple(key for key in ("key_format", "alpha") if key not in header.metadata),
    }


def _flashgen(file: Path, header: ShardFile, config: DitConfig) -> dict[str, Any]:
    adapter_kinds.flashgen_metadata(header)
    rank, layers = adapter_kinds.flashgen(header, config)
    return {
        "rank": rank,
        "alpha": FLASHGEN_ALPHA,
        "tasks": ("t2va",),
        "steps": FLASHGEN_STEPS,
        "video_shift": None,
        "audio_shift": None,
        "layers": layers,
    }


def _fasth3(file: Path, header: ShardFile, config: DitConfig) -> dict[str, Any]:
    adapter_kinds.fasth3_metadata(header)
    rank, layers = adapter_kinds.fasth3(header, config)
    return {
        "rank": rank,
        "alpha": float(rank),
        "tasks": ("t2va",),
        "steps": FASTH3_STEPS,
        "video_shift": None,
        "audio_shift": None,
        "layers": layers,
    }


def _peft(file: Path, header: ShardFile, peft: Path, config: DitConfig) -> dict[str, Any]:
    log = FaultLog()
    said = read_json(peft, log, code="adapter_config")
    if said is None:
        raise AdapterError(f"adapter {log.faults[0].what}", why=log.faults[0].why, fix=log.faults[0].fix)
    rank, layers = adapter_kinds.peft(header, config, said, peft)
    alpha = number(peft, said, "lora_alpha", float(rank))
    none = {"tasks": (), "steps": None, "video_shift": None, "audio_shift": None}
    return {"rank": rank, "alpha": alpha, "layers": layers, **none}


def number(file: Path, said: Mapping[str, Any], key: str, default: float) -> float:
    """A positive number of an adapter's metadata.

    Raises:
        AdapterError: it is none.
    """
    try:
        value = float(said.get(key, default))
    except (TypeError, ValueError):
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        why = "it must be a positive number, by which the factors are multiplied"
        raise AdapterError(f"adapter {file}: {key}={said.get(key)!r}", why=why, fix="Download it again.")
    return value
