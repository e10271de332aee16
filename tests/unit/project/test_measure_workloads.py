# SPDX-License-Identifier: Apache-2.0
"""``docs/results/workloads.json`` keeps what each command measured, and says why a figure is not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tools.measure_workloads import COMMAND, GPU_COMMAND, REASONS, merged
from tools.results import Result, load_results, write_result

RATIOS = {"turbo_fp8_cosine", "turbo_delta_cosine", "lora_overhead", "steps_ratio_error", "vae_decode_speedup"}


def measured(command: str, part: str, **ratios: float | None) -> Result:
    return Result(
        title="Workloads",
        command=command,
        date="2026-12-01",
        hardware=f"machine of {part}",
        versions={"torch": "2"},
        rows=[{"Part": part, "What": "it"}],
        ratios=dict(ratios),
        reasons=REASONS,
        notes=f"About {part}.",
    )


CPU = measured(COMMAND, "a CPU", turbo_fp8_cosine=0.999, turbo_delta_cosine=0.99, steps_ratio_error=0.01)


def test_a_first_run_says_of_each_figure_that_is_missing_why(tmp_path: Path) -> None:
    write_result(tmp_path, "workloads", merged(CPU, None))
    found = load_results(tmp_path)["workloads"]
    assert set(found.ratios) == RATIOS
    assert found.reasons.keys() == {"lora_overhead", "vae_decode_speedup"}
    assert all("needs a GPU" in reason for reason in found.reasons.values())


def test_a_run_on_a_gpu_fills_its_place_and_leaves_the_rest(tmp_path: Path) -> None:
    both = merged(measured(GPU_COMMAND, "a GPU", lora_overhead=0.03), merged(CPU, None))
    write_result(tmp_path, "workloads", both)
    found = load_results(tmp_path)["workloads"]
    assert (found.ratios["lora_overhead"], found.ratios["turbo_fp8_cosine"]) == (0.03, 0.999)
    assert found.reasons.keys() == {"vae_decode_speedup"}
    assert [row["Part"] for row in found.rows] == ["a CPU", "a GPU"]
    assert found.command == f"{COMMAND}; {GPU_COMMAND}" and "About a CPU." in found.notes
    again = merged(replace(CPU, ratios={**CPU.ratios, "turbo_fp8_cosine": 0.998}), found)
    assert (again.ratios["turbo_fp8_cosine"], again.ratios["lora_overhead"]) == (0.998, 0.03)
    assert sorted(str(row["Part"]) for row in again.rows) == ["a CPU", "a GPU"]


def test_a_run_on_a_gpu_alone_says_how_the_rest_is_measured() -> None:
    found = merged(measured(GPU_COMMAND, "a GPU", lora_overhead=0.03), None)
    assert COMMAND in found.reasons["turbo_fp8_cosine"]
