# SPDX-License-Identifier: Apache-2.0
"""Which folder is meant: a partition, the root of a release, or something one level off.

The host finds partitions by their folder names, ``FL2VA`` and ``Ref2VA``, below a root (vLLM-Omni 0.30.0
``resolve_minimax_h3_partition`` and ``_resolve_minimax_h3_model_root``), and the model by ``model_index.json``.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_h3_plugin.checkpoint.faults import FaultLog
from vllm_h3_plugin.checkpoint.json_file import read_json
from vllm_h3_plugin.errors import UsageError

PIPELINES = ("MiniMaxH3Pipeline", "MiniMaxH3ModularPipeline")
FOLDERS = {"fl2va": "FL2VA", "ref2va": "Ref2VA"}
# Task -> partitions that it needs. `any` is this project's: whatever is there, for looking and not for serving.
TASKS: dict[str, tuple[str, ...]] = {
    "t2va": ("fl2va",),
    "fl2va": ("fl2va",),
    "ref2va": ("ref2va",),
    "combined": ("fl2va", "ref2va"),
}
ANY_TASK = "any"
# How far below a folder a checkpoint is looked for when it is not where it was said to be.
_DEPTH = 3
_WIDTH = 1000
_INDEX = "model_index.json"
_FASTH3_V2 = ("fastvideo_inference.json", "modular_model_index.json")
"""How the host tells it (vLLM-Omni 0.30.0 model_executor/models/minimax_h3/checkpoint.py:31)."""


@dataclass(frozen=True)
class Located:
    """A partition's folder and its model index."""

    name: str
    path: Path
    index: dict[str, Any]


def check_task(task: str | None) -> None:
    """Refuse a task that H3 has not.

    Raises:
        UsageError: names the tasks.
    """
    if task is not None and task not in TASKS and task != ANY_TASK:
        raise UsageError(f"task {task!r}", why="H3 has no such task", fix=f"Use one of {', '.join(TASKS)}.")


def holds_both(path: Path) -> bool:
    """Whether a folder is a release's root with both partitions below it; nothing is said of their content."""
    return all((path / folder / _INDEX).is_file() for folder in FOLDERS.values()) and (path / _INDEX).is_file()


def locate(path: Path, task: str | None, log: FaultLog) -> tuple[Located, ...]:
    """The partitions to look at for ``task``; what is wrong with the choice of folder becomes a fault."""
    if not path.exists():
        log.add("folder_missing", path, why="there is no such folder", fix=_suggest_near(path))
        return ()
    if not path.is_dir():
        log.add("folder_missing", path, why="it is a file", fix=f"Give the folder instead: {path.parent}")
        return ()
    if any((path / marker).is_file() for marker in _FASTH3_V2):
        log.add(
            "fasth3_v2",
            path,
            why="it is FastH3 V2, a whole student with Video Sparse Attention: its compression gates mean something to "
            "that kernel alone, and this plugin's attention is exact",
            fix="Serve the base FL2VA checkpoint with the dense FastH3 v1 adapter (profile spark-fasth3, four steps) "
            "or with an 8-step Turbo file (profile spark-turbo). The host without this plugin serves V2 on CUDA.",
        )
        return ()
    if not (path / _INDEX).is_file():
        return _elsewhere(path, task, log)
    index = read_json(path / _INDEX, log, code="model_index")
    if index is None or not _is_h3(path, index, log):
        return ()
    if _partition_name(index) is not None:
        return _as_partition(path, index, task, log)
    if any((path / folder / _INDEX).is_file() for folder in FOLDERS.values()):
        return _as_root(path, task, log)
    log.add(
        "model_index_malformed",
        path / _INDEX,
        why="it names no partition in `_minimax_h3`, and no FL2VA or Ref2VA folder lies below it",
        fix="Download the partition's own model_index.json.",
    )
    return ()


def _partition_name(index: dict[str, Any]) -> str | None:
    release = index.get("_minimax_h3")
    name = release.get("partition") if isinstance(release, dict) else None
    return name.lower() if isinstance(name, str) and name.lower() in FOLDERS else None


def _is_h3(path: Path, index: dict[str, Any], log: FaultLog) -> bool:
    if index.get("_class_name") in PIPELINES:
        return True
    log.add(
        "other_model",
        path / _INDEX,
        why=f"it is the index of a {index.get('_class_name')!r}; MiniMax-H3 has {PIPELINES[0]!r}",
        fix="Give the folder of a MiniMax-H3 checkpoint.",
    )
    return False


def _rename_advice(path: Path, name: str) -> str:
    target = path.parent / name
    if target.exists():
        return f"Give it the name {name} in another folder: {target} is taken."
    return f"Rename it: mv {shlex.quote(str(path))} {shlex.quote(str(target))}"


