# SPDX-License-Identifier: Apache-2.0
"""What a server's processes tell each other through files in ``H3_RUN_DIR``.

The API process, the engine and the workers may be one process (``uni``) or several (``mp``), on both hosts; a folder of
small JSON files, each written to a temporary name and renamed, is the one channel that works for all.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from vllm_h3_plugin import settings

logger = init_logger(__name__)

WORKER_PATTERN = "worker-*.json"
PROGRESS = "progress.json"

_unwritten: set[str] = set()


def run_dir() -> Path | None:
    """The folder, or None when the server was not started by ``vllm-h3 serve``."""
    raw = os.environ.get(f"{settings.PREFIX}RUN_DIR", "")
    return Path(raw) if raw else None


def write(name: str, data: dict[str, Any]) -> None:
    """Replace one file atomically; does nothing without a run folder.

    A folder that cannot be written, as on a full disk, costs no clip: the file is taken away then, so that nobody
    believes what no longer holds, as that a step has not moved.
    """
    folder = run_dir()
    if folder is None:
        return
    temporary = folder / f".{name}.{os.getpid()}"
    try:
        temporary.write_text(json.dumps(data, default=str), encoding="utf-8")
        temporary.replace(folder / name)
    except OSError as exc:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        with suppress(OSError):
            (folder / name).unlink(missing_ok=True)
        if name not in _unwritten:
            _unwritten.add(name)
            logger.error("%s cannot be written, which is said once: %s", folder / name, exc.strerror or exc)


def read(name: str) -> dict[str, Any] | None:
    """One file's content, or None if it is not there (yet)."""
    folder = run_dir()
    if folder is None:
        return None
    try:
        content: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return content


def read_workers() -> list[dict[str, Any]]:
    """What every worker reported after it had loaded, by rank."""
    folder = run_dir()
    if folder is None:
        return []
    return [content for path in sorted(folder.glob(WORKER_PATTERN)) if (content := read(path.name)) is not None]
