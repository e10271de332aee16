# SPDX-License-Identifier: Apache-2.0
"""Measure the demo and write ``docs/results/demo.json``: ``python -m tools.measure_demo``, in a host's environment."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools.environment import ROOT
from tools.results import Result, write_result
from tools.testrun import SUMMARY
from vllm_h3_plugin.pins import installed_host

RESULTS = ROOT / "docs" / "results"


def hardware() -> str:
    """This machine in words: processor, cores that this process may use, memory."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores, {gib:.0f} GiB, no accelerator used"


def versions(*more: str) -> dict[str, str]:
    """Of Python, the host, the plugin, and of ``more`` packages."""
    packages = ("vllm", "vllm-omni", "torch", *more, "vllm-h3-plugin")
    return {"python": platform.python_version()} | {package: version(package) for package in packages}


def run_demo() -> dict[str, Any]:
    """Run ``vllm-h3 demo --json`` in a folder that is thrown away; returns its JSON line."""
    with tempfile.TemporaryDirectory(prefix="h3-demo-") as folder:
        command = [str(Path(sys.executable).parent / "vllm-h3"), "demo", "--out", folder, "--json"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def last_test_s() -> float | None:
    """Seconds of the last complete and green `make test` of this checkout."""
    if not SUMMARY.is_file():
        return None
    summary = json.loads(SUMMARY.read_text(encoding="utf-8"))
    return summary["test_s"] if summary["ok"] and summary["whole"] else None


def main() -> int:
    """Run the demo twice and keep the second run: the first one still compiles bytecode and warms the page cache."""
    host = installed_host()
    run_demo()
    found = run_demo()
    test_s = last_test_s()
    result = Result(
        title="The demo on a machine without an accelerator",
        command="make results",
        date=date.today().isoformat(),
        hardware=hardware(),
        versions=versions(),
        rows=[
            {"Step": "server ready", "Seconds": found["ready_s"]},
            *({"Step": f"request: {clip['name']}", "Seconds": round(clip["request_s"], 2)} for clip in found["clips"]),
            {"Step": f"whole demo, host {host.name}", "Seconds": found["demo_s"]},
            {"Step": "`make test`, both hosts", "Seconds": test_s},
        ],
        ratios={"demo_s": found["demo_s"], "ready_s": found["ready_s"], "test_s": test_s},
        reasons={} if test_s is not None else {"test_s": "no complete green `make test` in this checkout yet"},
        notes="The second of two runs, on a prepared machine. Clips come from a synthetic checkpoint on the CPU "
        "reference platform: the figures say how long proving the path takes, nothing about real clips.",
    )
    print(write_result(RESULTS, "demo", result).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
