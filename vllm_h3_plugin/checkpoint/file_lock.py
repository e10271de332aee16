# SPDX-License-Identifier: Apache-2.0
"""Locks that die with the process that holds them, shared ones included.

``flock`` rather than the filelock package: a snapshot has many readers at once, and whoever removes it must see them.
A forked child inherits the lock and keeps it for as long as it lives.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

from vllm_h3_plugin.errors import SnapshotError

_POLL_S = 0.02


class HeldLock:
    """A lock until :meth:`release`; a context manager.

    Attributes:
        path: the lock file; None if there is none and none can be made (a read-only folder): nothing is held then.
    """

    def __init__(self, path: Path | None, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._signed = False

    def sign(self) -> None:
        """Write this process's id into the lock file, until release, for :func:`holder`. Only for exclusive locks.

        The lock holds without it: a full disk only leaves the name out.
        """
        self._signed = True
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)

    def release(self, *, remove: bool = False) -> None:
        """Let go; may be called again.

        Args:
            remove: unlink the lock file too. Only for exclusive locks: whoever waits for it takes a new file.
        """
        if self._descriptor < 0:
            return
        try:
            if remove and self.path is not None:
                self.path.unlink(missing_ok=True)
            elif self._signed:
                os.ftruncate(self._descriptor, 0)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> HeldLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def hold(path: Path, *, shared: bool = False, patience_s: float = 0.0) -> HeldLock | None:
    """Take the lock of that file, which is made if need be.

    Args:
        shared: several processes may hold it, as long as none holds it exclusively. Needs no right to write.
        patience_s: how long to try.

    Returns:
        The lock, or None: another process, or another holder in this one, has it.

    Raises:
        SnapshotError: the file system has no locks.
        OSError: the file cannot be made or opened.
    """
    deadline = time.monotonic() + patience_s
    while True:
        descriptor = _open(path, shared)
        if descriptor is None:
            return HeldLock(None, -1)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            # Whoever held it before may have unlinked the file: a lock on that one would keep nobody out.
            if _is_still(path, descriptor):
                return HeldLock(path, descriptor)
            os.close(descriptor)
            continue
        except BlockingIOError:
            os.close(descriptor)
        except OSError as exc:
            os.close(descriptor)
            raise SnapshotError(
                f"{path} cannot be locked",
                why=f"its file system has no file locks ({exc.strerror})",
                fix="Set H3_CACHE_DIR to a folder on a local disk, or set H3_SNAPSHOT=off.",
                path=str(path),
            ) from exc
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_S)


def holder(path: Path) -> str:
    """``process N`` if a living process signed the lock file, else ``another process``."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        text = ""
    return f"process {text}" if text.isdecimal() and psutil.pid_exists(int(text)) else "another process"


def _open(path: Path, shared: bool) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        if not shared:
            raise
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
