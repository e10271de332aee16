# SPDX-License-Identifier: Apache-2.0
"""What a look at progress costs a denoise step: ``python -m tools.measure_progress``, in a host's environment.

Times what the plugin does on rank 0 for whoever watches, between two steps: the forward hook that counts, the file that
tells, and the look for a cancel. The share is of the shortest real step that was measured (``docs/results/step.json``),
so it is the largest that it can be. Goes into ``docs/results/serving.json``, whose other figures stay.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace

from tools.measure_demo import RESULTS
from tools.results import Cell, Result, load_results, write_result

RATIO = "progress_share_of_step"
STEPS, WARM_UP = 2000, 100
_WHAT = "Progress and cancel, between two steps"


def measure() -> list[float]:
    """Milliseconds of each step's bookkeeping, on this machine's /tmp."""
    from vllm_h3_plugin.host.cancel import Cancellation
    from vllm_h3_plugin.host.progress import Progress

    found = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["H3_RUN_DIR"] = folder
        progress, cancel = Progress(), Cancellation(agree=bool)
        progress.begin("video_gen_1-x")
        progress.phase("denoising", steps=STEPS)
        with cancel.request("video_gen_1-x"):
            for _ in range(STEPS):
                began = time.perf_counter()
                cancel.check()
                progress.step_done()
                found.append(1000 * (time.perf_counter() - began))
    return found[WARM_UP:]


def with_progress(serving: Result, step: Result, found: list[float]) -> Result:
    """The serving measurement with these figures in it.

    Args:
        step: the measurement of whole steps.
        found: milliseconds.
    """
    shortest = min(float(row["Step of 50, ms"]) for row in step.rows if row["Column"] == "plugin")  # type: ignore[arg-type]
    median, high = statistics.median(found), statistics.quantiles(found, n=100)[98]
    figures = {"median, ms": round(median, 3), "p99, ms": round(high, 3), "shortest real step, ms": round(shortest, 1)}
    mine: list[dict[str, Cell]] = [{"What": _WHAT, "Figure": name, "Value": value} for name, value in figures.items()]
    others = [row for row in serving.rows if row.get("What") != _WHAT]
    last = max((place for place, row in enumerate(others) if "What" in row), default=-1) + 1
    command = "; ".join(dict.fromkeys([*serving.command.split("; "), "python -m tools.measure_progress"]))
    return replace(
        serving,
        command=command,
        rows=[*others[:last], *mine, *others[last:]],
        ratios={**serving.ratios, RATIO: round(median / shortest, 6)},
    )


def main() -> int:
    """Measure and keep."""
    results = load_results(RESULTS)
    made = with_progress(results["serving"], results["step"], measure())
    print(write_result(RESULTS, "serving", made).name, made.ratios[RATIO])
    return 0


if __name__ == "__main__":
    sys.exit(main())
