# SPDX-License-Identifier: Apache-2.0
"""Ranks as real processes on one base, without a host: what each reads from the disk and what memory it holds.

Used by tools/measure_ranks.py and by the tests of the base. Weights are random; the first part is taken whole as views,
as the DiT's are by every rank, the second is cut between the ranks, as the text encoder's are.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_h3_plugin import __version__
from vllm_h3_plugin.checkpoint.one_builder import build_once
from vllm_h3_plugin.checkpoint.read_only import read_only
from vllm_h3_plugin.checkpoint.safetensors_header import TensorRecord
from vllm_h3_plugin.checkpoint.shared_base import SharedBase
from vllm_h3_plugin.checkpoint.snapshot import open_snapshot
from vllm_h3_plugin.checkpoint.snapshot_manifest import Entry, Piece, SnapshotKey
from vllm_h3_plugin.checkpoint.snapshot_paths import snapshots_folder
from vllm_h3_plugin.checkpoint.snapshot_writer import SnapshotWriter

KEY = SnapshotKey("5" * 64, "4" * 64, "reference", "ranks", __version__)
WHOLE, CUT = "transformer", "text_encoder"
DEADLINE_S = 300.0
_WIDTH = 1024


@dataclass(frozen=True)
class Rank:
    """What one process found.

    Attributes:
        read_bytes: that it had read from the disk (``/proc/self/io``) until the last tensor was taken.
        pss: its share of the mapped files (``smaps``), and ``pss_anon``: by how much its anonymous memory grew.
        warm_read_bytes: that it had read from the disk over the prompts after that.
        built: it wrote the base.
        waited_s: for another one to write it.
        takeovers: builders that died meanwhile.
        sums: of each part, to see that all hold the same.
    """

    rank: int
    read_bytes: int
    pss: int
    pss_anon: int
    warm_read_bytes: int
    built: bool
    waited_s: float
    takeovers: int
    sums: tuple[int, ...]


def entries(mib: int) -> dict[str, tuple[Entry, ...]]:
    """A base of that many MiB: three quarters whole, one quarter cut."""

    def part(rows: int) -> tuple[Entry, ...]:
        made = []
        for number in range(rows // 4096):
            made.append(Entry(f"{number}.weight", "I8", (4096, _WIDTH), (Piece(None, 0, 4096),)))
            made.append(Entry(f"{number}.weight_scale", "F32", (4096, 1), (Piece(None, 0, 4096),)))
        return tuple(made)

    return {WHOLE: part(mib * 768), CUT: part(mib * 256)}


def write_base(cache: Path, mib: int, pause_s: float = 0.0) -> Path:
    """Write the base; ``pause_s`` before it is committed."""
    import torch

    parts = entries(mib)
    generator = torch.Generator().manual_seed(0)
    with SnapshotWriter(cache, KEY, parts, {"checkpoint": "random", "recipe": "int8"}) as writer:
        for part, made in parts.items():
            for entry in made:
                tensor = torch.randint(-127, 128, entry.shape, dtype=torch.int8, generator=generator)
                writer.put(part, entry.name, None, tensor.float() / 64 if entry.dtype == "F32" else tensor)
        time.sleep(pause_s)
        return writer.commit()


def drop_from_cache(folder: Path) -> None:
    """Let the next read of a folder's files come from the disk."""
    from vllm_h3_plugin.checkpoint import page_cache

    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    page_cache.drop(folder.iterdir())


def run_ranks(
    cache: Path, ranks: int, *, mib: int, prompts: int = 20, pause_s: float = 0.0, kill_builder: bool = False
) -> list[Rank]:
    """Start that many processes on one cache folder and wait for what they found.

    Args:
        prompts: "prompts" that each runs afterwards: every tensor is read once.
        pause_s: how long a builder takes before it commits.
        kill_builder: end the first builder with SIGKILL while it writes; its result is left out.

    Raises:
        RuntimeError: a process ended without a result.
    """
    context = multiprocessing.get_context("spawn")
    snapshots_folder(cache).mkdir(parents=True, exist_ok=True)
    results, building = context.Queue(), context.Queue()
    barrier = context.Barrier(ranks - kill_builder)
    arguments = (str(cache), ranks, mib, prompts, pause_s, barrier, results, building)
    processes = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    expected = ranks
    try:
        if kill_builder:
            os.kill(building.get(timeout=DEADLINE_S), signal.SIGKILL)
            expected -= 1
        found = [results.get(timeout=DEADLINE_S) for _ in range(expected)]
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
    failed = [item for item in found if isinstance(item, str)]
    if failed:
        raise RuntimeError(failed[0])
    return sorted(found, key=lambda rank: rank.rank)


