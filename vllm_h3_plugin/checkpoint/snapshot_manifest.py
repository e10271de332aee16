# SPDX-License-Identifier: Apache-2.0
"""What a quantized snapshot is: its key, the layout of its files, and the manifest that says what is in them.

One safetensors file a part. Each parameter is one entry of its full, unsharded shape, so that a mapped file gives
tensor-parallel slices as views. What a weight loader is handed, a *piece*, is a range of an entry's rows. The manifest
lists the pieces with a BLAKE3 digest each, and is written last: a folder without one is half-written.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from vllm_h3_plugin.checkpoint.layout import DTYPE_BYTES
from vllm_h3_plugin.checkpoint.safetensors_header import TensorRecord
from vllm_h3_plugin.errors import LoadError

FORMAT = 1
"""Version of layout and manifest; a snapshot of another one is foreign."""

MANIFEST = "manifest.json"

Shard = str | int | None

# Data starts on a page, so that a mapped file's first entry is aligned for every dtype.
_ALIGN = 4096


@dataclass(frozen=True)
class SnapshotKey:
    """Everything that the resident form of a model depends on. A snapshot is used only if all of it is equal.

    Attributes:
        source: identity of the checkpoint's files (``source_identity``).
        recipe: digest of the recipe's content: its rules, not its name or file.
        backend: name of the quantization backend.
        host: name and version of the host.
        plugin: version of this package.
    """

    source: str
    recipe: str
    backend: str
    host: str
    plugin: str

    @property
    def id(self) -> str:
        """Name of the snapshot's folder: 16 hex digits over all fields and the format's version."""
        return blake3(_canonical({"format": FORMAT, **asdict(self)})).hexdigest()[:16]


@dataclass(frozen=True)
class Piece:
    """Rows ``[row, row + rows)`` of an entry: what one call of a weight loader takes.

    Attributes:
        shard: the weight loader's third argument; None where it takes two.
        rows: 1 for a scalar.
    """

    shard: Shard
    row: int
    rows: int


@dataclass(frozen=True)
class Entry:
    """One parameter of the model, whole and unsharded, or the scale of one.

    Attributes:
        name: of the parameter in its part; a scale has its weight's name with ``_scale`` behind it.
        dtype: as safetensors spells it.
        pieces: together all rows, without overlap.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Size of the entry."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def piece_name(param: str, shard: Shard) -> str:
    """``blocks.0.mlp.fc1.weight``, 0 -> ``blocks.0.mlp.fc1.weight@0``; ``@-`` for a whole parameter."""
    return f"{param}@{'-' if shard is None else shard}"


def parse_piece(name: str) -> tuple[str, Shard]:
    """The inverse of :func:`piece_name`: parameter and shard."""
    param, _, shard = name.rpartition("@")
    if shard == "-":
        return param, None
    return param, int(shard) if shard.isdecimal() else shard


def lay_out(path: Path, entries: Sequence[Entry]) -> tuple[bytes, tuple[TensorRecord, ...]]:
    """Header of a part's file and where each piece lies in it; entries follow each other in the order given.

    Raises:
        LoadError: an entry is no safetensors tensor, is there twice, or its pieces do not fill it exactly once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in entries:
        _check(entry)
        if entry.name in header:
            raise LoadError(f"parameter {entry.name} is twice in the snapshot's layout", parameter=entry.name)
        span = [position, position + entry.nbytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": span}
        position = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    start = -(-(8 + len(text)) // _ALIGN) * _ALIGN
    raw = struct.pack("<Q", start - 8) + text.ljust(start - 8)
    records = []
    for entry in entries:
        whole = TensorRecord(entry.name, entry.dtype, entry.shape, path, start, entry.nbytes)
        records += [piece_record(whole, piece) for piece in sorted(entry.pieces, key=lambda piece: piece.row)]
        start += entry.nbytes
    return raw, tuple(records)


def piece_record(entry: TensorRecord, piece: Piece) -> TensorRecord:
    """A piece as a tensor of its own: its name, its shape, and where it lies in the entry's file."""
    name = piece_name(entry.name, piece.shard)
    if not entry.shape:
        return TensorRecord(name, entry.dtype, (), entry.file, entry.offset, entry.nbytes)
    row_bytes = math.prod(entry.shape[1:]) * DTYPE_BYTES[entry.dtype]
    shape = (piece.rows, *entry.shape[1:])
    offset = entry.offset + piece.row * row_bytes
    return TensorRecord(name, entry.dtype, shape, entry.file, offset, piece.rows * row_bytes)


