# SPDX-License-Identifier: Apache-2.0
"""A file under its final name is whole: it is written as ``NAME.part``, checked, then promoted."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from vllm_h3_plugin.errors import ClipError, UsageError


def part_path(final: Path) -> Path:
    """Name of the unfinished file beside ``final``: ``clip.mp4`` -> ``clip.mp4.part``."""
    return final.with_name(final.name + ".part")


def promote(part: Path, final: Path) -> None:
    """Give a finished file its final name: durable, atomic, and never over an existing file.

    The bytes reach the disk before the name does, so a crash leaves either ``part`` or a whole ``final``. Of two
    processes that promote to one name exactly one succeeds.

    Args:
        part: the finished file; gone afterwards.
        final: its name, in a folder of the same file system.

    Raises:
        UsageError: ``final`` exists (``part`` is kept), lies on another file system, or its folder is missing or
            cannot be written.
        ClipError: ``part`` is missing or empty.
    """
    if not part.is_file() or part.stat().st_size == 0:
        state = "is empty" if part.is_file() else "does not exist"
        raise ClipError(f"{part} {state}", why=f"nothing can become {final.name}", fix="Make the clip again.")
    _fsync(part)
    try:
        os.link(part, final)
    except FileExistsError as exc:
        raise _refusal(part, final) from exc
    except OSError as exc:
        if exc.errno == errno.EXDEV:
            raise UsageError(
                f"{final} is on another file system than {part}",
                why="a file cannot be renamed across file systems without copying it",
                fix=f"Write the unfinished file beside its final name, as {part_path(final)}.",
            ) from exc
        # No hard links here (exFAT, some network, FUSE and overlay mounts), or a fault that the other way meets too.
        _claim_and_replace(part, final)
    else:
        part.unlink()
    _fsync(final.parent)


def _claim_and_replace(part: Path, final: Path) -> None:
    """Without hard links: whoever creates the empty ``final`` owns the name and renames over its own placeholder."""
    try:
        os.close(os.open(final, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError as exc:
        raise _refusal(part, final) from exc
    except OSError as exc:
        raise _cannot_write(final, exc) from exc
    try:
        part.replace(final)
    except BaseException:
        final.unlink(missing_ok=True)
        raise


def _refusal(part: Path, final: Path) -> UsageError:
    return UsageError(
        f"{final} already exists",
        why="nothing is overwritten",
        fix=f"Move it away or choose another name; the new file is kept as {part}.",
    )


def _cannot_write(final: Path, exc: OSError) -> UsageError:
    return UsageError(
        f"{final} cannot be written",
        why=exc.strerror or str(exc),
        fix=f"Check that {final.parent} is a folder of yours.",
    )


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
