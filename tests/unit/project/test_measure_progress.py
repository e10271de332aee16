# SPDX-License-Identifier: Apache-2.0
"""The share of a step that progress costs, put beside what other commands have measured."""

from __future__ import annotations

from dataclasses import replace

from tools.measure_demo import RESULTS
from tools.measure_progress import RATIO, with_progress
from tools.results import load_results


def test_the_share_is_of_the_shortest_step_and_nothing_else_changes() -> None:
    results = load_results(RESULTS)
    steps = [{"Column": name, "Step of 50, ms": ms} for name, ms in (("plugin", 400), ("plugin", 200), ("floor", 100))]
    serving = replace(results["serving"], ratios={"kill_lost": 0, RATIO: 9.0})
    made = with_progress(serving, replace(results["step"], rows=steps), [1.0] * 90 + [30.0] * 10)
    assert made.ratios == {"kill_lost": 0, RATIO: 0.005}
    again = with_progress(made, replace(results["step"], rows=steps), [2.0] * 100)
    assert (again.ratios[RATIO], len(again.rows)) == (0.01, len(made.rows))
    assert again.command.count("measure_progress") == 1
