# SPDX-License-Identifier: Apache-2.0
"""Files of this project's own appear whole or not at all, and what a killed process left of one is swept away.

What is being written has a temporary name, ``.NAME.TOKEN.tmp``, in the folder of its final one, and beside it lies
``.NAME.TOKEN.tmp.lock``, locked for as long as the writing process lives. The lock is made first and removed last, so a
temporary whose lock can be taken belongs to nobody.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_h3_plugin.checkpoint.file_lock import hold
from vllm_h3_plugin.errors import SnapshotError

WAY_OUT = "Free space there, set H3_CACHE_DIR to a folder on another disk, or set H3_SNAPSHOT=off."

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")
_LOCK = ".lock"


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """A free name in the folder of ``path``, for a file or a folder; whatever lies there at the end is removed.

    Raises:
        OSError: the folder is missing or cannot be written.
        SnapshotError: its file system has no file locks.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    lock = hold(temporary.with_name(temporary.name + _LOCK), patience_s=math.inf)
    assert lock is not None
    try:
        yield temporary
    finally:
        try:
            discard(temporary)
        finally:
            lock.release(remove=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file under a temporary name in the same folder, then give it the name ``path``, durably.

    The bytes reach the disk before the name does. If the block raises, or anything else fails, the temporary is removed
    and whatever had the name ``path`` is untouched.

    Yields:
        The temporary path, at which the block must leave a file.

    Raises:
        OSError: the folder is missing, full or cannot be written; or the block left no file.
        SnapshotError: its file system has no file locks.
    """
    with temporary_beside(path) as temporary:
        yield temporary
        fsync(temporary)
        temporary.replace(path)
        fsync(path.parent)


def sweep(folder: Path) -> tuple[Path, ...]:
    """Remove the temporary files and folders that dead processes left in ``folder``; never those of a living one.

    Returns:
        What was removed. Another user's, which this one may not touch, stays.

    Raises:
        OSError: something cannot be removed.
    """
    return tuple(temporary for temporary in temporaries(folder) if _sweep_one(temporary))


def _sweep_one(temporary: Path) -> bool:
    try:
        lock = hold(temporary.with_name(temporary.name + _LOCK))
        if lock is None:
            return False
        there = os.path.lexists(temporary)
        try:
            discard(temporary)
        except BaseException:
            lock.release()
            raise
        lock.release(remove=True)
        return there
    except PermissionError:
        return False


def temporaries(folder: Path) -> tuple[Path, ...]:
    """Temporary names in ``folder``, of dead and living processes; also those of which only the lock is left."""
    try:
        names = {name.removesuffix(_LOCK) for name in os.listdir(folder)}
    except FileNotFoundError:
        return ()
    return tuple(folder / name for name in sorted(names) if _TEMPORARY.fullmatch(name))


def require_space(folder: Path, nbytes: int, what: str) -> None:
    """Check that ``nbytes`` fit on the disk of ``folder``, which need not exist yet.

    Args:
        what: the thing that needs them, for the message.

    Raises:
        SnapshotError: they do not; names what is needed and free in GiB.
    """
    free = free_bytes(folder)
    if free < nbytes:
        raise SnapshotError(
            f"{folder} has no room for {what}",
            why=f"it needs {gib(nbytes)} and {gib(free)} are free",
            fix=WAY_OUT,
            path=str(folder),
            needed_bytes=nbytes,
            free_bytes=free,
        )


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write on the disk of ``folder`` or of the nearest folder above that exists."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def gib(nbytes: int) -> str:
    """``2.50 GiB``; small sizes as bytes."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 / 100 else f"{nbytes} bytes"


def fsync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(path: Path) -> None:
    """Remove a file or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
