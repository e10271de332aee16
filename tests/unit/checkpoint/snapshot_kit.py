# SPDX-License-Identifier: Apache-2.0
"""A snapshot of a few hundred bytes, and ways to end a process in the middle of one."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from vllm_h3_plugin import __version__
from vllm_h3_plugin.checkpoint.snapshot_manifest import Entry, Piece, Shard, SnapshotKey
from vllm_h3_plugin.checkpoint.snapshot_paths import lock_of, snapshots_folder
from vllm_h3_plugin.checkpoint.snapshot_writer import SnapshotWriter

KEY = SnapshotKey(source="5" * 64, recipe="4" * 64, backend="reference", host="nvidia 0.30.0", plugin=__version__)

_QKV = (Piece("q", 0, 4), Piece("k", 4, 2), Piece("v", 6, 2))
_HALVES = (Piece(0, 0, 3), Piece(1, 3, 3))

ENTRIES = {
    "transformer": (
        Entry("qkv.weight", "F8_E4M3", (8, 6), _QKV),
        Entry("qkv.weight_scale", "F32", (8, 1), _QKV),
        Entry("fc1.weight", "BF16", (6, 4), _HALVES),
        Entry("norm.weight", "F32", (5,), (Piece(None, 0, 5),)),
    ),
    "text_encoder": (
        Entry("fc.weight", "F8_E4M3", (3, 16), (Piece(None, 0, 3),)),
        Entry("fc.weight_scale", "F32", (1,), (Piece(None, 0, 1),)),
        Entry("count", "I64", (), (Piece(None, 0, 1),)),
        Entry("none", "F32", (0, 4), (Piece(None, 0, 0),)),
    ),
}
_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}


def tensors(seed: int = 0) -> dict[tuple[str, str], torch.Tensor]:
    """(part, entry) -> whole tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {
        (part, entry.name): torch.randn(entry.shape, generator=generator).mul(9).to(_DTYPES[entry.dtype])
        for part, entries in ENTRIES.items()
        for entry in entries
    }


def pieces(seed: int = 0) -> Iterator[tuple[str, str, Shard, torch.Tensor]]:
    """Arguments of ``put``, last piece first: order does not matter."""
    whole = tensors(seed)
    for part, entries in reversed(ENTRIES.items()):
        for entry in reversed(entries):
            for piece in entry.pieces:
                tensor = whole[part, entry.name]
                yield (
                    part,
                    entry.name,
                    piece.shard,
                    tensor[piece.row : piece.row + piece.rows] if entry.shape else tensor,
                )


def write(cache_dir: Path, key: SnapshotKey = KEY, *, seed: int = 0, checkpoint: str = "/models/FL2VA") -> Path:
    """Write it whole; the snapshot's folder."""
    with SnapshotWriter(cache_dir, key, ENTRIES, {"checkpoint": checkpoint, "recipe": "fp8"}) as writer:
        for piece in pieces(seed):
            writer.put(*piece)
        return writer.commit()


def folder_of(cache_dir: Path, key: SnapshotKey = KEY) -> Path:
    return snapshots_folder(cache_dir) / key.id


def left(cache_dir: Path) -> list[str]:
    """What lies among the snapshots, without locks of whole ones."""
    folder = snapshots_folder(cache_dir)
    locks = {lock_of(folder_of(cache_dir)).name}
    return sorted(set(os.listdir(folder)) - locks)


def flip(path: Path, offset: int) -> None:
    """Flip one bit and keep size and time of change."""
    times = path.stat()
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


HANGS_S = 60


def killed(child: Callable[[], None]) -> None:
    """Run ``child`` in a process of its own, which must end itself with SIGKILL.

    A fork of a process with hundreds of threads (other tests of the session start them) can hang in a lock that one of
    them held. That is the test's doing: such a child says where it hung, is ended, and tried once more.
    """
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                faulthandler.dump_traceback_later(HANGS_S, exit=True, file=sys.__stderr__)
                child()
            finally:
                os._exit(99)
        _, status = os.waitpid(pid, 0)
        if not (os.WIFEXITED(status) and os.WEXITSTATUS(status) == 1):
            break
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def kill_self(*args: object, **kwargs: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
