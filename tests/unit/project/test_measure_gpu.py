# SPDX-License-Identifier: Apache-2.0
"""What `make test-gpu` keeps: figures of the servers, and what the device did not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.measure_gpu import joined, result_of
from vllm_h3_plugin.errors import UsageError

SERVER = {
    "ready_s": 40.0,
    "first_request_s": 1.5,
    "later_request_s": 1.0,
    "loaded_mib": 7000,
    "after_request_mib": 7100,
}
STOCK = {**SERVER, "first_request_s": 15.0}


def report(*reasons: str) -> dict[str, Any]:
    figures = {
        f"{kind}-{recipe}": STOCK if kind == "stock" else SERVER
        for kind in ("plugin", "stock")
        for recipe in ("fp8", "bf16")
    }
    skips = [{"test": "t", "reason": reason, "expected": False} for reason in reasons]
    return {"figures": figures, "counts": {"passed": 7, "skipped": len(skips)}, "could_not_run": skips}


def test_tests_of_what_the_device_has_not_are_told_and_not_counted_as_passed() -> None:
    made = result_of(report("fa4: no package", "int8: no package", "fa4: no package"), "one GPU", {"torch": "2"})
    assert made.notes.startswith("Left out: fa4: no package (2 tests); int8: no package (1 test). Synthetic")
    assert made.ratios["tests_passed"] == 7 and made.ratios["fp8_first_request_s_over_stock"] == 0.1


def test_nothing_is_said_where_nothing_was_left_out() -> None:
    assert result_of(report(), "one GPU", {"torch": "2"}).notes.startswith("Synthetic")


def test_peaks_of_requests_are_ratios_and_no_server() -> None:
    part = report()
    part["figures"]["request_peaks"] = {
        "768x448, 124 frames": {"predicted_mib": {"denoise": 150}, "measured_mib": 100},
        "1344x768, 124 frames": {"predicted_mib": {"denoise": 240}, "measured_mib": 200},
    }
    made = result_of(part, "one GPU", {"torch": "2"})
    assert [row["Server"] for row in made.rows] == ["plugin-fp8", "plugin-bf16", "stock-fp8", "stock-bf16"]
    assert made.ratios["denoise_peak_predicted_over_measured_most"] == 1.5
    assert made.ratios["denoise_peak_predicted_over_measured_least"] == 1.2
    assert "768x448, 124 frames: 100 MiB measured, 150 predicted" in made.notes


def test_parts_of_a_run_are_one_report(tmp_path: Path) -> None:
    first, second = report("fa4: no package"), report()
    first["figures"] = {"plugin-fp8": SERVER}
    for name, part in (("first", first), ("second", second)):
        (tmp_path / name).write_text(json.dumps(part))
    whole = joined([tmp_path / "first", tmp_path / "second"])
    assert whole["counts"] == {"passed": 14}
    assert set(whole["figures"]) == set(second["figures"])
    assert [skip["reason"] for skip in whole["could_not_run"]] == ["fa4: no package"]


def test_a_part_in_which_a_test_failed_is_refused_by_name(tmp_path: Path) -> None:
    part = report() | {"counts": {"passed": 7, "failed": 1, "errors": 1}}
    (tmp_path / "part").write_text(json.dumps(part))
    with pytest.raises(UsageError, match=r"2 tests failed in .*part"):
        joined([tmp_path / "part"])


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_what_is_no_report_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "part").write_text(text)
    with pytest.raises(UsageError, match="part is no report of tests"):
        joined([tmp_path / "part"])
    with pytest.raises(UsageError, match="gone is no report"):
        joined([tmp_path / "gone"])
