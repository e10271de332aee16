# SPDX-License-Identifier: Apache-2.0
"""What an inventory finds wrong: each fault names a path, says why it matters and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_h3_plugin.errors import CheckpointError

DOWNLOAD_AGAIN = "Download this file again and compare its size and checksum with the release's."

# Faults of one kind that are listed one by one; the rest is counted.
_LISTED = 8


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a checkpoint.

    Attributes:
        code: stable word for programs, e.g. ``shard_truncated``.
        path: the file or folder at fault.
        what: the thing and the value seen; contains ``path``.
        why: the reason.
        fix: the way out.
    """

    code: str
    path: Path
    what: str
    why: str
    fix: str

    def as_dict(self) -> dict[str, Any]:
        """The fault as a JSON object."""
        return {"code": self.code, "path": str(self.path), "what": self.what, "why": self.why, "fix": self.fix}


@dataclass
class FaultLog:
    """Faults in the order in which they were found."""

    faults: list[Fault] = field(default_factory=list)

    def add(self, code: str, path: Path, what: str = "", *, why: str, fix: str = DOWNLOAD_AGAIN) -> None:
        """Note a fault; ``what`` defaults to the path and otherwise follows it."""
        self.faults.append(Fault(code, path, f"{path}: {what}" if what else str(path), why, fix))

    def add_error(self, code: str, path: Path, error: CheckpointError) -> None:
        """Note an error that already says what, why and how to fix it; its ``what`` must name the path."""
        self.faults.append(Fault(code, path, error.what, error.why, error.fix))

    def add_many(self, code: str, found: Iterable[tuple[Path, str, str]], *, fix: str) -> None:
        """Note faults of one kind, (path, what, why) each: the first few one by one, then how many more."""
        items = list(found)
        for path, what, why in items[:_LISTED]:
            self.add(code, path, what, why=why, fix=fix)
        if len(items) > _LISTED:
            path, what, why = items[_LISTED]
            self.add(code, path, f"and {len(items) - _LISTED} more like it, next: {what}", why=why, fix=fix)
