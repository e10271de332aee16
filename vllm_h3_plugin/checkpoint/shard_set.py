# SPDX-License-Identifier: Apache-2.0
"""All weight files of one part: the index, the shards that it names, and whether they agree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_h3_plugin.checkpoint.faults import FaultLog
from vllm_h3_plugin.checkpoint.json_file import read_json
from vllm_h3_plugin.checkpoint.safetensors_header import ShardFile, TensorRecord, read_header

# The names that the host's loader looks for (vLLM-Omni 0.30.0 diffusers_loader SAFETENSORS_INDEX_FILES).
INDEX_NAMES = ("diffusion_pytorch_model.safetensors.index.json", "model.safetensors.index.json")


@dataclass(frozen=True)
class ShardSet:
    """The weight files of a part.

    Attributes:
        files: those whose header is sound, by name.
        tensors: every tensor in them in file order, shard by shard, by offset.
        lost: names that the index puts into a file that is missing or broken; they are not absent a second time.
        complete: whether every file was sound.
    """

    files: tuple[ShardFile, ...] = ()
    tensors: tuple[TensorRecord, ...] = ()
    lost: frozenset[str] = frozenset()
    complete: bool = False


def read_shards(folder: Path, log: FaultLog) -> ShardSet:
    """Index and shard headers of ``folder``."""
    index = next((folder / name for name in INDEX_NAMES if (folder / name).is_file()), None)
    if index is None:
        return _without_index(folder, log)
    content = read_json(index, log, code="index", fix="Download the index again; it belongs to the shards.")
    if content is None:
        return ShardSet()
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        log.add("index_malformed", index, why="it has no `weight_map` of tensor names to shard names")
        return ShardSet()
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            log.add(
                "index_malformed", index, f"shard {name!r}", why="shards lie beside their index, in no other folder"
            )
            return ShardSet()
    return _indexed(folder, index, weight_map, log)


def _without_index(folder: Path, log: FaultLog) -> ShardSet:
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1 and "-of-" not in found[0].name:
        file = read_header(found[0], log)
        return ShardSet((file,), file.tensors, complete=True) if file else ShardSet()
    path = folder / (INDEX_NAMES[1] if folder.name == "text_encoder" else INDEX_NAMES[0])
    why = f"{len(found)} shards lie there without the index that says which tensor is in which"
    log.add(
        "index_missing",
        path if found else folder,
        why=why if found else "there are no weights: neither an index nor a safetensors file",
        fix="Download the index of this part." if found else "Download this part's weights.",
    )
    return ShardSet()


def _indexed(folder: Path, index: Path, weight_map: dict[str, str], log: FaultLog) -> ShardSet:
    names = sorted(set(weight_map.values()))
    files: dict[str, ShardFile] = {}
    for name in names:
        if not (folder / name).exists():
            held = sum(shard == name for shard in weight_map.values())
            why = f"{index.name} says that it holds {held} tensors, and it is not there"
            log.add("shard_missing", folder / name, why=why, fix="Download this file.")
            continue
        file = read_header(folder / name, log)
        if file is not None:
            files[name] = file
    owner: dict[str, Path] = {}
    doubled = []
    for file in files.values():
        for tensor in file.tensors:
            if tensor.name in owner:
                why = f"{owner[tensor.name].name} holds it too, and a parameter is filled once"
                doubled.append((file.path, f"tensor {tensor.name}", why))
            owner.setdefault(tensor.name, file.path)
    log.add_many("tensor_twice", doubled, fix="Keep the shards of one release only; download them anew if in doubt.")
    misplaced = [
        (folder / shard, f"tensor {name}", f"{index.name} puts it here, and it is not in the file's header")
        for name, shard in weight_map.items()
        if shard in files and owner.get(name) is None
    ]
    log.add_many("tensor_misplaced", misplaced, fix="Index and shards are of different releases: download both anew.")
    lost = {name for name, shard in weight_map.items() if shard not in files}
    lost |= {what.removeprefix("tensor ") for _, what, _ in misplaced}
    tensors = tuple(tensor for file in files.values() for tensor in file.tensors)
    complete = len(files) == len(names)
    return ShardSet(tuple(files.values()), tensors, frozenset(lost), complete)
