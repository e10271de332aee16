# SPDX-License-Identifier: Apache-2.0
"""Run the soak of the server and keep its figures: ``python -m tools.measure_serving``, in a host's environment.

Writes ``docs/results/serving.json``. What is measured by another command has its place there too, null until then
(``tools.results.set_ratio`` fills it), and keeps its value when the soak is run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from tools.environment import ROOT
from tools.measure_demo import RESULTS, hardware, versions
from tools.results import Result, load_results, write_result

NAME = "serving"
SOAK = ("tests/server/test_soak.py",)
ELSEWHERE = {
    "health_p99_ms_during_encode": "measured by `python -m tools.measure_serving_encode`",
    "encode_speedup_over_stock": "measured by `python -m tools.measure_serving_encode`",
}
"""Ratios of other commands, and why they are null before these have run."""

COMMAND = "make serving"
NOTES = (
    "The real server path with a tiny synthetic checkpoint on the CPU reference platform, FP8, one process: clips of "
    "64x64 pixels and 2 or 3 steps (128x128 and 199 steps where jobs are cancelled). Each clip that was delivered "
    "passed `vllm-h3 verify`, and equal requests gave equal bytes. A cancel counts from the DELETE until the worker "
    "says that it is idle."
)
_COLUMN = "What"
_PARTS = {"soak": "Mixed requests, 16 at a time", "cancel": "Cancel at random moments", "kills": "kill -9"}


def result_of(report: dict[str, Any], kept: Result | None, versions: dict[str, str]) -> Result:
    """The measurement from a test report of the soak.

    Args:
        report: what ``pytest --report`` wrote.
        kept: the measurement that there is, for the ratios of other commands.
    """
    figures = {name.partition(" ")[0]: found for name, found in report["figures"].items()}
    soak, cancel, kills = (figures[name] for name in _PARTS)
    rows = [
        {_COLUMN: words, "Figure": name, "Value": value}
        for part, words in _PARTS.items()
        for name, value in figures[part].items()
    ]
    mine: dict[str, float | None] = {
        "soak_good_delivered": soak["good delivered and verified"],
        "soak_bad_4xx": soak["bad answered with 4xx"],
        "soak_stuck": soak["stuck"],
        "soak_rss_growth": round(soak["resident after, MiB"] / soak["resident before, MiB"], 4),
        "kill_lost": kills["lost"],
        "kill_stuck": kills["stuck"],
        "cancel_to_idle_s": cancel["longest, s"],
    }
    made = Result(
        title="Serving on the reference platform",
        command=COMMAND,
        date=date.today().isoformat(),
        hardware=hardware(),
        versions=versions,
        rows=rows,
        ratios=mine | dict.fromkeys(ELSEWHERE),
        reasons=ELSEWHERE,
        notes=NOTES,
    )
    return made if kept is None else with_kept(made, kept)


def with_kept(made: Result, kept: Result) -> Result:
    """A new measurement, and beside it what other commands have put into the same file."""
    ratios = {**made.ratios, **{name: value for name, value in kept.ratios.items() if made.ratios.get(name) is None}}
    return replace(
        made,
        command="; ".join(dict.fromkeys([made.command, *kept.command.split("; ")])),
        versions={**kept.versions, **made.versions},
        rows=[*made.rows, *(row for row in kept.rows if row.get(_COLUMN) not in _PARTS.values())],
        ratios=ratios,
        reasons={name: why for name, why in {**made.reasons, **kept.reasons}.items() if ratios.get(name, 0) is None},
        notes="\n\n".join(dict.fromkeys([made.notes, *kept.notes.split("\n\n")])),
    )


def main() -> int:
    """Run the tests; keep the figures only of a run in which nothing failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pytest", "--soak", "-m", "soak", "-q", "--report", str(report), *SOAK]
        code = subprocess.run([*command, *sys.argv[1:]], cwd=ROOT).returncode
        if code != 0:
            return code
        found = json.loads(report.read_text(encoding="utf-8"))
        path = write_result(RESULTS, NAME, result_of(found, load_results(RESULTS).get(NAME), versions()))
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
