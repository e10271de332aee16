# SPDX-License-Identifier: Apache-2.0
"""What two nodes miss is said beside the figures, in the kept measurement too."""

from __future__ import annotations

from tools.measure_cluster import MOST, missed
from tools.results import load_results
from tools.testrun import ROOT


def test_what_is_not_as_asked_is_named_with_both_numbers() -> None:
    assert missed(dict(MOST)) == "" and missed(dict.fromkeys(MOST)) == ""
    assert missed({**MOST, "recovery_s": 31.0}) == " Missed: `recovery_s` (31.0, asked <= 30)."


def test_the_kept_measurement_has_every_figure_and_says_what_it_misses() -> None:
    kept = load_results(ROOT / "docs" / "results")["cluster"]
    assert set(kept.ratios) == set(MOST) and missed(kept.ratios).strip() in kept.notes
