# SPDX-License-Identifier: Apache-2.0
"""What a file really holds, told from its bytes before any demuxer opens it.

Demuxers guess: FFmpeg reads playlists, scripts and text as media. A file that is not MP4 is named here for what it is
(an error page saved as ``.mp4`` is the common case), and one that was cut short is told from one that was never whole.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vllm_h3_plugin.errors import ClipError

_HEAD_BYTES = 65_536

# First four bytes of a QuickTime/MP4 file's first box are its length; these may be its type.
_FIRST_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp"})

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x1a\x45\xdf\xa3", "a Matroska or WebM file"),
    (b"\x89PNG\r\n\x1a\n", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"GIF8", "a GIF picture"),
    (b"RIFF", "a RIFF file (AVI, WAV or WebP)"),
    (b"OggS", "an Ogg file"),
    (b"fLaC", "a FLAC file"),
    (b"ID3", "an MP3 file"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip file"),
)

_NOT_A_CLIP = "Download the clip again: ask the job's status first, and keep the body only of a 200 with video/mp4."


@dataclass(frozen=True)
class Mp4Layout:
    """Top-level boxes of an MP4 file: distinct ``types`` in file order, ``trailing`` bytes after the last whole box."""

    types: tuple[str, ...]
    trailing: int


def check_file(path: Path) -> None:
    """Refuse what is not a readable, non-empty, regular file.

    Raises:
        ClipError: with ``fault`` missing, directory, special, empty or unreadable.
    """
    if not path.exists():
        raise fault("missing", f"{path} does not exist", fix="Check the name; an unfinished clip is named NAME.part.")
    if path.is_dir():
        raise fault("directory", f"{path} is a folder", fix="Name the clip's file in it.")
    if not path.is_file():
        raise fault("special", f"{path} is not a regular file", fix="Save the clip to a file first.")
    if path.stat().st_size == 0:
        raise fault(
            "empty",
            f"{path} is empty (0 bytes)",
            why="the download or the encoder stopped before the first byte",
            fix="Check free disk space and the server's log, then make or download the clip again.",
        )
    if not os.access(path, os.R_OK):
        raise fault("unreadable", f"{path} cannot be read", why="no permission", fix="Check its owner and mode.")


def read_layout(path: Path) -> Mp4Layout:
    """Walk the top-level boxes of a file that must be MP4.

    Raises:
        ClipError: with ``fault`` html, json, text, other_format, unknown_format, truncated or no_index.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        if head[4:8] not in _FIRST_BOXES:
            raise _not_mp4(path, head)
        return _walk(path, file, path.stat().st_size)


def fault(kind: str, what: str, *, why: str = "", fix: str = "", check: str = "file", **details: Any) -> ClipError:
    """A ClipError that carries a stable name of the fault, and of the check that found it, for programs."""
    return ClipError(what, why=why, fix=fix, fault=kind, check=check, **details)


def _walk(path: Path, file: BinaryIO, size: int) -> Mp4Layout:
    types: dict[str, None] = {}
    offset = 0
    while offset < size:
        file.seek(offset)
        header = file.read(16)
        length = int.from_bytes(header[:4], "big")
        kind = header[4:8]
        if len(header) < 8 or not re.fullmatch(rb"[\x20-\x7e\xa9]{4}", kind):
            break
        if length == 1:  # a 64-bit length follows the type
            length = int.from_bytes(header[8:16], "big")
        elif length == 0:  # "to the end of the file"
            length = size - offset
        if length < 8:
            break
        if offset + length > size:
            raise _truncated(path, kind.decode("latin-1"), offset + length - size, size)
        types.setdefault(kind.decode("latin-1"))
        offset += length
    if "moov" not in types:
        raise fault(
            "no_index",
            f"{path} has no index (moov box)",
            why=f"it ends after {' '.join(types) or 'no whole box'}; the writer stopped before it closed the file",
            fix="Make or download the clip again; a file without its index cannot be played.",
            check="container",
        )
    return Mp4Layout(tuple(types), size - offset)


def _truncated(path: Path, box: str, missing: int, size: int) -> ClipError:
    return fault(
        "truncated",
        f"{path} is truncated",
        why=f"its {box} box goes {missing} bytes beyond the end of the file ({size} bytes)",
        fix="Download it again and compare the size with the server's Content-Length; check free disk space.",
        check="container",
        missing_bytes=missing,
    )


def _not_mp4(path: Path, head: bytes) -> ClipError:
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return fault(
                "other_format", f"{path} is {name}, not MP4", fix="Ask the server for video/mp4.", check="container"
            )
    text = _as_text(head)
    if text is None:
        return fault(
            "unknown_format",
            f"{path} is not MP4",
            why=f"it starts with the bytes {head[:12].hex(' ')}",
            fix=_NOT_A_CLIP,
            check="container",
        )
    start = text.lstrip("\ufeff \t\r\n")
    if start[:1] in ("{", "["):
        return _json_answer(path, start)
    if start[:1] == "<":
        title = re.search(r"<(?:title|message)[^>]*>([^<]*)<", start, re.IGNORECASE)
        said = f"; it says {_quote(title[1])}" if title else ""
        return fault(
            "html",
            f"{path} is an HTML or XML page, not a clip",
            why=f"a proxy or server answered with a page{said}",
            fix=_NOT_A_CLIP,
            check="container",
        )
    if start.startswith("version https://git-lfs"):
        return fault("text", f"{path} is a Git LFS pointer, not a clip", fix="Run `git lfs pull`.", check="container")
    return fault(
        "text",
        f"{path} is a text file, not a clip",
        # One word in a file may be somebody's key.
        why=f"it starts with {_quote(start)}" if len(start.split()) > 1 else "it holds one word, which is not shown",
        fix=_NOT_A_CLIP,
        check="container",
    )


def _json_answer(path: Path, text: str) -> ClipError:
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    return fault(
        "json",
        f"{path} is a JSON answer, not a clip",
        why=f"the server answered {_quote(_message(answer) or text)}",
        fix=_NOT_A_CLIP,
        check="container",
    )


def _message(answer: Any) -> str | None:
    """The message in the shapes that the video API, FastAPI and proxies answer with."""
    if isinstance(answer, dict):
        for key in ("error", "message", "detail"):
            if key in answer:
                return _message(answer[key]) or json.dumps(answer[key], ensure_ascii=False)
    return answer if isinstance(answer, str) else None


def _as_text(head: bytes) -> str | None:
    if b"\0" in head:
        return None
    try:
        return head.decode("utf-8")
    except UnicodeDecodeError as exc:
        # A character cut by the read's end is still text.
        return head[: exc.start].decode("utf-8") if exc.start > len(head) - 4 and exc.start > 0 else None


def _quote(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 160 else line[:157] + "...")
