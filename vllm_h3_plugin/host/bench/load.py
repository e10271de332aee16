# SPDX-License-Identifier: Apache-2.0
"""Measure loading, restart and table build in this process, through the code that a server's worker runs.

The subject is the plugin's own pipeline class, built from the host's config as a worker builds it; only the HTTP
server, the engine around it and torch.compile are left out. Steps alternate and begin with cold files. A step that
fails leaves its error in the results, and the others still run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm_h3_plugin import settings
from vllm_h3_plugin.checkpoint.inventory import Inventory, take_inventory
from vllm_h3_plugin.checkpoint.layout import linear_layers
from vllm_h3_plugin.checkpoint.reader import ReadOptions
from vllm_h3_plugin.checkpoint.synthetic import SynthSpec, planned_bytes
from vllm_h3_plugin.errors import H3Error
from vllm_h3_plugin.host.bench import pipeline as bench_pipeline
from vllm_h3_plugin.host.bench import table as bench_table
from vllm_h3_plugin.host.bench.checkpoint import require_room
from vllm_h3_plugin.host.bench.pipeline import BenchedPipeline, LoadRun
from vllm_h3_plugin.host.bench.reads import RawRead, read_raw, whole
from vllm_h3_plugin.host.bench.table import TableRun
from vllm_h3_plugin.host.session import model_configs
from vllm_h3_plugin.memory.weights import ModelShapes, Resident, predict_resident
from vllm_h3_plugin.quantization.plan import plan
from vllm_h3_plugin.quantization.recipe import load_recipe

SWEEP = (1, 4, 8, 16)
"""Numbers of reading threads that ``--threads-sweep`` compares."""

RAW, RAW_OTHER = "raw read", "raw read, the slower way"
LOAD, LOAD_AND_WRITE = "load", "load, snapshot written"
SNAPSHOT_RAW, RESTART = "raw read of the snapshot", "restart from the snapshot"
ADALN_RAW, TABLE = "raw read of AdaLN", "table build"

# Tokenizer, configs and headers, rounded up.
_SIDE_FILES = 16 << 20


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        checkpoint: an FL2VA or Ref2VA folder, or a root of both.
        work_dir: where snapshots and tables go; its ``cache-*`` folders are emptied first.
        recipe: of the server.
        repeat: times that loads, restarts and builds are measured.
        threads: that read; None: H3_READ_THREADS.
        sweep: also measure :data:`SWEEP`.
    """

    checkpoint: Path
    work_dir: Path
    recipe: str = "fp8"
    repeat: int = 2
    threads: int | None = None
    sweep: bool = False


@dataclass
class Measured:
    """Everything that a run measured so far.

    Attributes:
        raw, loads, tables: by step; a step that never succeeded is not in there.
        errors: by step.
        sweep: by number of threads: raw read and load.
        predicted: of this checkpoint; ``true_size`` of the real model.
    """

    threads: int
    predicted: Resident
    true_size: Resident
    raw: dict[str, list[RawRead]] = field(default_factory=dict)
    loads: dict[str, list[LoadRun]] = field(default_factory=dict)
    tables: list[TableRun] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    sweep: dict[int, tuple[RawRead, LoadRun]] = field(default_factory=dict)


