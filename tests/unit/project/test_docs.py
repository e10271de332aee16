# SPDX-License-Identifier: Apache-2.0
"""Generated documents are current, and measurements are complete."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tools import docs
from tools.docs import BEGIN, DOCUMENTS, END, cli_document, fill_tables
from tools.environment import ROOT
from tools.results import Result, load_results, parse_result, render, write_result
from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.settings import known_variables

VALID: dict[str, Any] = {
    "title": "A thing",
    "command": "make results",
    "date": "2026-11-30",
    "hardware": "2 cores",
    "versions": {"vllm": "1"},
    "rows": [{"Step": "ready", "Seconds": 12.34}, {"Step": "all", "Seconds": None}],
    "ratios": {"ready_s": 12.34, "all_s": None},
    "reasons": {"all_s": "nobody ran it"},
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_generated_document_is_current(name: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == DOCUMENTS[name](), "run `make docs`"


def test_a_verb_without_a_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch = import_module("vllm_h3_plugin.cli.main")  # the package's attribute of that name is the function
    monkeypatch.setattr(dispatch, "VERBS", {"dance": ("vllm_h3_plugin.cli.dance", "Dance.")})
    with pytest.raises(UsageError, match=r"vllm-h3 dance: no module vllm_h3_plugin\.cli\.dance"):
        cli_document()


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "SETTINGS.md").read_text(encoding="utf-8")
    assert [variable for variable in known_variables() if f"`{variable}`" not in text] == []


def test_every_variable_that_the_code_names_is_documented() -> None:
    text = (ROOT / "docs" / "SETTINGS.md").read_text(encoding="utf-8")
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    named = {
        name
        for path in (ROOT / "vllm_h3_plugin").rglob("*.py")
        for name in re.findall(
            r'"((?:VLLM|HF|HUMMING|CUDA|ASCEND|SOURCE|NVIDIA)_[A-Z0-9_]*[A-Z0-9])"', path.read_text()
        )
    }
    assert len(named) > 10
    assert [name for name in sorted(named) if f"`{name}`" not in text and f"{name}=" not in example] == []


def test_every_measurement_in_the_tree_is_complete() -> None:
    load_results(ROOT / "docs" / "results")


def test_a_drifted_document_fails_the_check_and_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docs, "DOCS", tmp_path)
    monkeypatch.setattr(docs, "DOCUMENTS", {"A.md": lambda: "new\n"})
    (tmp_path / "A.md").write_text("old\n")
    assert docs.main(["--check"]) == 1
    assert "-old" in capsys.readouterr().err
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0


def test_tables_go_between_the_markers_and_nothing_else_changes() -> None:
    text = fill_tables(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "stale" not in text


def test_a_document_without_markers_is_refused() -> None:
    with pytest.raises(UsageError, match=r"docs/RESULTS\.md: markers are missing"):
        fill_tables("# Results\n")


def test_an_unmeasured_figure_says_why() -> None:
    text = render("a", parse_result("a.json", VALID))
    assert "not measured: nobody ran it" in text
    assert "| ready | 12.34 |" in text
    assert "`make results`" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"command": ""}, "field 'command' is empty"),
        ({"date": "yesterday"}, "date 'yesterday'"),
        ({"rows": []}, "field 'rows'"),
        ({"reasons": {}}, "ratio 'all_s' is null without a reason"),
        ({"ratios": {"all_s": None, "x": "fast"}}, "ratio 'x' is 'fast'"),
        ({"reasons": {"all_s": "x", "other": "y"}}, "reason for unknown ratio 'other'"),
        ({"extra": 1}, "unknown field 'extra'"),
    ],
)
def test_an_incomplete_measurement_names_file_and_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_result("a.json", VALID | change)
    assert str(caught.value).startswith(f"a.json: {message}")
    assert caught.value.fix


@pytest.mark.parametrize("field", ["title", "command", "date", "hardware", "versions", "rows", "ratios"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(UsageError, match=f"field '{field}' is missing"):
        parse_result("a.json", {name: value for name, value in VALID.items() if name != field})


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UsageError, match=r"bad\.json: not JSON"):
        load_results(tmp_path)


def test_a_written_measurement_reads_back(tmp_path: Path) -> None:
    result = Result(**VALID)
    path = write_result(tmp_path, "a", result)
    assert json.loads(path.read_text()) == VALID | {"notes": ""}
    assert load_results(tmp_path) == {"a": result}
