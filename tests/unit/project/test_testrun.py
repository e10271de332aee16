# SPDX-License-Identifier: Apache-2.0
"""`make test` tells honestly what ran, what could not, and fails on a skip that nobody foresaw."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import testrun
from tools.environment import ROOT
from tools.testrun import Stage, summary_lines

GATED = {"test": "tests/gpu/test_a.py::test_b", "reason": "needs a CUDA device", "expected": True}
STRAY = {"test": "tests/unit/test_c.py::test_d", "reason": "felt like it", "expected": False}


def test_the_summary_names_each_test_that_could_not_run_and_ends_with_totals() -> None:
    stages = [
        Stage("lint", 0, 3.0),
        Stage("nvidia", 0, 60.0, {"passed": 10, "skipped": 1}, (GATED,)),
        Stage("ascend", 1, 60.0, {"passed": 4, "failed": 1, "errors": 1}),
    ]
    lines = summary_lines(stages)
    assert "Could not run (needs a CUDA device):" in lines
    assert "  tests/gpu/test_a.py::test_b on nvidia" in lines
    assert lines[-1] == "tests: 14 passed, 2 failed, 1 skipped"
    assert any(line.split()[:2] == ["ascend", "FAILED"] for line in lines)


def test_cases_are_counted_and_hosts_joined_so_that_the_list_can_be_read() -> None:
    skips = tuple(GATED | {"test": f"tests/gpu/test_a.py::test_b[{case}]"} for case in ("x", "y-[1]", "z"))
    lines = summary_lines([Stage(name, 0, 1.0, {"skipped": 3}, skips) for name in ("nvidia", "ascend")])
    assert [line for line in lines if "test_a.py" in line] == [
        "  tests/gpu/test_a.py::test_b (3 cases) on nvidia, ascend"
    ]


def test_a_skip_that_no_gate_made_fails_its_stage() -> None:
    stage = Stage("nvidia", 0, 1.0, {"passed": 1, "skipped": 1}, (STRAY,))
    assert not stage.ok
    assert "SKIPPED WITHOUT LEAVE (felt like it):" in summary_lines([stage])


def test_a_gated_skip_does_not_fail_its_stage() -> None:
    assert Stage("nvidia", 0, 1.0, {"passed": 1, "skipped": 1}, (GATED,)).ok


@pytest.mark.parametrize("failing", ["lint", "nvidia", "ascend"])
def test_any_failed_stage_fails_the_run_after_all_stages_ran(
    failing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = []

    def stage(name: str) -> Stage:
        ran.append(name)
        return Stage(name, int(name == failing), 1.0)

    monkeypatch.setattr(testrun, "run_lint", lambda: stage("lint"))
    monkeypatch.setattr(testrun, "run_pytest", lambda host, expression, extra: stage(host))
    monkeypatch.setattr(testrun, "SUMMARY", tmp_path / "summary.json")
    assert testrun.main([]) == 1
    assert ran == ["lint", "nvidia", "ascend"]
    assert json.loads((tmp_path / "summary.json").read_text())["ok"] is False


def test_only_a_complete_run_counts_as_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expressions = []

    def stage(host: str, expression: str, extra: Any) -> Stage:
        expressions.append((host, expression))
        return Stage(host, 0, 1.0)

    monkeypatch.setattr(testrun, "run_lint", lambda: Stage("lint", 0, 1.0))
    monkeypatch.setattr(testrun, "run_pytest", stage)
    monkeypatch.setattr(testrun, "SUMMARY", tmp_path / "summary.json")
    assert testrun.main(["--quick"]) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["whole"] is False
    assert testrun.main([]) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["whole"] is True
    assert expressions == [
        ("nvidia", "not server"),
        ("ascend", "host and not server"),
        ("nvidia", ""),
        ("ascend", "host"),
    ]


def _run_pytest(folder: Path, files: dict[str, str]) -> dict[str, Any]:
    """Run pytest on a small tree with this project's conftest and configuration; returns its report."""
    tests = folder / "tests"
    tests.mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tests)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name, source in files.items():
        (tests / name).parent.mkdir(exist_ok=True)
        (tests / name).write_text(source)
    report = folder / "report.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--report", str(report), str(tests)]
    subprocess.run(command, cwd=folder, capture_output=True, timeout=120, check=False)
    return json.loads(report.read_text())


def test_the_report_tells_gated_skips_from_others(tmp_path: Path) -> None:
    report = _run_pytest(
        tmp_path,
        {
            "gpu/test_gpu.py": "def test_needs_a_device(): raise AssertionError",
            "unit/test_unit.py": (
                "import pytest\n"
                "def test_passes(): pass\n"
                "def test_fails(): raise AssertionError\n"
                "def test_skips(): pytest.skip('felt like it')\n"
                "@pytest.mark.xfail(reason='known')\n"
                "def test_xfails(): raise AssertionError\n"
                "@pytest.mark.only_host('elsewhere', reason='a fault of that host')\n"
                "def test_other_host(): raise AssertionError\n"
            ),
            "unit/test_module.py": "import pytest\npytest.importorskip('no_such_module_anywhere')\n",
        },
    )
    skips = {skip["test"].rpartition("/")[2]: (skip["expected"], skip["reason"]) for skip in report["could_not_run"]}
    assert skips.pop("test_gpu.py::test_needs_a_device") == (
        True,
        "needs a CUDA device: run `make test-gpu` on a machine that has one",
    )
    assert skips.pop("test_unit.py::test_other_host") == (True, "only on elsewhere: a fault of that host")
    assert skips.pop("test_unit.py::test_skips") == (False, "felt like it")
    assert skips.pop("test_unit.py::test_xfails")[0] is False
    assert skips.pop("test_module.py")[0] is False
    assert skips == {}
    assert (report["counts"]["passed"], report["counts"]["failed"]) == (1, 1)
