# SPDX-License-Identifier: Apache-2.0
"""What was measured, as the figures that are asked for and the raw numbers beside them.

``results`` returns two measurements, ``load`` and ``memory``, in the form of ``docs/results/*.json``.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from vllm_h3_plugin.host.bench.load import (
    ADALN_RAW,
    LOAD,
    LOAD_AND_WRITE,
    RAW,
    RAW_OTHER,
    RESTART,
    SNAPSHOT_RAW,
    TABLE,
    Measured,
)
from vllm_h3_plugin.host.bench.pipeline import LoadRun
from vllm_h3_plugin.host.bench.reads import Cold, RawRead
from vllm_h3_plugin.host.bench.table import TableRun

GIB = 2**30
_PACKAGES = ("vllm", "vllm-omni", "torch", "vllm-h3-plugin")


@dataclass(frozen=True)
class Figure:
    """One number that is asked for.

    Attributes:
        value: None: not measured, and ``reason`` says why.
        asked: the bound, such as ``>= 0.85``; empty: none.
    """

    name: str
    value: float | None
    asked: str = ""
    reason: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the bound holds; None without a value or a bound."""
        if self.value is None or not self.asked:
            return None
        sign, _, bound = self.asked.partition(" ")
        return self.value >= float(bound) if sign == ">=" else self.value <= float(bound)


def load_figures(found: Measured) -> list[Figure]:
    """Of time, page cache and peaks; medians over the repetitions, and the worst of them for shares and peaks."""
    raw = [read.rate for read in found.raw.get(RAW, ())]
    loads, written = found.loads.get(LOAD, []), found.loads.get(LOAD_AND_WRITE, [])
    restarts, every = found.loads.get(RESTART, []), [run for runs in found.loads.values() for run in runs]
    snapshot = [read.seconds for read in found.raw.get(SNAPSHOT_RAW, ())]
    adaln = [read.seconds for read in found.raw.get(ADALN_RAW, ())]
    shares = [run.cached.share for run in every]
    unknown = next((run.cached.reason for run in every if run.cached.share is None), "")
    peaks = [
        run.device_peak_bytes / (run.resident_bytes + found.predicted.largest_layer_bytes)
        for run in every
        if run.device_peak_bytes is not None
    ]
    hosts = [max(0, run.host_growth_bytes - run.buffer_bytes) for run in every if run.host_growth_bytes is not None]
    why = _reasons(found)
    return [
        _ratio("load_over_raw_read", [run.rate for run in loads], raw, ">= 0.85", why(LOAD, RAW)),
        _ratio("load_with_snapshot_over_raw_read", [run.rate for run in written], raw, "", why(LOAD_AND_WRITE, RAW)),
        _ratio(
            "snapshot_restart_over_read",
            [run.weights_s for run in restarts],
            snapshot,
            "<= 1.2",
            why(RESTART, SNAPSHOT_RAW),
        ),
        _ratio("table_build_over_read", [t.build_s for t in found.tables], adaln, "<= 1.3", why(TABLE, ADALN_RAW)),
        _ratio("table_kept_over_read", [t.ready_s for t in found.tables], adaln, "", why(TABLE, ADALN_RAW)),
        _figure(
            "table_equals_host", [float(all(t.equal for t in found.tables))] * bool(found.tables), ">= 1", why(TABLE)
        ),
        _figure(
            "page_cache_share_after_load",
            [share for share in shares if share is not None] if None not in shares else [],
            "<= 0.02",
            unknown or why(LOAD),
        ),
        _figure(
            "device_peak_over_resident_plus_layer",
            peaks,
            "<= 1.02",
            "on the CPU there is no device memory apart from the host's" if every else why(LOAD),
        ),
        _figure(
            "host_peak_beyond_buffers_gib",
            [size / GIB for size in hosts],
            "<= 2",
            next((run.host_reason for run in every if run.host_reason), why(LOAD)),
        ),
    ]


def memory_figures(found: Measured) -> list[Figure]:
    """Of resident bytes; the error is the worst of all loads."""
    predicted, every = found.predicted.nbytes, [run for runs in found.loads.values() for run in runs]
    errors = [abs(run.resident_bytes - predicted) / run.resident_bytes for run in every]
    return [
        Figure("resident_gib_predicted", round(found.true_size.gib, 4), "<= 55.5"),
        _figure("prediction_error", errors, "<= 0.01", _reasons(found)(LOAD)),
        Figure("resident_gib_predicted_here", round(predicted / GIB, 6)),
        _figure("resident_gib_measured_here", [run.resident_bytes / GIB for run in every], "", _reasons(found)(LOAD)),
    ]


def results(found: Measured, *, command: str, subject: str) -> dict[str, dict[str, Any]]:
    """``{"load": …, "memory": …}``, each with the fields of ``docs/results/*.json``.

    Args:
        command: that measures this again.
        subject: the checkpoint in words.
    """
    common = {"command": command, "date": date.today().isoformat(), "hardware": hardware(), "versions": versions()}
    error = [f"{step} failed: {said}" for step, said in found.errors.items()]
    notes = f"{subject}, {found.threads} reading threads. Medians; shares and peaks are the worst of all loads. "
    load, memory = load_figures(found), memory_figures(found)
    return {
        "load": {
            "title": "Loading, restart and table build, beside reading the same bytes",
            **common,
            "rows": load_rows(found),
            **_as_ratios(load),
            "notes": " ".join([notes.strip(), *error]),
        },
        "memory": {
            "title": "Resident bytes, predicted and measured",
            **common,
            "rows": memory_rows(found),
            **_as_ratios(memory),
            "notes": f"{subject}. `resident_gib_predicted` is of the true size, everything else of this checkpoint.",
        },
    }


