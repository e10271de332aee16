# SPDX-License-Identifier: Apache-2.0
"""Where snapshots and their locks lie in the cache folder."""

from __future__ import annotations

import re
from pathlib import Path

PATIENCE_S = 0.5
"""How long readers and writers try for a lock: a listing looks at each for an instant, which must turn nobody away."""


def snapshots_folder(cache_dir: Path) -> Path:
    """Where the snapshots of a cache folder are."""
    return cache_dir.expanduser() / "snapshots"


def lock_of(snapshot: Path) -> Path:
    """Lock file of a snapshot's folder: shared by its readers, exclusive for who writes or removes it."""
    return snapshot.with_name(snapshot.name + ".lock")


def is_id(name: str) -> bool:
    """Whether a folder of that name is a snapshot: 16 hex digits."""
    return re.fullmatch(r"[0-9a-f]{16}", name) is not None
