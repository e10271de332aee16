# SPDX-License-Identifier: Apache-2.0
"""Run the GPU tests and keep what they measured in ``docs/results/gpu.json``: ``python -m tools.measure_gpu``.

A machine that is lent for minutes at a time runs them in parts, each with ``--accelerator gpu -m gpu --report FILE``;
``python -m tools.measure_gpu --from FILE --from FILE`` keeps the figures of all parts as one, if nothing failed in any.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from tools.environment import ROOT
from tools.measure_demo import versions
from tools.results import Result, write_result
from vllm_h3_plugin.errors import UsageError

RESULTS = ROOT / "docs" / "results"
COLUMNS = {
    "ready_s": "Ready, s",
    "first_request_s": "First request, s",
    "later_request_s": "Later request, s",
    "loaded_mib": "GPU memory loaded, MiB",
    "after_request_mib": "after requests, MiB",
}
PEAKS = "request_peaks"
"""Beside the servers: what the FP8 server's requests took and what was predicted, by size."""


def gpu() -> str:
    """Name, memory and driver of the first GPU."""
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader", "--id=0"]
    return "one " + subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def result_of(report: dict[str, Any], hardware: str, versions: dict[str, str]) -> Result:
    """The measurement from a test report of the GPU tests."""
    figures = dict(report["figures"])
    peaks = figures.pop(PEAKS, {})
    rows = [{"Server": name} | {COLUMNS[key]: found[key] for key in COLUMNS} for name, found in figures.items()]
    ratios: dict[str, float | None] = {
        f"{recipe}_{key}_over_stock": round(figures[f"plugin-{recipe}"][key] / figures[f"stock-{recipe}"][key], 3)
        for recipe in ("fp8", "bf16")
        for key in ("first_request_s", "later_request_s", "loaded_mib")
    }
    ratios["tests_passed"] = report["counts"].get("passed", 0)
    of_denoise = [peak["predicted_mib"]["denoise"] / peak["measured_mib"] for peak in peaks.values()]
    if of_denoise:
        ratios["denoise_peak_predicted_over_measured_most"] = round(max(of_denoise), 3)
        ratios["denoise_peak_predicted_over_measured_least"] = round(min(of_denoise), 3)
    return Result(
        title="GPU tests, and the real server beside the stock host",
        command="make test-gpu",
        date=date.today().isoformat(),
        hardware=hardware,
        versions=versions,
        rows=rows,
        ratios=ratios,
        notes=_left_out(report["could_not_run"])
        + "Synthetic checkpoint of the real widths with 4 of 50 blocks and 2 of 50 text layers; 768x448, "
        "124 frames, 4 steps. Times are whole requests seen by the client, encoding included; memory is that of the "
        "whole GPU. The stock host quantizes per tensor and AdaLN too; the plugin keeps AdaLN in BF16, as a table."
        + _peaks(peaks),
    )


def _left_out(skips: list[dict[str, Any]]) -> str:
    """What this device or environment has not, and how many tests were left out for it; empty if nothing was."""
    reasons: dict[str, int] = {}
    for skip in skips:
        reasons[skip["reason"]] = reasons.get(skip["reason"], 0) + 1
    told = "; ".join(f"{reason} ({count} {'test' if count == 1 else 'tests'})" for reason, count in reasons.items())
    return f"Left out: {told}. " if told else ""


def _peaks(peaks: dict[str, Any]) -> str:
    told = "; ".join(
        f"{size}: {peak['measured_mib']} MiB measured, {peak['predicted_mib']['denoise']} predicted"
        for size, peak in peaks.items()
    )
    return f" Peaks of the FP8 server's requests beside the denoise phase's prediction: {told}." if told else ""


def joined(parts: Sequence[Path]) -> dict[str, Any]:
    """One report of several, each of other tests.

    Raises:
        UsageError: a part cannot be read, or something failed in it.
    """
    whole: dict[str, Any] = {"figures": {}, "counts": {}, "could_not_run": []}
    for path in parts:
        try:
            part = json.loads(path.read_text(encoding="utf-8"))
            counts = part["counts"]
            whole["figures"] |= part["figures"]
            whole["could_not_run"] += part["could_not_run"]
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise UsageError(
                f"{path} is no report of tests", why=str(exc), fix="pytest --report FILE writes one."
            ) from exc
        if failed := counts.get("failed", 0) + counts.get("errors", 0):
            raise UsageError(f"{failed} tests failed in {path}", why="only what passed is kept", fix="Run it again.")
        whole["counts"]["passed"] = whole["counts"].get("passed", 0) + counts.get("passed", 0)
    return whole


def keep(report: dict[str, Any]) -> None:
    """Write what a report measured."""
    print(write_result(RESULTS, "gpu", result_of(report, gpu(), versions())))


def main() -> int:
    """Run the tests; keep the figures only of a run in which nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="parts", action="append", type=Path, default=[], metavar="FILE")
    options, pytest_words = parser.parse_known_args()
    if options.parts:
        try:
            keep(joined(options.parts))
        except UsageError as exc:
            print(exc, file=sys.stderr)
            return 1
        return 0
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--accelerator",
            "gpu",
            "-m",
            "gpu",
            "-q",
            "-rs",
            "--report",
            str(report),
        ]
        code = subprocess.run([*command, *pytest_words], cwd=ROOT).returncode
        if code != 0:
            return code
        keep(json.loads(report.read_text(encoding="utf-8")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
