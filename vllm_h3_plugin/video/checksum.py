# SPDX-License-Identifier: Apache-2.0
"""``FILE.sha256`` beside a clip, in the format of ``sha256sum``."""

from __future__ import annotations

import os
import re
from pathlib import Path

from vllm_h3_plugin.errors import ClipError
from vllm_h3_plugin.video.promote import promote
from vllm_h3_plugin.video.verdict import Check

_LINE = re.compile(r"([0-9a-fA-F]{64})(?:[ \t]+\*?(.+))?")


def checksum_path(clip: Path) -> Path:
    """``clip.mp4`` -> ``clip.mp4.sha256``."""
    return clip.with_name(clip.name + ".sha256")


def check_checksum(clip: Path, sha256: str) -> Check:
    """Hold ``sha256`` (of the clip's bytes) against ``FILE.sha256``, if there is one."""
    beside = checksum_path(clip)
    if not beside.exists():
        return Check("checksum", "ok", f"SHA-256 {sha256}", f"any (no {beside.name} beside it)")
    recorded = _read(beside, clip.name)
    if recorded is None:
        return Check(
            "checksum",
            "fail",
            f"{beside.name} holds no SHA-256 of {clip.name}",
            "a line `HEX  NAME`, as sha256sum writes it",
            why="what the clip should be cannot be told",
            fix=f"Fetch {beside.name} again, or remove it.",
        )
    if recorded != sha256:
        return Check(
            "checksum",
            "fail",
            f"SHA-256 {sha256}",
            f"{recorded} ({beside.name})",
            why="the clip's bytes are not those that the checksum was made of",
            fix="Download the clip again; if it was replaced on purpose, remove the old checksum.",
        )
    return Check("checksum", "ok", f"SHA-256 {sha256}", f"equal to {beside.name}")


def write_checksum(clip: Path, sha256: str) -> Path:
    """Write ``FILE.sha256`` and return its path; an equal one that exists is left alone.

    Raises:
        ClipError: one exists and says something else; it is not overwritten.
        UsageError: the folder cannot be written.
    """
    beside = checksum_path(clip)
    if beside.exists():
        if _read(beside, clip.name) == sha256:
            return beside
        raise ClipError(
            f"{beside} exists and is not the SHA-256 of {clip.name}",
            why="a different checksum is never overwritten",
            fix="Find out which of the two files is right; then remove the old checksum.",
        )
    part = beside.with_name(f"{beside.name}.{os.getpid()}.part")
    try:
        part.write_text(f"{sha256}  {clip.name}\n", encoding="utf-8")
        promote(part, beside)
    finally:
        part.unlink(missing_ok=True)
    return beside


def _read(beside: Path, name: str) -> str | None:
    """The digest for ``name``; the only one of a one-line file counts whatever its name, as clips get renamed."""
    try:
        lines = beside.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError):
        return None
    found = [match for line in lines if (match := _LINE.fullmatch(line.strip()))]
    named = [match for match in found if match[2] and Path(match[2].strip()).name == name]
    chosen = named[0] if named else found[0] if len(found) == 1 else None
    return chosen[1].lower() if chosen else None
