# SPDX-License-Identifier: Apache-2.0
"""What `make test` does: ``python -m tools.testrun [--quick] [PYTEST ARGS]``.

Lint, then pytest on the default host (everything), then on each other host (tests marked ``host``: the rest does not
depend on it). Every stage runs even if one before it failed. The summary names each test that could not run and why;
a skip that tests/conftest.py did not foresee fails the run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.environment import ROOT, venv_path
from vllm_h3_plugin.pins import load_pins

REPORTS = ROOT / ".cache" / "tests"
SUMMARY = REPORTS / "summary.json"


@dataclass(frozen=True)
class Stage:
    """One finished stage: lint or the tests of one host."""

    name: str
    exit_code: int
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    could_not_run: tuple[dict[str, Any], ...] = ()

    @property
    def unexpected(self) -> list[dict[str, Any]]:
        """Skips that no gate of tests/conftest.py made."""
        return [skip for skip in self.could_not_run if not skip["expected"]]

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.unexpected


def run_lint() -> Stage:
    """Run the static gates."""
    started = time.monotonic()
    code = subprocess.run([sys.executable, "-m", "tools.lint"], cwd=ROOT, check=False).returncode
    return Stage("lint", code, time.monotonic() - started)


def run_pytest(host: str, expression: str, extra: Sequence[str]) -> Stage:
    """Run the tests of one host that match a mark expression."""
    report = REPORTS / f"{host}.json"
    report.unlink(missing_ok=True)
    command = [
        str(venv_path(host) / "bin" / "python"),
        "-m",
        "pytest",
        "--report",
        str(report),
        "-m",
        expression,
        *extra,
    ]
    started = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    seconds = time.monotonic() - started
    if not report.is_file():
        return Stage(host, code or 1, seconds)
    found = json.loads(report.read_text(encoding="utf-8"))
    return Stage(host, code, seconds, found["counts"], tuple(found["could_not_run"]))


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


def summary_lines(stages: Iterable[Stage]) -> list[str]:
    """The closing summary: a line a stage, then every test that could not run under its reason, then the totals."""
    stages = list(stages)
    lines = ["", "Summary"]
    for stage in stages:
        counts = ", ".join(f"{number} {name}" for name, number in sorted(stage.counts.items()))
        state = "ok" if stage.ok else "FAILED"
        lines.append(f"  {stage.name:8} {state:6} {stage.seconds:6.0f} s  {counts}".rstrip())
    reasons: dict[tuple[bool, str], list[tuple[str, str]]] = {}
    for stage in stages:
        for skip in stage.could_not_run:
            reasons.setdefault((skip["expected"], skip["reason"]), []).append((stage.name, skip["test"]))
    for (expected, reason), skips in sorted(reasons.items()):
        lines.append(f"{'Could not run' if expected else 'SKIPPED WITHOUT LEAVE'} ({reason}):")
        lines.extend(f"  {name}" for name in _named(skips))
    total = {
        name: sum(stage.counts.get(name, 0) for stage in stages) for name in ("passed", "failed", "errors", "skipped")
    }
    failed = total["failed"] + total["errors"]
    lines.append(f"tests: {total['passed']} passed, {failed} failed, {total['skipped']} skipped")
    return lines


def main(argv: Sequence[str]) -> int:
    """Run all stages and print the summary; 0 only if every stage is ok."""
    quick = "--quick" in argv
    extra = [word for word in argv if word != "--quick"]
    started = time.monotonic()
    SUMMARY.unlink(missing_ok=True)
    stages = [run_lint()]
    for position, pin in enumerate(load_pins().hosts):
        print(f"\n== {pin}", flush=True)
        wanted = (["host"] if position else []) + (["not server"] if quick else [])
        stages.append(run_pytest(pin.name, " and ".join(wanted), extra))
    ok = all(stage.ok for stage in stages)
    seconds = round(time.monotonic() - started, 1)
    whole = not quick and not extra
    SUMMARY.parent.mkdir(parents=True, exist_ok=True)
    SUMMARY.write_text(json.dumps({"ok": ok, "whole": whole, "test_s": seconds}) + "\n", encoding="utf-8")
    print("\n".join(summary_lines(stages)), flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