def _check(entry: Entry) -> None:
    if entry.dtype not in DTYPE_BYTES or not entry.name or "@" in entry.name or entry.name == "__metadata__":
        raise LoadError(f"{entry.name!r} of dtype {entry.dtype} cannot stand in a snapshot", parameter=entry.name)
    rows = entry.shape[0] if entry.shape else 1
    position = 0
    for piece in sorted(entry.pieces, key=lambda piece: (piece.row, piece.rows)):
        if piece.row != position or piece.rows < 0:
            break
        position += piece.rows
    distinct = len({piece_name("", piece.shard) for piece in entry.pieces}) == len(entry.pieces)
    if not entry.pieces or position != rows or not distinct:
        pieces = ", ".join(f"{piece.shard}: {piece.row}+{piece.rows}" for piece in entry.pieces) or "none"
        raise LoadError(
            f"the pieces of {entry.name} {list(entry.shape)} do not fill it exactly once",
            why=f"shard: first row + rows are {pieces}",
            parameter=entry.name,
        )


@dataclass(frozen=True)
class PartManifest:
    """One part's file.

    Attributes:
        file: its name in the snapshot's folder.
        size: in bytes.
        header: BLAKE3 of the header, its length field included.
        pieces: (entry, piece, BLAKE3 of the piece's bytes), in file order.
    """

    file: str
    size: int
    header: str
    pieces: tuple[tuple[str, Piece, str], ...]


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` says.

    Attributes:
        created: seconds since 1970.
        notes: facts for people and for the reader: ``checkpoint`` (path), ``recipe`` (name), …
    """

    key: SnapshotKey
    created: float
    notes: Mapping[str, Any]
    parts: Mapping[str, PartManifest]

    @property
    def nbytes(self) -> int:
        """Size of all parts' files."""
        return sum(part.size for part in self.parts.values())

    def dump(self) -> bytes:
        """The manifest as JSON with its own digest in it."""
        body = {
            "format": FORMAT,
            "id": self.key.id,
            "key": asdict(self.key),
            "created": self.created,
            "notes": json.loads(json.dumps(dict(self.notes), default=str)),
            "parts": {name: _dump_part(part) for name, part in self.parts.items()},
        }
        return json.dumps({**body, "digest": blake3(_canonical(body)).hexdigest()}, indent=0).encode() + b"\n"


class ForeignFormat(ValueError):
    """A manifest of another version of the format."""


def parse_manifest(raw: bytes) -> Manifest:
    """The inverse of :meth:`Manifest.dump`.

    Raises:
        ForeignFormat: it is of another format.
        ValueError: what else is wrong with it, as a clause: it is cut off or was changed.
    """
    try:
        body = json.loads(raw)
    except ValueError as exc:
        raise ValueError(f"it is not JSON ({exc})" if raw else "it is empty") from exc
    if not isinstance(body, dict):
        raise ValueError("it is no JSON object")
    if body.get("format") != FORMAT:
        raise ForeignFormat(f"it is of format {body.get('format')!r}, and this version reads format {FORMAT}")
    digest = body.pop("digest", None)
    if digest != blake3(_canonical(body)).hexdigest():
        raise ValueError("its content does not have the digest that it says, so it was changed or damaged")
    parts = {name: _parse_part(part) for name, part in body["parts"].items()}
    return Manifest(SnapshotKey(**body["key"]), body["created"], body["notes"], parts)


def _dump_part(part: PartManifest) -> dict[str, Any]:
    pieces: Iterable[list[Any]] = (
        [name, piece.shard, piece.row, piece.rows, digest] for name, piece, digest in part.pieces
    )
    return {"file": part.file, "size": part.size, "header": part.header, "pieces": list(pieces)}


def _parse_part(value: dict[str, Any]) -> PartManifest:
    pieces = tuple((name, Piece(shard, row, rows), digest) for name, shard, row, rows, digest in value["pieces"])
    return PartManifest(value["file"], value["size"], value["header"], pieces)


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
