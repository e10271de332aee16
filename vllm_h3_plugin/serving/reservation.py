# SPDX-License-Identifier: Apache-2.0
"""A clip's name belongs to one process while it is being made, and to nobody once that process is gone."""

from __future__ import annotations

import os
from glob import escape
from pathlib import Path
from types import TracebackType

from vllm_h3_plugin.checkpoint.file_lock import HeldLock, hold
from vllm_h3_plugin.errors import SnapshotError, UsageError
from vllm_h3_plugin.video.checksum import checksum_path
from vllm_h3_plugin.video.promote import part_path


class Reservation:
    """The names of one clip's files, held until the end of the ``with`` block.

    Attributes:
        name: the clip's, without a suffix.
        clip, part, checksum, record: ``NAME.mp4``, ``NAME.mp4.part``, ``NAME.mp4.sha256`` and ``NAME.json``.
    """

    def __init__(self, folder: Path, name: str, lock: HeldLock) -> None:
        self.folder = folder
        self.name = name
        self.clip = folder / f"{name}.mp4"
        self.part = part_path(self.clip)
        self.checksum = checksum_path(self.clip)
        self.record = folder / f"{name}.json"
        self._lock = lock

    @property
    def taken(self) -> bool:
        """Whether any of the files is there, or a copy of a picture that was sent for a clip of this name."""
        files = (self.clip, self.part, self.checksum, self.record)
        return any(os.path.lexists(path) for path in files) or any(self.folder.glob(f"{escape(self.name)}.ref*"))

    def release(self) -> None:
        """Let the name go; may be called again."""
        self._lock.release(remove=True)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def reserve(folder: Path, name: str) -> Reservation | None:
    """Reserve a name; None if another living process has it.

    Raises:
        UsageError: the folder cannot be written, or its file system has no locks.
    """
    try:
        lock = hold(folder / f".{name}.lock")
    except SnapshotError as exc:
        raise UsageError(exc.what, why=exc.why, fix="Choose a folder on a local disk with --out.") from exc
    except OSError as exc:
        raise UsageError(
            f"{folder} cannot be written", why=exc.strerror or str(exc), fix="Choose another folder with --out."
        ) from exc
    return None if lock is None else Reservation(folder, name, lock)
