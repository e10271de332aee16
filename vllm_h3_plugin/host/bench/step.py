# SPDX-License-Identifier: Apache-2.0
"""One denoise step on the stock host and on the plugin, beside the floor of the same kernels, in one process.

Weights are random and of the same values in each model; only some of the 50 blocks are built, as many as a size needs
to be timed well. Everything that is compared is measured in turns.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from vllm_h3_plugin.errors import H3Error
from vllm_h3_plugin.host.bench import floor as bench_floor
from vllm_h3_plugin.host.bench import step_lowbit as bench_step_lowbit
from vllm_h3_plugin.host.bench.clock import in_turns, reason_of, settled_ms, wall_ms
from vllm_h3_plugin.host.bench.step_cells import (
    FLOOR,
    LONG_CLIP,
    LONG_TOKENS,
    LOW_BIT,
    PLUGIN,
    STOCK_BF16,
    STOCK_FP8,
    STOCK_SDPA,
    Cell,
    Found,
    Options,
    clip_of,
)
from vllm_h3_plugin.host.bench.step_models import (
    Model,
    RandomWeights,
    Request,
    attention_as,
    build_plugin,
    build_stock,
    put_masked_sdpa,
)
from vllm_h3_plugin.host.bench.step_profile import busy_ms
from vllm_h3_plugin.memory.operations import block_flops
from vllm_h3_plugin.memory.requests import RequestSize

_HEATING_ROUNDS = 3

_PREPARED = (FLOOR, PLUGIN, STOCK_FP8, STOCK_BF16, STOCK_SDPA, LOW_BIT)


@dataclass
class Part:
    """A column at a size, ready to be measured."""

    measures: Mapping[str, Callable[[], float]]
    step: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]]
    cell: Cell


class Bench:
    """See the module's docstring. Needs ``single_rank`` around it.

    Args:
        starts: told what comes next.
        ends: sees everything after each size.
    """

    def __init__(
        self,
        options: Options,
        device: torch.device,
        *,
        starts: Callable[[str], None] = lambda words: None,
        ends: Callable[[Found], None] = lambda found: None,
    ) -> None:
        self.options, self.device, self._starts, self._ends = options, device, starts, ends
        deepest = max((options.depth(size) for size in options.sizes), default=1)
        self._weights = RandomWeights(replace(options.config, num_layers=deepest), device)
        self.models: dict[str, Model] = {}
        self.failed: dict[str, str] = {}
        self.found = Found(options.config)

    def run(self) -> Found:
        """Build each model once, then measure every size."""
        self._build()
        # Not while models are built: the host's parameters are no inference tensors in a server either.
        with torch.inference_mode():
            for size in self.options.sizes:
                self._starts(f"{size.width}x{size.height}, {size.frames} frames: {size.tokens} tokens")
                self.found.cells += self._measure(size)
                if size is self._low_bit_size() and not self.found.lost:
                    self._measure_low_bit(size)
                self._ends(self.found)
                if self.found.lost:
                    break
        return self.found

    def _low_bit_size(self) -> RequestSize | None:
        """Where attention in few bits is measured: the long clip, else the last one."""
        if LOW_BIT not in self.options.columns or not self.options.sizes:
            return None
        return next((size for size in self.options.sizes if clip_of(size) == LONG_CLIP), self.options.sizes[-1])

    def _build(self) -> None:
        wanted = set(self.options.columns)
        stock = partial(build_stock, self._weights, eager=self.options.eager)
        builders: dict[str, tuple[bool, Callable[[], Model]]] = {
            STOCK_BF16: (STOCK_BF16 in wanted, partial(stock, fp8=False)),
            STOCK_FP8: (bool({STOCK_FP8, STOCK_SDPA} & wanted), partial(stock, fp8=True)),
            # The floor runs on the plugin's operands.
            PLUGIN: (bool({PLUGIN, LOW_BIT, FLOOR} & wanted), partial(build_plugin, self._weights)),
        }
        for name, (needed, build) in builders.items():
            if needed:
                self._starts(f"building {name}")
                try:
                    self.models[name] = build()
                except Exception as exc:  # noqa: BLE001 - the host may raise anything; the others still say something
                    self.failed[name] = reason_of(exc)
                self._release()

    def _measure(self, size: RequestSize) -> list[Cell]:
        layers = self.options.depth(size)
        for model in self.models.values():
            model.set_depth(layers)
        columns = [column for column in sorted(self.options.columns, key=_PREPARED.index) if column != LOW_BIT]
        # Beyond 2^31 elements torch's masked attention ends the device's context: the others are timed before it.
        alone = [STOCK_SDPA] if size.tokens > LONG_TOKENS and STOCK_SDPA in columns else []
        cells: dict[str, Cell] = {}
        for together in ([column for column in columns if column not in alone], alone):
            cells |= self._measure_together(together, size, layers)
        return [cells[column] for column in self.options.columns if column in cells]

    def _measure_together(self, columns: Sequence[str], size: RequestSize, layers: int) -> dict[str, Cell]:
        cells: dict[str, Cell] = {}
        parts: dict[str, Part] = {}
        # The stock host last: where it fails for good, the plugin and the floor have been seen to run.
        for column in columns:
            cells[column] = Cell(size, layers, column)
            if self.found.lost:
                cells[column] = replace(cells[column], note=f"not tried: {self.found.lost}")
                continue
            try:
                parts[column] = self._part(cells[column], size)
            except Exception as exc:  # noqa: BLE001 - as above
                cells[column] = replace(cells[column], note=reason_of(exc))
                self._release()
        times, failed = self._times({} if self.found.lost else parts, self.options.rounds_at(size))
        for column, part in parts.items():
            cells[column] = self._finish(part, column, times, failed)
        del parts
        self._release()
        return cells

    def _times(
        self, parts: Mapping[str, Part], rounds: int
    ) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], str]]:
        """Every measure of every column, in turns.

        The plugin's blocks and their floor take turns of their own, after some that are not kept: a step lasts
        minutes on a device at its power limit, and on an H200 that came from lighter work the floor ran 5 % faster
        than it went on to run, the plugin's blocks 2 %.
        """
        measures = {
            (column, name): partial(_inside, part.around, part.measures[name])
            for name in ("blocks_ms", "forward_ms", "outside_ms")
            for column, part in parts.items()
            if name in part.measures
        }
        pair = {key: measures.pop(key) for key in [(FLOOR, "blocks_ms"), (PLUGIN, "blocks_ms")] if key in measures}
        times, failed = in_turns(pair, rounds, warm=_HEATING_ROUNDS if self.device.type == "cuda" else 0)
        others, failed_others = in_turns(measures, rounds)
        return times | others, failed | failed_others

    def _measure_low_bit(self, size: RequestSize) -> None:
        self._starts(f"attention in few bits at {size.tokens} tokens")
        try:
            if PLUGIN in self.failed:
                raise H3Error(self.failed[PLUGIN])
            model = self.models[PLUGIN]
            model.set_depth(self.options.depth(size))
            self.found.low_bit = bench_step_lowbit.measure(
                model, size, self.device, self.options.rounds_at(size), self.options.low_bit
            )
        except Exception as exc:  # noqa: BLE001 - as above
            self.found.low_bit_reason = reason_of(exc)
        self._release()

    def _part(self, cell: Cell, size: RequestSize) -> Part:
        """Prepare a column: everything runs once, which compiles, measures attention kernels and fills caches."""
        if cell.column == FLOOR:
            return self._floor_part(cell, size)
        name = STOCK_FP8 if cell.column == STOCK_SDPA else cell.column
        if name in self.failed:
            raise H3Error(self.failed[name])
        model = self.models[name]
        around: Callable[[], AbstractContextManager[object]] = nullcontext
        notes = model.notes
        if cell.column == STOCK_SDPA:
            around = partial(attention_as, model.dit, partial(put_masked_sdpa, model.dit))
            notes = "attention SDPA with a mask, as where the host finds no other kernel"
        request = Request(model, size, self.device)
        works = {"forward_ms": request.forward, "blocks_ms": request.blocks, "outside_ms": request.outside}
        measures = {name: partial(settled_ms, work, self.device) for name, work in works.items()}
        measures["outside_ms"] = partial(settled_ms, request.outside, self.device, 200.0)  # too light to heat it
        with around():
            first = wall_ms(request.forward, self.device)
            later, peak = self._peak(partial(wall_ms, request.forward, self.device))
            for work in (request.blocks, request.outside):
                wall_ms(work, self.device)
        flops = cell.layers * block_flops(self.options.config, request.tokens, request.used)
        compile_s = max(0.0, first - later) / 1e3 if model.compiled else None
        cell = replace(cell, flops=flops, activation_bytes=peak, compile_s=compile_s, note=notes)
        return Part(measures, request.forward, around, cell)

    def _floor_part(self, cell: Cell, size: RequestSize) -> Part:
        if PLUGIN in self.failed:
            raise H3Error("the floor has no operands", why=self.failed[PLUGIN])
        model = self.models[PLUGIN]
        request = Request(model, size, self.device)
        blocks = list(model.dit.blocks)
        kept = bench_floor.operands(blocks, request.blocks)
        flops = cell.layers * block_flops(self.options.config, request.tokens, request.used)
        floor = bench_floor.floor(kept, blocks[0].mlp.fc1.quant_method.backend, flops)
        how = "one CUDA graph" if floor.graph else "no graph: this is the CPU"
        cell = replace(cell, flops=floor.flops, note=f"attention {floor.attention}, {how}")
        return Part({"blocks_ms": partial(settled_ms, floor.replay, self.device)}, floor.replay, nullcontext, cell)

    def _finish(
        self,
        part: Part,
        column: str,
        times: Mapping[tuple[str, str], float],
        failed: Mapping[tuple[str, str], str],
    ) -> Cell:
        cell = replace(part.cell, **{name: times.get((column, name)) for name in part.measures})  # type: ignore[arg-type]
        notes = [
            cell.note,
            *(f"{name} failed: {failed[column, name]}" for name in part.measures if (column, name) in failed),
        ]
        if self.device.type == "cuda" and not self.found.lost:
            try:
                with part.around():
                    cell = replace(cell, busy_ms=busy_ms(part.step))
            except Exception as exc:  # noqa: BLE001 - as above
                notes.append(f"no profile: {reason_of(exc)}")
        return replace(cell, note="; ".join(note for note in notes if note))

    def _peak(self, measure: Callable[[], float]) -> tuple[float, int | None]:
        """A measure, and the most bytes that it had on the device beyond those before it; None on the CPU."""
        if self.device.type != "cuda":
            return measure(), None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return measure(), torch.cuda.max_memory_allocated() - before

    def _release(self) -> None:
        gc.collect()
        if self.device.type == "cuda" and not self.found.lost:
            try:
                torch.cuda.empty_cache()
            except RuntimeError as exc:
                # After an illegal access nothing runs on the device any more in this process.
                self.found.lost = reason_of(exc)


def _inside(around: Callable[[], AbstractContextManager[object]], measure: Callable[[], float]) -> float:
    with around():
        return measure()