def _rank(
    rank: int,
    cache: str,
    ranks: int,
    mib: int,
    prompts: int,
    pause_s: float,
    barrier: Any,
    results: Any,
    building: Any,
) -> None:
    try:
        results.put(_run(rank, Path(cache), ranks, mib, prompts, pause_s, barrier, building))
    except BaseException as exc:
        results.put(f"rank {rank}: {type(exc).__name__}: {exc}")
        raise


def _run(
    rank: int, cache: Path, ranks: int, mib: int, prompts: int, pause_s: float, barrier: Any, building: Any
) -> Rank:
    import torch

    torch.set_num_threads(1)
    (torch.ones(64, _WIDTH, dtype=torch.int8).float() @ torch.ones(_WIDTH, 64)).sum()

    def find() -> SharedBase | None:
        snapshot = open_snapshot(cache, KEY)
        return None if snapshot is None else SharedBase(snapshot)

    def build() -> SharedBase:
        building.put(os.getpid())
        write_base(cache, mib, pause_s)
        base = find()
        assert base is not None
        return base

    outcome = build_once(snapshots_folder(cache) / f"{KEY.id}.build.lock", find, build)
    barrier.wait(DEADLINE_S)
    base = outcome.built
    _touch(read_only(torch.zeros(64, dtype=torch.int8)))  # code that is loaded at its first use is no weight
    before = _io(), _anonymous()
    tensors = take(base, rank, ranks)
    sums = tuple(sum(_touch(tensor) for tensor in part) for part in tensors)
    barrier.wait(DEADLINE_S)  # a page counts for all who have touched it
    read, mapped, anonymous = _io() - before[0], _mapped(base.snapshot.folder), _anonymous() - before[1]
    barrier.wait(DEADLINE_S)
    warm = _io()
    for _ in range(prompts):
        base.check()
        for part in tensors:
            for tensor in part:
                _touch(tensor)
    return Rank(
        rank,
        read,
        mapped + anonymous,
        anonymous,
        _io() - warm,
        outcome.here,
        outcome.waited_s,
        outcome.takeovers,
        sums,
    )


def take(base: SharedBase, rank: int, ranks: int) -> tuple[list[Any], list[Any]]:
    """Tensors of one rank: whole parameters as views, and this rank's rows of the part that is cut."""
    whole = [base.view(WHOLE, record.name) for record in base.snapshot.file(WHOLE).tensors]
    cut = [base.read(CUT, _rows(record, rank, ranks)) for record in base.snapshot.file(CUT).tensors]
    return whole, cut


def _touch(tensor: Any) -> int:
    """Read every byte without a copy of another element type."""
    import torch

    return int(tensor.view(-1).view(torch.int64).sum())


def _rows(record: TensorRecord, rank: int, ranks: int) -> TensorRecord:
    count, nbytes = record.shape[0] // ranks, record.nbytes // ranks
    return replace(record, shape=(count, *record.shape[1:]), offset=record.offset + rank * nbytes, nbytes=nbytes)


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


def _io() -> int:
    return next(int(line.split()[1]) for line in _lines("/proc/self/io") if line.startswith("read_bytes"))


def _anonymous() -> int:
    """This process's share of anonymous memory, in bytes."""
    return next(int(line.split()[1]) << 10 for line in _lines("/proc/self/smaps_rollup") if line.startswith("Pss_Anon"))


def _mapped(folder: Path) -> int:
    """This process's share of the pages of a folder's files that it maps, in bytes."""
    total, inside = 0, False
    for line in _lines("/proc/self/smaps"):
        words = line.split()
        if not words[0].endswith(":"):  # the first line of a mapping ends with its file
            inside = line.endswith(".safetensors") and str(folder) in line
        elif inside and words[0] == "Pss:":
            total += int(words[1]) << 10
    return total
