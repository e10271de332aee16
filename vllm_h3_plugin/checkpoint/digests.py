# SPDX-License-Identifier: Apache-2.0
"""Hold bytes against digests while they are read: BLAKE3 a tensor, SHA-256 a file.

Tensors are hashed beside the reading and need a hash that is fast on its own. Files are hashed with what
``sha256sum`` and the release's own lists have, one after the other, since SHA-256 cannot be split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from vllm_h3_plugin.checkpoint.faults import DOWNLOAD_AGAIN
from vllm_h3_plugin.checkpoint.read_plan import Segment
from vllm_h3_plugin.checkpoint.safetensors_header import ShardFile
from vllm_h3_plugin.errors import CheckpointError, SnapshotError

_LARGE, _THREADS = 64 << 20, 4

_REMOVE_SNAPSHOT = "Remove this snapshot (see `vllm-h3 snapshot --help`); the next start makes it anew."


class TensorDigests:
    """Refuses a tensor whose bytes are not those of its BLAKE3 digest.

    Args:
        expected: tensor name -> 64 hex digits.
        segments: what will be read.

    Raises:
        SnapshotError: a tensor has no digest.
    """

    def __init__(self, expected: Mapping[str, str], segments: Iterable[Segment]) -> None:
        self._expected = expected
        for segment in segments:
            if segment.record is not None and segment.record.name not in expected:
                raise SnapshotError(
                    f"{segment.file.path}: tensor {segment.record.name} has no digest",
                    why="the snapshot's manifest does not list it",
                    fix=_REMOVE_SNAPSHOT,
                    path=str(segment.file.path),
                    tensor=segment.record.name,
                )

    def __call__(self, segment: Segment, view: memoryview) -> None:
        """Check one tensor; safe to call from several threads.

        Raises:
            SnapshotError: names file, tensor and both digests.
        """
        from blake3 import blake3

        if segment.record is None:
            return
        name = segment.record.name
        # A large tensor fills the buffer and everything waits for it, so several threads hash it.
        threads = _THREADS if len(view) > _LARGE else 1
        found, expected = blake3(view, max_threads=threads).hexdigest(), self._expected[name].lower()
        if found != expected:
            path = str(segment.file.path)
            raise SnapshotError(
                f"{path}: tensor {name} has BLAKE3 {found}",
                why=f"it was written with {expected}, so its bytes have changed on the disk since",
                fix=_REMOVE_SNAPSHOT,
                path=path,
                tensor=name,
                expected=expected,
                found=found,
            )


class FileDigests:
    """Refuses a file whose bytes are not those of its SHA-256.

    Args:
        expected: path as in the inventory -> 64 hex digits.
        files: what will be read.

    Raises:
        CheckpointError: a file has no digest.
    """

    def __init__(self, expected: Mapping[Path, str], files: Iterable[ShardFile]) -> None:
        self._expected = expected
        for file in files:
            if file.path not in expected:
                raise CheckpointError(
                    f"{file.path} has no SHA-256 to be held against",
                    why="checksums were asked for, and those that were given do not have this file",
                    fix="Write them anew: vllm-h3 checksums CKPT",
                    path=str(file.path),
                )

    def checker(self) -> Callable[[Segment, memoryview], None]:
        """What must see all bytes of all files, in order, and raises a CheckpointError at a wrong file's last ones."""
        state = hashlib.sha256()

        def check(segment: Segment, view: memoryview) -> None:
            nonlocal state
            state.update(view)
            if segment.last:
                found, state = state.hexdigest(), hashlib.sha256()
                self._compare(segment.file.path, found)

        return check

    def _compare(self, path: Path, found: str) -> None:
        expected = self._expected[path].lower()
        if found != expected:
            raise CheckpointError(
                f"{path} has SHA-256 {found}",
                why=f"it should have {expected}",
                fix=DOWNLOAD_AGAIN,
                path=str(path),
                expected=expected,
                found=found,
            )
