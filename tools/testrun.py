# SPDX-License-Identifier: Apache-2.0
"""What `make test` does: ``python -m tools.testrun [--quick] [PYTEST ARGS]``.

Side by side: lint, pytest on the default host (everything), and pytest on each other host (tests marked ``host``: the
rest does not depend on it). Every stage runs to its end even if another fails. The summary names the slowest tests,
each test that could not run and why, and each failure with what it said; a skip that tests/conftest.py did not foresee
fails the run. Each stage's output is in ``.cache/tests/STAGE.log`` too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.environment import ROOT, venv_path
from tools.side_by_side import run_side_by_side
from vllm_h3_plugin.pins import load_pins

REPORTS = ROOT / ".cache" / "tests"
SUMMARY = REPORTS / "summary.json"
SLOWEST = 10
INTERRUPTED = 130


@dataclass(frozen=True)
class Stage:
    """One finished stage: lint or the tests of one host."""

    name: str
    exit_code: int
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    could_not_run: tuple[dict[str, Any], ...] = ()
    failed: tuple[dict[str, str], ...] = ()
    """Test, phase and the end of what pytest said of each failure."""
    slowest: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Under "modules" and "tests": node id -> seconds of set-up, call and teardown."""

    @property
    def unexpected(self) -> list[dict[str, Any]]:
        """Skips that no gate of tests/conftest.py made."""
        return [skip for skip in self.could_not_run if not skip["expected"]]

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.unexpected


def commands(quick: bool, extra: Sequence[str]) -> dict[str, list[str]]:
    """Name -> command of each stage, in the order of the summary."""
    stages = {"lint": [sys.executable, "-m", "tools.lint"]}
    for position, pin in enumerate(load_pins().hosts):
        wanted = (["host"] if position else []) + (["not server"] if quick else [])
        stages[pin.name] = [
            str(venv_path(pin.name) / "bin" / "python"),
            # A stage's output is a pipe; without this a line is seen only when eight thousand characters are.
            "-u",
            "-m",
            "pytest",
            "--report",
            str(report_of(pin.name)),
            # Two of them at once would overwrite each other's list of what failed last.
            "-o",
            f"cache_dir={REPORTS / f'pytest-{pin.name}'}",
            "-m",
            " and ".join(wanted),
            *extra,
        ]
    return stages


def report_of(stage: str) -> Path:
    """Where pytest leaves its report of a stage (tests/conftest.py)."""
    return REPORTS / f"{stage}.json"


def read_stage(name: str, exit_code: int, seconds: float) -> Stage:
    """A stage that has ended, with its report if it left one; tests without a report are not green."""
    report = report_of(name)
    if name == "lint":
        return Stage(name, exit_code, seconds)
    if not report.is_file():
        return Stage(name, exit_code or 1, seconds)
    found = json.loads(report.read_text(encoding="utf-8"))
    return Stage(
        name,
        exit_code,
        seconds,
        found["counts"],
        tuple(found["could_not_run"]),
        tuple(found["failed"]),
        found["slowest"],
    )


def _named(skips: Iterable[tuple[str, str]]) -> list[str]:
    """One line a test: cases of a parametrized one are counted, hosts are joined. ``skips`` are (stage, test)."""
    stages: dict[str, list[str]] = {}
    cases: dict[str, set[str]] = {}
    for stage, test in skips:
        name, _, case = test.partition("[")
        cases.setdefault(name, set()).add(case)
        if stage not in stages.setdefault(name, []):
            stages[name].append(stage)
    return [
        f"{name} {f'({len(cases[name])} cases) ' if len(cases[name]) > 1 else ''}on {', '.join(stages[name])}"
        for name in stages
    ]


def slowest_lines(stages: Iterable[Stage], kind: str) -> list[str]:
    """The slowest modules or tests of all stages; set-up is apart, because it serves other tests too."""
    found = [
        (sum(seconds), seconds, stage.name, name)
        for stage in stages
        for name, seconds in stage.slowest.get(kind, {}).items()
    ]
    worst = sorted(found, reverse=True)[:SLOWEST]
    lines = [f"Slowest {kind} (seconds: all, of these set-up, teardown):"] if worst else []
    for total, (setup, _, teardown), stage, name in worst:
        lines.append(f"  {total:6.1f} {setup:6.1f} {teardown:5.1f}  {name} on {stage}")
    return lines


def summary_lines(stages: Iterable[Stage]) -> list[str]:
    """The closing summary: a line a stage, what was slow, what could not run and why, each failure, then totals."""
    stages = list(stages)
    lines = ["", "Summary"]
    for stage in stages:
        counts = ", ".join(f"{number} {name}" for name, number in sorted(stage.counts.items()))
        state = "ok" if stage.ok else "FAILED"
        lines.append(f"  {stage.name:8} {state:6} {stage.seconds:6.0f} s  {counts}".rstrip())
    lines += slowest_lines(stages, "modules") + slowest_lines(stages, "tests")
    reasons: dict[tuple[bool, str], list[tuple[str, str]]] = {}
    for stage in stages:
        for skip in stage.could_not_run:
            reasons.setdefault((skip["expected"], skip["reason"]), []).append((stage.name, skip["test"]))
    for (expected, reason), skips in sorted(reasons.items()):
        lines.append(f"{'Could not run' if expected else 'SKIPPED WITHOUT LEAVE'} ({reason}):")
        lines.extend(f"  {name}" for name in _named(skips))
    # Last, because the end of a long log is what is always kept.
    for stage in stages:
        for failure in stage.failed:
            lines.append(f"FAILED in {failure['when']} on {stage.name}: {failure['test']}")
            lines.extend(f"  {line}" for line in failure["said"].splitlines())
    total = {
        name: sum(stage.counts.get(name, 0) for stage in stages) for name in ("passed", "failed", "errors", "skipped")
    }
    failed = total["failed"] + total["errors"]
    lines.append(f"tests: {total['passed']} passed, {failed} failed, {total['skipped']} skipped")
    return lines


def main(argv: Sequence[str]) -> int:
    """Run all stages and print the summary; 0 only if every stage is ok, 130 after Ctrl-C."""
    quick = "--quick" in argv
    extra = [word for word in argv if word != "--quick"]
    started = time.monotonic()
    SUMMARY.unlink(missing_ok=True)
    wanted = commands(quick, extra)
    for name in wanted:
        report_of(name).unlink(missing_ok=True)
    for pin in load_pins().hosts:
        print(f"{pin.name:7}= {pin}", flush=True)
    ended, interrupted = run_side_by_side(wanted, ROOT, REPORTS)
    stages = [read_stage(name, end.exit_code, end.seconds) for name, end in ended.items()]
    ok = not interrupted and all(stage.ok for stage in stages)
    seconds = round(time.monotonic() - started, 1)
    whole = not quick and not extra and not interrupted
    SUMMARY.parent.mkdir(parents=True, exist_ok=True)
    SUMMARY.write_text(json.dumps({"ok": ok, "whole": whole, "test_s": seconds}) + "\n", encoding="utf-8")
    print("\n".join(summary_lines(stages)), flush=True)
    if interrupted:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
