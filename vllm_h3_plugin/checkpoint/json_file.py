# SPDX-License-Identifier: Apache-2.0
"""Read the small JSON files of a checkpoint, turning whatever is wrong with one into a fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_h3_plugin.checkpoint.faults import DOWNLOAD_AGAIN, FaultLog

LFS_PREFIX = b"version https://git-lfs.github.com/spec/"
LFS_FIX = "Fetch the real file: `git lfs install && git lfs pull`, or download it with another tool."
LFS_WHY = "it is a Git LFS pointer of a few lines, not the file that it stands for"


def missing_reason(path: Path) -> str:
    """Why ``path`` is not a readable file: a dangling link, a folder, or nothing there."""
    if path.is_symlink() and not path.exists():
        return f"it is a link to {path.readlink()}, which does not exist"
    return "a folder of that name is there" if path.is_dir() else "the file is missing"


def read_json(path: Path, log: FaultLog, *, code: str, fix: str = DOWNLOAD_AGAIN) -> dict[str, Any] | None:
    """The object in a JSON file; None, and a fault, if it is missing, unreadable, no JSON or no object."""
    if not path.is_file():
        log.add(f"{code}_missing", path, why=missing_reason(path), fix=fix)
        return None
    try:
        raw = path.read_bytes()
    except OSError as exc:
        log.add("unreadable", path, why=exc.strerror or str(exc), fix="Give the user that runs this read access to it.")
        return None
    if raw.startswith(LFS_PREFIX):
        log.add("lfs_pointer", path, why=LFS_WHY, fix=LFS_FIX)
        return None
    try:
        value = json.loads(raw)
    except ValueError as exc:
        log.add(f"{code}_malformed", path, why=f"it is not JSON ({exc})" if raw else "it is empty", fix=fix)
        return None
    except RecursionError:
        log.add(f"{code}_malformed", path, why="it is nested deeper than any file of a release", fix=fix)
        return None
    if not isinstance(value, dict):
        log.add(f"{code}_malformed", path, why=f"it holds a {type(value).__name__}, not an object", fix=fix)
        return None
    return value
