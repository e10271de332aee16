# SPDX-License-Identifier: Apache-2.0
"""What is missed is said beside the figures, in the kept measurement too."""

from __future__ import annotations

from tools.measure_ranks import LEAST, MOST, missed
from tools.results import load_results
from tools.testrun import ROOT


def test_what_is_not_as_asked_is_named_with_both_numbers() -> None:
    good = {**MOST, **LEAST}
    assert missed(good) == "" and missed(dict.fromkeys(good)) == ""
    said = missed({**good, "pss_over_copy": 1.2, "int8_dit_cosine": 0.99})
    assert said == " Missed: `pss_over_copy` (1.2, asked <= 1.1), `int8_dit_cosine` (0.99, asked >= 0.999)."


def test_the_kept_measurement_says_what_it_misses() -> None:
    kept = load_results(ROOT / "docs" / "results")["ranks"]
    assert missed(kept.ratios).strip() in kept.notes