class Bench:
    """One run. Needs ``single_rank`` around it.

    Args:
        options: what to measure.
        device: where the pipeline goes.
        starts: called with a step's name.
        ends: called with the step's name, its result in words, and everything so far.

    Raises:
        CheckpointError, RecipeError: the checkpoint or the recipe is not sound.
    """

    def __init__(
        self,
        options: Options,
        device: torch.device,
        *,
        starts: Callable[[str], None] = lambda step: None,
        ends: Callable[[str, str, Measured], None] = lambda step, words, measured: None,
    ) -> None:
        self._options = options
        self._device = device
        self._starts = starts
        self._ends = ends
        self._inventory: Inventory = take_inventory(options.checkpoint, None).require_clean()
        self._files = bench_pipeline.weight_files(self._inventory)
        self._caches = {name: options.work_dir / f"cache-{name}" for name in ("off", "auto")}
        self._snapshot_files: list[Path] = []
        self._direct: bool | None = None
        recipe = load_recipe(options.recipe)
        here, true = model_configs(self._inventory), ModelShapes()
        self.measured = Measured(
            options.threads or settings.load().read_threads,
            predict_resident(self._inventory, plan(recipe, linear_layers(*here))),
            predict_resident(true, plan(recipe, linear_layers(true.dit, true.text))),
        )

    def run(self) -> Measured:
        """Measure all steps; interrupted, what was measured stays in :attr:`measured`.

        Raises:
            UsageError: the disk of ``work_dir`` has no room for a snapshot and tables.
        """
        self._empty_caches()
        require_room(self._options.work_dir, bytes_beside(self.measured.predicted, self._options.repeat))
        try:
            with bench_pipeline.omni_world():
                for number in range(self._options.repeat):
                    self._round(number)
                if self._options.sweep:
                    self._sweep()
        finally:
            self._empty_caches()
        return self.measured

    def _round(self, number: int) -> None:
        self._raw(RAW, self._read_files)
        self._load(LOAD, self._from_checkpoint)
        if number == 0:
            self._load(LOAD_AND_WRITE, self._and_write)
        self._raw(SNAPSHOT_RAW, self._read_snapshot)
        last = number == self._options.repeat - 1
        self._load(RESTART, self._restart, then=self._build_tables if last else None)

    def _read_files(self) -> RawRead:
        """All weight files; the first time both past and through the page cache, from then on in the faster way.

        What the loader is held against must not depend on which of the two the loader itself takes.
        """
        if self._direct is not None:
            return read_raw(whole(self._files), **self._how())
        reads = []
        for self._direct in (True, False):
            reads.append(read_raw(whole(self._files), **self._how()))
        slower, faster = sorted(reads, key=lambda read: read.rate)
        self._direct = faster.direct
        self.measured.raw[RAW_OTHER] = [slower]
        return faster

    def _how(self, threads: int | None = None) -> dict[str, Any]:
        return {
            "threads": threads or self.measured.threads,
            "block_bytes": ReadOptions().block_bytes,
            "direct": bool(self._direct),
        }

    def _raw(self, step: str, work: Callable[[], RawRead]) -> None:
        with self._step(step) as done:
            result = work()
            self.measured.raw.setdefault(step, []).append(result)
            done(str(result))

    def _load(
        self,
        step: str,
        work: Callable[[], tuple[BenchedPipeline, LoadRun]],
        then: Callable[[BenchedPipeline], None] | None = None,
    ) -> None:
        pipeline = None
        with self._step(step) as done:
            pipeline, result = work()
            self.measured.loads.setdefault(step, []).append(result)
            done(_load_in_words(result))
        if pipeline is not None and then is not None:
            then(pipeline)
        del pipeline
        bench_pipeline.release()

    def _from_checkpoint(self, threads: int | None = None) -> tuple[BenchedPipeline, LoadRun]:
        # A table that is found would not be built on the way.
        shutil.rmtree(self._caches["off"], ignore_errors=True)
        return self._pipeline("off", "off", threads=threads)

    def _and_write(self) -> tuple[BenchedPipeline, LoadRun]:
        pipeline, run = self._pipeline("auto", "auto")
        self._snapshot_files = sorted(self._caches["auto"].rglob("*.safetensors"))
        if run.origin != "checkpoint" or "written" not in run.detail or run.detail.startswith("no "):
            self.measured.errors[LOAD_AND_WRITE] = f"loaded from {run.origin}: {run.detail}"
        return pipeline, run

    def _read_snapshot(self) -> RawRead:
        if not self._snapshot_files:
            raise H3Error("there is no snapshot to read", why="none was written", fix="See the step before.")
        return read_raw(whole(self._snapshot_files), **self._how())

    def _restart(self) -> tuple[BenchedPipeline, LoadRun]:
        return self._pipeline("require", "auto")

    def _pipeline(self, snapshot: str, cache: str, threads: int | None = None) -> tuple[BenchedPipeline, LoadRun]:
        return bench_pipeline.load(
            self._inventory,
            self._device,
            [*self._files, *(self._snapshot_files if snapshot == "require" else ())],
            snapshot=snapshot,
            cache_dir=self._caches[cache],
            recipe=self._options.recipe,
            read_threads=threads or self.measured.threads,
        )

    def _build_tables(self, pipeline: BenchedPipeline) -> None:
        for number in range(self._options.repeat):
            self._raw(ADALN_RAW, lambda: read_raw(bench_table.adaln_ranges(self._inventory), **self._how()))
            with self._step(TABLE) as done:
                result = bench_table.build(pipeline, self._inventory, number)
                self.measured.tables.append(result)
                done(_table_in_words(result))

    def _sweep(self) -> None:
        for threads in SWEEP:
            with self._step(f"{threads} threads") as done:
                raw = read_raw(whole(self._files), **self._how(threads))
                pipeline, load = self._from_checkpoint(threads)
                del pipeline
                self.measured.sweep[threads] = raw, load
                done(f"raw {raw}; load {_load_in_words(load)}")
            bench_pipeline.release()

    @contextmanager
    def _step(self, step: str) -> Iterator[Callable[[str], None]]:
        """Run a step; whatever it raises becomes its result."""
        self._starts(step)
        words: list[str] = []
        try:
            yield words.append
        except Exception as exc:  # noqa: BLE001 - the other steps still say something
            said = f"{exc.what}: {exc.why}" if isinstance(exc, H3Error) else f"{type(exc).__name__}: {exc}"
            self.measured.errors[step] = said
            words.append(f"failed: {said}")
        self._ends(step, "; ".join(words), self.measured)

    def _empty_caches(self) -> None:
        for folder in self._caches.values():
            shutil.rmtree(folder, ignore_errors=True)


