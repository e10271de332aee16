# SPDX-License-Identifier: Apache-2.0
"""What every tracked file owes the reader: a licence line, no private paths, links that lead somewhere, modest size."""

from __future__ import annotations

import re
import subprocess
import warnings
from functools import cache
from pathlib import Path

import pytest

import vllm_h3_plugin
from tools.environment import ROOT

SPDX = "SPDX-License-Identifier: Apache-2.0"
# A module that grows past the first wants to be two; past the second it must be, unless it is listed with its reason.
LINES_WARN, LINES_MAX = 300, 400
LARGE_MODULES: dict[str, str] = {}

LEAKS = {
    "a path of somebody's machine": re.compile(r"(?<![\w.])/(root|work|home/\w+|Users/\w+)/"),
    "a package index": re.compile(r"\b(files\.pythonhosted\.org|pypi\.org/simple|test\.pypi\.org)\b"),
    "an address inside a network": re.compile(r"(?<![=\w.])(10\.\d+\.\d+\.\d+|192\.168\.\d+\.\d+)\b"),
    "how it was made": re.compile(
        r"co-authored-by|\b(ai|llm|chatbot)[- ](generated|written|assistant)\b", re.IGNORECASE
    ),
}


@cache
def tracked() -> tuple[Path, ...]:
    """Tracked files, links excluded (their targets are tracked too)."""
    # safe.directory: the checkout may belong to another user, as it does in containers.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    paths = [ROOT / name for name in names if name]
    return tuple(path for path in paths if path.is_file() and not path.is_symlink())


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_source_file_has_a_licence_line() -> None:
    kinds = {".py", ".sh", ".toml", ".lock", ".in"}
    sources = [path for path in tracked() if path.suffix in kinds or _name(path) in {"Makefile", ".ci/run"}]
    assert len(sources) > 20
    sources = [path for path in sources if path.stat().st_size]  # an empty __init__.py says nothing to license
    without = [_name(path) for path in sources if SPDX not in "".join(_text(path).splitlines(keepends=True)[:4])]
    without = [name for name in without if name != "pyproject.toml"]  # names the licence in its [project] table
    assert without == []


def test_the_licence_is_the_whole_apache_text() -> None:
    text = _text(ROOT / "LICENSE")
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_no_file_leaks_where_or_how_it_was_made() -> None:
    found = []
    for path in tracked():
        if path == Path(__file__).resolve():
            continue
        for number, line in enumerate(_text(path).splitlines(), start=1):
            found += [
                f"{_name(path)}:{number}: {what}: {line[:120]}" for what, leak in LEAKS.items() if leak.search(line)
            ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "open('/root/somewhere/x')",
        "cd /home/alice/repo",
        "https://files.pythonhosted.org/p",
        "http://192.168.1.7",
        "AI-generated",
    ],
)
def test_the_leak_patterns_see_leaks(line: str) -> None:
    assert any(leak.search(line) for leak in LEAKS.values())


def test_modules_stay_small() -> None:
    for path in tracked():
        name = _name(path)
        if path.suffix != ".py" or not name.startswith(("vllm_h3_plugin/", "tools/")):
            continue
        lines = len(_text(path).splitlines())
        assert lines <= LINES_MAX or name in LARGE_MODULES, f"{name} has {lines} lines: split it by idea"
        if lines > LINES_WARN:
            warnings.warn(f"{name} has {lines} lines; past {LINES_WARN} a module wants to be two", stacklevel=1)


def test_the_list_of_large_modules_is_current() -> None:
    names = {_name(path) for path in tracked()}
    assert set(LARGE_MODULES) <= names


def test_the_changelog_speaks_of_this_version() -> None:
    headings = re.findall(r"^## \[([^\]]+)\]", _text(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert headings[0] in {"Unreleased", vllm_h3_plugin.__version__}


def _anchors(text: str) -> set[str]:
    """Anchors of a Markdown file's headings, by GitHub's rule."""
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _broken_links(document: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", _text(document), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (document.parent / file).resolve() if file else document
        if not path.exists():
            broken.append(f"{document.name}: {target} leads nowhere")
        elif anchor and path.suffix == ".md" and anchor not in _anchors(_text(path)):
            broken.append(f"{document.name}: {target}: {path.name} has no such heading")
    return broken


def test_links_in_documents_lead_somewhere() -> None:
    documents = [path for path in tracked() if path.suffix == ".md"]
    assert documents
    assert [fault for document in documents for fault in _broken_links(document)] == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("# One thing\n[x](missing.md) [y](#one-thing) [z](a.md#two) [w](https://example.org)\n")
    assert _broken_links(document) == ["a.md: missing.md leads nowhere", "a.md: a.md#two: a.md has no such heading"]
