# SPDX-License-Identifier: Apache-2.0
"""What lies in a checkpoint and whether it is whole, from its index files and shard headers alone.

No byte of weights is read and no memory is taken for them, so this runs before anything is started. Importing this
module does not import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from vllm_h3_plugin.checkpoint.configs import DitConfig, TextEncoderConfig
from vllm_h3_plugin.checkpoint.faults import Fault, FaultLog
from vllm_h3_plugin.checkpoint.json_file import read_json
from vllm_h3_plugin.checkpoint.layout import (
    dit_tensors,
    dit_tensors_diffusers,
    host_drops_text_tensor,
    text_encoder_tensors,
)
from vllm_h3_plugin.checkpoint.locate import ANY_TASK, FOLDERS, TASKS, Located, check_task, locate
from vllm_h3_plugin.checkpoint.safetensors_header import ShardFile, TensorRecord
from vllm_h3_plugin.checkpoint.shard_set import ShardSet, read_shards
from vllm_h3_plugin.checkpoint.side_checks import check_processor, check_tokenizer, check_vae, has_folder
from vllm_h3_plugin.checkpoint.tensor_checks import compare
from vllm_h3_plugin.errors import CheckpointError

__all__ = [
    "ANY_TASK",
    "TASKS",
    "Fault",
    "Inventory",
    "PartInventory",
    "PartitionInventory",
    "ShardFile",
    "TensorRecord",
    "take_inventory",
]

DitLayout = Literal["native", "diffusers"]
_Config = TypeVar("_Config", DitConfig, TextEncoderConfig)


@dataclass(frozen=True)
class PartInventory:
    """One part of a partition.

    Attributes:
        name: ``transformer``, ``text_encoder``, ``video_vae`` or ``audio_vae``.
        files: the weight files whose headers are sound, by name.
        tensors: every tensor in them in file order: shard by shard, by offset.
        ignored: names of tensors that the host reads and drops.
        layout: of the DiT's names; None for other parts.
    """

    name: str
    path: Path
    files: tuple[ShardFile, ...]
    tensors: tuple[TensorRecord, ...]
    ignored: frozenset[str] = frozenset()
    layout: DitLayout | None = None

    @property
    def parameters(self) -> int:
        """Elements of all tensors that are used."""
        return sum(tensor.numel for tensor in self.tensors if tensor.name not in self.ignored)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def dtypes(self) -> dict[str, int]:
        """dtype -> number of tensors."""
        return dict(Counter(tensor.dtype for tensor in self.tensors))


@dataclass(frozen=True)
class PartitionInventory:
    """FL2VA or Ref2VA.

    Attributes:
        name: ``FL2VA`` or ``Ref2VA``.
        dit: shape of the DiT; None where its config is at fault.
        text: shape of the text encoder; likewise.
    """

    name: str
    path: Path
    tasks: tuple[str, ...]
    parts: tuple[PartInventory, ...]
    dit: DitConfig | None
    text: TextEncoderConfig | None

    def part(self, name: str) -> PartInventory:
        """The part of that name.

        Raises:
            CheckpointError: this partition has no such part.
        """
        for part in self.parts:
            if part.name == name:
                return part
        raise CheckpointError(
            f"{self.path} has no {name}", why="the folder is missing", fix=f"Download {self.path / name}."
        )


@dataclass(frozen=True)
class Inventory:
    """Everything that was found below one path."""

    path: Path
    task: str | None
    partitions: tuple[PartitionInventory, ...]
    faults: tuple[Fault, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(part.nbytes for partition in self.partitions for part in partition.parts)

    @property
    def parameters(self) -> int:
        """Elements of all tensors that are used."""
        return sum(part.parameters for partition in self.partitions for part in partition.parts)

    def require_clean(self) -> Inventory:
        """This inventory, if nothing is wrong.

        Raises:
            CheckpointError: with the first fault, the number of others, its path and its fix.
        """
        if not self.faults:
            return self
        first, others = self.faults[0], len(self.faults) - 1
        more = f" There {'is' if others == 1 else 'are'} {others} more: vllm-h3 inspect {self.path}" if others else ""
        raise CheckpointError(
            first.what,
            why=first.why,
            fix=f"{first.fix}{more}",
            code=first.code,
            path=str(first.path),
            faults=len(self.faults),
        )

    def as_dict(self) -> dict[str, Any]:
        """Partitions, parts, totals and faults as one JSON object; tensors are counted, not listed."""
        partitions = [
            {
                "name": partition.name,
                "path": str(partition.path),
                "tasks": list(partition.tasks),
                "parts": [
                    {
                        "name": part.name,
                        "layout": part.layout,
                        "files": len(part.files),
                        "tensors": len(part.tensors),
                        "ignored": len(part.ignored),
                        "dtypes": part.dtypes,
                        "parameters": part.parameters,
                        "bytes": part.nbytes,
                    }
                    for part in partition.parts
                ],
            }
            for partition in self.partitions
        ]
        return {
            "path": str(self.path),
            "task": self.task,
            "partitions": partitions,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "faults": [fault.as_dict() for fault in self.faults],
        }


def take_inventory(path: Path | str, task: str | None = None) -> Inventory:
    """Look through a checkpoint: index files, shard headers, configs, tokenizer and processor.

    Args:
        path: a partition's folder (``…/FL2VA``, ``…/Ref2VA``), or the root that holds both.
        task: ``t2va``, ``fl2va``, ``ref2va`` or ``combined``; None: what the partition's folder is for. ``any`` looks
            at whatever is there and does not ask whether it could be served as it was named.

    Raises:
        UsageError: no such task. Whatever is wrong with the checkpoint is in ``faults``, not raised.
    """
    check_task(task)
    path = Path(path)
    log = FaultLog()
    partitions = tuple(_partition(located, log) for located in locate(path, task, log))
    return Inventory(path, task, partitions, tuple(log.faults))


def _partition(located: Located, log: FaultLog) -> PartitionInventory:
    release = located.index.get("_minimax_h3")
    listed = release.get("tasks") if isinstance(release, dict) else None
    tasks = tuple(str(task) for task in listed) if isinstance(listed, list) else ()
    parts: list[PartInventory] = []
    dit = text = None
    if has_folder(located.path / "transformer", log):
        dit = _config(located.path / "transformer", DitConfig.from_mapping, log)
        parts.append(_transformer(located.path / "transformer", dit, log))
    if has_folder(located.path / "text_encoder", log):
        text = _config(located.path / "text_encoder", TextEncoderConfig.from_mapping, log)
        parts.append(_text_encoder(located.path / "text_encoder", text, log))
    for name in ("video_vae", "audio_vae"):
        folder = located.path / name
        if has_folder(folder, log):
            shards = check_vae(folder, log)
            parts.append(PartInventory(name, folder, shards.files, shards.tensors))
    for name, check in (("tokenizer", check_tokenizer), ("processor", check_processor)):
        if has_folder(located.path / name, log):
            check(located.path / name, log)
    return PartitionInventory(FOLDERS[located.name], located.path, tasks, tuple(parts), dit, text)


def _config(folder: Path, parse: Callable[..., _Config], log: FaultLog) -> _Config | None:
    path = folder / "config.json"
    fix = "Take this file from the release that the weights came from."
    mapping = read_json(path, log, code="config", fix=fix)
    if mapping is None:
        return None
    try:
        return partial(parse, source=str(path))(mapping)
    except CheckpointError as exc:
        log.add_error("config_value", path, exc)
        return None


def _transformer(folder: Path, config: DitConfig | None, log: FaultLog) -> PartInventory:
    shards = read_shards(folder, log)
    layout = _dit_layout(shards)
    if config is not None and shards.files:
        compare(folder, (dit_tensors if layout == "native" else dit_tensors_diffusers)(config), shards, log)
    return PartInventory("transformer", folder, shards.files, shards.tensors, layout=layout)


def _dit_layout(shards: ShardSet) -> DitLayout:
    # By names and not by config.json: native releases are known to carry the Diffusers class name in their config.
    diffusers = any(tensor.name.startswith("transformer_blocks.") for tensor in shards.tensors)
    return "diffusers" if diffusers else "native"


def _text_encoder(folder: Path, config: TextEncoderConfig | None, log: FaultLog) -> PartInventory:
    shards = read_shards(folder, log)
    if config is not None and shards.files:
        compare(folder, text_encoder_tensors(config), shards, log, ignored=host_drops_text_tensor)
    dropped = frozenset(tensor.name for tensor in shards.tensors if host_drops_text_tensor(tensor.name))
    return PartInventory("text_encoder", folder, shards.files, shards.tensors, ignored=dropped)