def _as_partition(path: Path, index: dict[str, Any], task: str | None, log: FaultLog) -> tuple[Located, ...]:
    name = _partition_name(index)
    assert name is not None
    if path.absolute().name != FOLDERS[name]:
        log.add(
            "folder_name",
            path,
            why=f"the host finds this partition only in a folder that is called {FOLDERS[name]}",
            fix=_rename_advice(Path(os.path.abspath(path)), FOLDERS[name]),
        )
    wanted = TASKS.get(task or ANY_TASK, (name,))
    if wanted != (name,):
        other = FOLDERS[next(need for need in wanted if need != name)]
        sibling = path.absolute().parent / other
        if len(wanted) > 1:
            fix = f"Give the root, which holds both: {path.absolute().parent}"
        elif (sibling / _INDEX).is_file():
            fix = f"Give the other folder: {sibling}"
        else:
            fix = f"Download the {other} partition, or ask for one of {', '.join(_tasks(name))}."
        log.add("wrong_partition", path, why=f"it is {FOLDERS[name]}, and task {task} needs {other}", fix=fix)
    return (Located(name, path, index),)


def _tasks(name: str) -> list[str]:
    return [task for task, needs in TASKS.items() if needs == (name,)]


def _as_root(path: Path, task: str | None, log: FaultLog) -> tuple[Located, ...]:
    present = [name for name, folder in FOLDERS.items() if (path / folder / _INDEX).is_file()]
    if task is None and len(present) == 1:
        why = f"it is the root of a release and holds only {FOLDERS[present[0]]}"
        log.add("folder_too_high", path, why=why, fix=f"Use {path / FOLDERS[present[0]]}")
    elif task is None:
        log.add(
            "task_needed",
            path,
            why="it holds both partitions, FL2VA and Ref2VA",
            fix=f"Add a task ({', '.join(TASKS)}), or use {path / 'FL2VA'} or {path / 'Ref2VA'}",
        )
    wanted = TASKS.get(task or ANY_TASK, tuple(present))
    result = []
    for name in wanted:
        folder = path / FOLDERS[name]
        if name not in present:
            held = ", ".join(FOLDERS[item] for item in present)
            log.add(
                "wrong_partition",
                folder,
                why=f"task {task} needs this partition, and {path} holds {held}",
                fix=f"Download the {FOLDERS[name]} partition, or ask for one of {', '.join(_tasks(present[0]))}.",
            )
            continue
        index = read_json(folder / _INDEX, log, code="model_index")
        if index is None or not _is_h3(folder, index, log):
            continue
        if _partition_name(index) != name:
            why = f"it says partition {_partition_name(index)!r} in a folder called {FOLDERS[name]}"
            log.add("model_index_malformed", folder / _INDEX, why=why)
        result.append(Located(name, folder, index))
    return tuple(result)


def _elsewhere(path: Path, task: str | None, log: FaultLog) -> tuple[Located, ...]:
    above = next((parent for parent in list(path.absolute().parents)[:2] if (parent / _INDEX).is_file()), None)
    if above is not None:
        why = f"it is a part of the checkpoint in {above}, which has the {_INDEX}"
        log.add("folder_too_deep", path, why=why, fix=f"Use {above}")
        return ()
    below = _checkpoints_below(path)
    wanted = {FOLDERS[name] for name in TASKS.get(task or ANY_TASK, ())}
    best = [folder for folder in below if folder.name in wanted] or below
    if best:
        uses = " or ".join(str(folder) for folder in best)
        why = f"it has no {_INDEX}; the checkpoint lies below it"
        log.add("folder_too_high", path, why=why, fix=f"Use {uses}")
        return ()
    log.add(
        "no_checkpoint",
        path,
        why=f"it has no {_INDEX}, and neither has any folder near it",
        fix="Give the FL2VA or Ref2VA folder of a MiniMax-H3 checkpoint, or write one with `vllm-h3 synth DIR`.",
    )
    return ()


def _checkpoints_below(path: Path) -> list[Path]:
    level = [path]
    for _ in range(_DEPTH):
        level = sorted(islice((child for folder in level for child in _folders(folder)), _WIDTH))
        found = [folder for folder in level if (folder / _INDEX).is_file()]
        if found:
            return found
    return []


def _folders(folder: Path) -> list[Path]:
    try:
        return [child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")]
    except OSError:  # a folder that may not be listed is no checkpoint of this user's
        return []


def _suggest_near(path: Path) -> str:
    parent = path.absolute().parent
    if not parent.is_dir():
        return f"Check the path: {parent} does not exist either."
    near = sorted(child.name for child in _folders(parent))[:8]
    return f"Check the path; {parent} holds {', '.join(near)}." if near else f"Check the path; {parent} is empty."