def load_rows(found: Measured) -> list[dict[str, Any]]:
    """One row a step."""
    rows = []
    for step in (RAW, RAW_OTHER, LOAD, LOAD_AND_WRITE, SNAPSHOT_RAW, RESTART, ADALN_RAW, TABLE):
        runs: list[RawRead | LoadRun | TableRun] = []
        runs += found.loads.get(step, ())
        runs += found.raw.get(step, ())
        if step == TABLE:
            runs += found.tables
        rows.append(_row(step, runs, found.errors.get(step, "")))
    for threads, (raw, load) in found.sweep.items():
        rows += [_row(f"{RAW}, {threads} threads", [raw], ""), _row(f"{LOAD}, {threads} threads", [load], "")]
    first = next(iter(found.loads.get(LOAD, ())), None)
    for vae in first.vaes if first else ():
        way = "streamed" if vae["streamed"] else f"in the host's way: {vae['reason']}"
        rows.append({"Step": f"{vae['part']}, {way}", "GiB": vae["nbytes"] / GIB, "Seconds, median": vae["seconds"]})
    return rows


def memory_rows(found: Measured) -> list[dict[str, Any]]:
    """One row a part."""
    run = next((run for runs in found.loads.values() for run in runs), None)
    parts = run.parts if run else {}
    return [
        {
            "Part": part,
            "Predicted, GiB": found.predicted.parts.get(part, 0) / GIB,
            "Measured, GiB": parts[part] / GIB if part in parts else None,
            "True size, predicted, GiB": found.true_size.parts.get(part, 0) / GIB,
        }
        for part in dict.fromkeys([*found.predicted.parts, *parts, *found.true_size.parts])
    ]


def _row(step: str, runs: Sequence[RawRead | LoadRun | TableRun], error: str) -> dict[str, Any]:
    if not runs:
        return {"Step": step, "GiB": None, "Note": error or "not run"}
    seconds = [_seconds(run) for run in runs]
    row: dict[str, Any] = {
        "Step": step,
        "GiB": runs[0].nbytes / GIB,
        "Seconds, least": min(seconds),
        "Seconds, median": median(seconds),
        "GiB/s, median": runs[0].nbytes / GIB / median(seconds),
        "Cached before": _worst(run.cold for run in runs),
    }
    ready = [run.ready_s for run in runs if not isinstance(run, RawRead)]
    if ready:
        row["Ready, s"] = median(ready)
    notes = [error, *dict.fromkeys(run.cold.reason for run in runs)]
    if isinstance(runs[0], LoadRun):
        parts = ", ".join(f"{part} {spent:.2f} s" for part, spent in runs[0].seconds.items() if part != "total")
        notes.append(f"first: {parts}")
    elif isinstance(runs[0], TableRun):
        notes.append(f"{runs[0].rows} rows; compared: {', '.join(runs[0].checked)}")
    elif isinstance(runs[0], RawRead):
        notes.append("past the page cache" if runs[0].direct else "through the page cache")
    row["Note"] = "; ".join(note for note in notes if note)
    return row


def _seconds(run: RawRead | LoadRun | TableRun) -> float:
    if isinstance(run, RawRead):
        return run.seconds
    return run.weights_s if isinstance(run, LoadRun) else run.build_s


def _worst(colds: Iterable[Cold]) -> float | None:
    shares = [cold.share for cold in colds]
    return None if None in shares else max(share for share in shares if share is not None)


def _ratio(name: str, above: Sequence[float], below: Sequence[float], asked: str, reason: str) -> Figure:
    if not above or not below:
        return Figure(name, None, asked, reason)
    return Figure(name, round(median(above) / median(below), 4), asked)


def _figure(name: str, values: Sequence[float], asked: str, reason: str) -> Figure:
    return Figure(name, round(max(values), 6), asked) if values else Figure(name, None, asked, reason)


def _reasons(found: Measured) -> Any:
    def why(*steps: str) -> str:
        said = [f"{step} failed: {found.errors[step]}" for step in steps if step in found.errors]
        return "; ".join(said) or "not measured (yet)"

    return why


def _as_ratios(figures: Sequence[Figure]) -> dict[str, Mapping[str, Any]]:
    return {
        "ratios": {figure.name: figure.value for figure in figures},
        "reasons": {figure.name: figure.reason for figure in figures if figure.value is None},
    }


def versions() -> dict[str, str]:
    """Of Python and the packages that matter."""
    return {"python": platform.python_version()} | {package: version(package) for package in _PACKAGES}


def hardware() -> str:
    """This machine in words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    machine = f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        return f"one {facts.name}, {facts.total_memory / GIB:.0f} GiB; {machine}"
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {machine}, no accelerator used"
