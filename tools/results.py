# SPDX-License-Identifier: Apache-2.0
"""Measurements as data: ``docs/results/NAME.json`` and the tables of ``docs/RESULTS.md`` that are made from them.

One file is one measurement::

    {
      "title":    "What was measured, in words",
      "command":  "the command that shows it again",
      "date":     "2026-11-30",
      "hardware": "what it ran on",
      "versions": {"vllm": "...", "torch": "..."},
      "rows":     [{"column": "cell", "another column": 1.5}],
      "ratios":   {"demo_s": 71.2, "unmeasured_thing": null},
      "reasons":  {"unmeasured_thing": "why there is no number"},
      "notes":    "optional: what a reader must know, in Markdown"
    }

``ratios`` is flat: a name and a number, for whoever compares runs by machine. A number that nobody measured is null and
has a reason.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from vllm_h3_plugin.errors import UsageError

Cell = str | int | float | bool | None


@dataclass(frozen=True)
class Result:
    """One measurement; the fields are those of the file."""

    title: str
    command: str
    date: str
    hardware: str
    versions: dict[str, str]
    rows: list[dict[str, Cell]]
    ratios: dict[str, float | None]
    reasons: dict[str, str] = field(default_factory=dict)
    notes: str = ""


def parse_result(name: str, raw: Any) -> Result:
    """Check the content of one file.

    Raises:
        UsageError: names the file and the field.
    """

    def fault(what: str, fix: str) -> UsageError:
        return UsageError(f"{name}: {what}", fix=fix)

    if not isinstance(raw, dict):
        raise fault("not a JSON object", "See tools/results.py for the fields.")
    known = set(Result.__dataclass_fields__)
    needed = known - {"reasons", "notes"}
    for missing in sorted(needed - raw.keys()):
        raise fault(f"field {missing!r} is missing", "Every measurement says what, how, when and on what.")
    for extra in sorted(raw.keys() - known):
        raise fault(f"unknown field {extra!r}", f"Known: {', '.join(sorted(known))}.")
    result = Result(**raw)
    for text in ("title", "command", "date", "hardware"):
        if not isinstance(raw[text], str) or not raw[text].strip():
            raise fault(f"field {text!r} is empty", "Say it in words.")
    try:
        date.fromisoformat(result.date)
    except ValueError as exc:
        raise fault(f"date {result.date!r}", "Write it as YYYY-MM-DD.") from exc
    if not result.rows or any(not isinstance(row, dict) or not row for row in result.rows):
        raise fault("field 'rows'", "A list of at least one object, column -> cell.")
    for ratio, value in result.ratios.items():
        if value is None and not result.reasons.get(ratio):
            raise fault(f"ratio {ratio!r} is null without a reason", "Say in 'reasons' why it was not measured.")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise fault(f"ratio {ratio!r} is {value!r}", "A number or null.")
    for stray in sorted(result.reasons.keys() - result.ratios.keys()):
        raise fault(f"reason for unknown ratio {stray!r}", "Name a ratio of the same file.")
    return result


def load_results(folder: Path) -> dict[str, Result]:
    """Every measurement below a folder, by name.

    Raises:
        UsageError: a file is not valid; names it.
    """
    results = {}
    for path in sorted(folder.glob("*.json")):
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as exc:
            raise UsageError(f"{path.name}: not JSON", why=str(exc), fix="Write it with a JSON library.") from exc
        results[path.stem] = parse_result(path.name, raw)
    return results


def write_result(folder: Path, name: str, result: Result) -> Path:
    """Write one measurement, checked first; returns the file."""
    parse_result(f"{name}.json", asdict(result))
    path = folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _cell(value: Cell) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def render(name: str, result: Result) -> str:
    """One measurement as a section of Markdown."""
    versions = ", ".join(f"{package} {version}" for package, version in result.versions.items())
    columns = list(dict.fromkeys(column for row in result.rows for column in row))
    lines = [
        f"## {result.title}",
        "",
        f"`{result.command}` · {result.date} · {result.hardware} · {versions} · "
        f"[results/{name}.json](results/{name}.json)",
        "",
        *_table(columns, [[_cell(row[column]) if column in row else "" for column in columns] for row in result.rows]),
    ]
    if result.ratios:
        ratios = [
            [f"`{ratio}`", f"not measured: {result.reasons[ratio]}" if value is None else _cell(value)]
            for ratio, value in result.ratios.items()
        ]
        lines += ["", *_table(["Figure", "Value"], ratios)]
    if result.notes:
        lines += ["", result.notes]
    return "\n".join(lines)


def render_all(results: dict[str, Result]) -> str:
    """All measurements, in order of their names."""
    return "\n\n".join(render(name, result) for name, result in results.items())


def set_ratio(folder: Path, name: str, ratio: str, value: float) -> Path:
    """Put a figure that another command measured into a file that keeps a place for it; returns the file.

    Raises:
        UsageError: there is no such file, or it has no such ratio.
    """
    path = folder / f"{name}.json"
    results = load_results(folder)
    if name not in results or ratio not in results[name].ratios:
        raise UsageError(f"{path.name}: no ratio {ratio!r} to set", fix="Measure the file first, or correct the name.")
    found = results[name]
    reasons = {key: reason for key, reason in found.reasons.items() if key != ratio}
    return write_result(folder, name, replace(found, ratios={**found.ratios, ratio: value}, reasons=reasons))
