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
from tools.side_by_side import Ended
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


def test_each_failure_ends_the_summary_with_what_it_said_since_the_end_of_a_log_is_what_is_kept() -> None:
    failure = {"test": "tests/a.py::test_b", "when": "call", "said": "E   assert 1 == 2\nE    +  where 1 = f()"}
    lines = summary_lines([Stage("nvidia", 1, 9.0, {"failed": 1, "skipped": 1}, (GATED,), (failure,))])
    assert lines[-4:] == [
        "FAILED in call on nvidia: tests/a.py::test_b",
        "  E   assert 1 == 2",
        "  E    +  where 1 = f()",
        "tests: 0 passed, 1 failed, 1 skipped",
    ]


def test_the_slowest_of_all_stages_are_named_slowest_first() -> None:
    seconds = {f"tests/a.py::test_{number}": [0.0, float(number), 0.0] for number in range(12)}
    other = {"tests/b.py::test_server": [30.0, 1.0, 2.5]}
    stages = [Stage("nvidia", 0, 90.0, slowest={"tests": seconds}), Stage("ascend", 0, 60.0, slowest={"tests": other})]
    lines = summary_lines(stages)
    first = next(number for number, line in enumerate(lines) if line.startswith("Slowest tests"))
    assert lines[first + 1].split() == ["33.5", "30.0", "2.5", "tests/b.py::test_server", "on", "ascend"]
    assert lines[first + 2].split()[3] == "tests/a.py::test_11"
    assert lines[first + 11].startswith("tests: "), "ten are shown"


class Stages:
    """Commands that leave reports in place of the real stages."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.codes = {"lint": 0, "nvidia": 0, "ascend": 0}
        self.ran: list[str] = []
        self.interrupted = False
        self.without_report: set[str] = set()
        monkeypatch.setattr(testrun, "REPORTS", folder)
        monkeypatch.setattr(testrun, "SUMMARY", folder / "summary.json")
        monkeypatch.setattr(testrun, "run_side_by_side", self._run)

    def _run(self, commands: dict[str, list[str]], folder: Path, logs: Path) -> tuple[dict[str, Ended], bool]:
        self.ran = list(commands)
        for name in commands:
            assert not testrun.report_of(name).exists(), "the report of an earlier run would be taken for this one's"
            if name != "lint" and name not in self.without_report:
                document = {"counts": {"passed": 1}, "failed": [], "could_not_run": [], "slowest": {}}
                testrun.report_of(name).write_text(json.dumps(document))
        return {name: Ended(self.codes[name], 1.0) for name in commands}, self.interrupted

    def summary(self) -> dict[str, Any]:
        """What the run left for others to read."""
        return json.loads(testrun.SUMMARY.read_text())


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    """All of them green."""
    return Stages(tmp_path, monkeypatch)


@pytest.mark.parametrize("failing", ["lint", "nvidia", "ascend"])
def test_any_failed_stage_fails_the_run(failing: str, stages: Stages) -> None:
    stages.codes[failing] = 1
    assert testrun.main([]) == 1
    assert stages.ran == ["lint", "nvidia", "ascend"]
    assert stages.summary()["ok"] is False


def test_only_a_complete_run_counts_as_whole(stages: Stages) -> None:
    assert testrun.main(["--quick"]) == 0
    assert stages.summary()["whole"] is False
    assert testrun.main(["-k", "one"]) == 0
    assert stages.summary()["whole"] is False
    assert testrun.main([]) == 0
    assert stages.summary()["whole"] is True


def test_an_interrupted_run_shows_its_summary_and_is_neither_whole_nor_green(
    stages: Stages, capsys: pytest.CaptureFixture[str]
) -> None:
    stages.interrupted = True
    stages.codes["ascend"] = 2
    assert testrun.main([]) == 130
    summary = stages.summary()
    assert (summary["ok"], summary["whole"]) == (False, False)
    assert "tests: 2 passed, 0 failed, 0 skipped" in capsys.readouterr().out


def test_tests_that_leave_no_report_are_not_green(stages: Stages) -> None:
    stages.without_report.add("ascend")
    assert testrun.main([]) == 1


def test_other_hosts_run_only_what_depends_on_the_host() -> None:
    expressions = {
        (quick, name): command[len(command) - command[::-1].index("-m")]
        for quick in (True, False)
        for name, command in testrun.commands(quick, ["-x"]).items()
        if name != "lint"
    }
    assert expressions == {
        (True, "nvidia"): "not server",
        (True, "ascend"): "host and not server",
        (False, "nvidia"): "",
        (False, "ascend"): "host",
    }
    assert all(command[-1] == "-x" for name, command in testrun.commands(False, ["-x"]).items() if name != "lint")


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


def test_the_report_holds_seconds_of_set_up_call_and_teardown(tmp_path: Path) -> None:
    source = (
        "import time, pytest\n"
        "@pytest.fixture\n"
        "def slow():\n"
        "    time.sleep(0.2)\n"
        "    yield\n"
        "    time.sleep(0.1)\n"
        "def test_slow(slow): time.sleep(0.3)\n"
        "def test_fast(): pass\n"
    )
    slowest = _run_pytest(tmp_path, {"unit/test_unit.py": source})["slowest"]
    (module, of_module), (slow, of_slow) = next(iter(slowest["modules"].items())), next(iter(slowest["tests"].items()))
    assert module.endswith("test_unit.py") and slow.endswith("test_slow")
    assert [part >= least for part, least in zip(of_slow, (0.2, 0.3, 0.1), strict=True)] == [True] * 3
    assert sum(of_module) >= sum(of_slow)
