# SPDX-License-Identifier: Apache-2.0
"""Tell whether two machines have the same checkpoint: a digest of each file, equal wherever the file lies.

``source_identity`` asks whether one folder has changed and so looks at times; copies on two machines differ in those.
Importing this module does not import torch.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from vllm_h3_plugin.checkpoint.checksums import manifest_path, release_root, weight_files
from vllm_h3_plugin.checkpoint.hash_files import hash_files, stat_file
from vllm_h3_plugin.checkpoint.inventory import Inventory
from vllm_h3_plugin.errors import CheckpointError

SMALL_BYTES = 64 << 20
"""Files up to this size are hashed whole: configs, tokenizers, code that comes with the VAEs, indices."""
_SAMPLES, _SAMPLE_BYTES, _THREADS = 256, 4096, 8


def file_digests(inventory: Inventory, *, whole: bool = False) -> dict[str, str]:
    """Path below the release's root -> digest of every file of the partitions in use, sorted by path.

    Small files are hashed whole (BLAKE3). Of a large one it is size, header and 256 samples of 4 KiB, which takes
    seconds for all of H3 and misses a change that keeps the size and all samples.

    Args:
        inventory: of the partitions in use, without faults.
        whole: read every weight file to its end (SHA-256, minutes); no changed byte is missed then.

    Raises:
        CheckpointError: there is no checkpoint, or a file cannot be read.
    """
    root = release_root(inventory)
    paths = {
        manifest_path(Path(folder) / name, root): Path(folder) / name
        for partition in inventory.partitions
        for folder, _, names in os.walk(partition.path, followlinks=True)
        for name in names
        if not name.endswith((".pyc", ".part", ".lock")) and "/.cache/" not in f"{folder}/"
    }
    shards = weight_files(inventory) if whole else {}
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="h3-same") as pool:
        light = [name for name in paths if name not in shards]
        found = dict(zip(light, pool.map(lambda name: _sampled(paths[name]), light), strict=True))
    names = {file.path: name for name, file in shards.items()}
    for hashed in hash_files(stat_file(path) for path in names):
        if hashed.error is not None:
            raise hashed.error
        found[names[hashed.path]] = hashed.sha256
    return dict(sorted(found.items()))


def total_digest(files: Mapping[str, str]) -> str:
    """One digest of all files, 64 hex digits."""
    return blake3("".join(f"{digest}  {name}\n" for name, digest in sorted(files.items())).encode()).hexdigest()


def different(files: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Paths that only one of two checkpoints has, or whose digests differ; sorted."""
    return sorted(name for name in files.keys() | others.keys() if files.get(name) != others.get(name))


def _sampled(path: Path) -> str:
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            hasher = blake3(struct.pack("<Q", size))
            if size <= SMALL_BYTES:
                while block := file.read(1 << 20):
                    hasher.update(block)
                return hasher.hexdigest()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            (header,) = struct.unpack("<Q", os.pread(file.fileno(), 8, 0))
            hasher.update(os.pread(file.fileno(), min(header, SMALL_BYTES), 8))
            last = size - _SAMPLE_BYTES
            for index in range(_SAMPLES):
                hasher.update(os.pread(file.fileno(), _SAMPLE_BYTES, last * index // (_SAMPLES - 1)))
            return hasher.hexdigest()
    except OSError as exc:
        raise CheckpointError(
            f"{path} cannot be read",
            why=exc.strerror or str(exc),
            fix="Check the disk and the file's permissions.",
            path=str(path),
        ) from exc
