# SPDX-License-Identifier: Apache-2.0
"""Figures of a soak become one measurement, which keeps what other commands have measured."""

from __future__ import annotations

from dataclasses import replace

from tools.measure_serving import ELSEWHERE, result_of
from tools.results import parse_result

REPORT = {
    "figures": {
        "soak 200": {
            "good delivered and verified": 1.0,
            "bad answered with 4xx": 1.0,
            "stuck": 0,
            "resident before, MiB": 1000.0,
            "resident after, MiB": 1010.0,
        },
        "cancel 20": {"longest, s": 0.25},
        "kills 20": {"lost": 0, "stuck": 0},
    }
}
VERSIONS = {"vllm": "0.30.0"}


def test_a_first_run_says_what_is_not_measured_yet() -> None:
    made = result_of(REPORT, None, VERSIONS)
    assert made.ratios["soak_rss_growth"] == 1.01 and made.ratios["cancel_to_idle_s"] == 0.25
    assert made.reasons == ELSEWHERE and {made.ratios[name] for name in ELSEWHERE} == {None}


def test_another_run_keeps_what_others_measured() -> None:
    first = result_of(REPORT, None, VERSIONS)
    filled = replace(
        first,
        command="make serving; another command",
        rows=[*first.rows, {"Encode": "plugin"}],
        ratios={**first.ratios, "encode_speedup_over_stock": 2.5, "soak_stuck": 3},
        reasons={"health_p99_ms_during_encode": "no time"},
        notes=f"{first.notes}\n\nOf the other.",
    )
    again = result_of(REPORT, filled, VERSIONS)
    assert (again.command, again.rows[-1]) == ("make serving; another command", {"Encode": "plugin"})
    assert again.ratios["encode_speedup_over_stock"] == 2.5 and again.ratios["soak_stuck"] == 0
    assert again.reasons == {"health_p99_ms_during_encode": "no time"}
    assert again.notes.endswith("Of the other.") and again.rows.count({"Encode": "plugin"}) == 1
    parse_result("serving.json", again.__dict__)