def _load_in_words(run: LoadRun) -> str:
    note = f" ({run.cold.reason})" if run.cold.reason else ""
    return (
        f"{run.nbytes / 2**30:.3f} GiB in {run.weights_s:.2f} s, {run.rate / 2**30:.2f} GiB/s, "
        f"ready after {run.ready_s:.2f} s{note}; {run.detail}"
    )


def _table_in_words(run: TableRun) -> str:
    verdict = "bit-equal to the host's projection" if run.equal else "NOT equal to the host's projection"
    return f"{run.rows} rows in {run.build_s:.2f} s, kept after {run.ready_s:.2f} s, {verdict}"


def bytes_beside(predicted: Resident, repeat: int) -> int:
    """Bytes that a run writes beside its checkpoint, at most: a snapshot, and tables of 50 steps with pictures."""
    table = 0 if predicted.table is None else predicted.table.nbytes
    return predicted.nbytes + (2 + 2 * repeat) * table


def bytes_of(spec: SynthSpec, recipe: str, repeat: int) -> int:
    """Bytes that a run with a synthetic checkpoint needs on its disk."""
    precisions = plan(load_recipe(recipe), linear_layers(spec.dit, spec.text))
    predicted = predict_resident(ModelShapes(spec.dit, spec.text, vaes={}), precisions)
    return planned_bytes(spec) + bytes_beside(predicted, repeat) + _SIDE_FILES


def measure(options: Options, **callbacks: Any) -> Measured:
    """:class:`Bench` as the only rank of a world of its own."""
    from vllm_h3_plugin.host.register import register
    from vllm_h3_plugin.host.standalone import single_rank

    register()
    with single_rank() as device:
        return Bench(options, device, **callbacks).run()
