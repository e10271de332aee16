# SPDX-License-Identifier: Apache-2.0
"""The package and its command line start fast and load nothing heavy."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tools.environment import ROOT
from tools.import_rules import HEAVY_PACKAGES, HOST_PACKAGES, LIGHT_ROOMS, PACKAGE, room_of
from vllm_h3_plugin.cli.main import VERBS

HEAVY = HEAVY_PACKAGES | HOST_PACKAGES | {"av", "numpy"}
IMPORT_BUDGET_S = 0.1
HELP_BUDGET_S = 0.5
RUNS = 7


def _python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=True)


def _loaded_by(code: str) -> set[str]:
    dump = "\nimport sys\nprint(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    return set(_python(code + dump).stderr.split())


HELP = """
import sys
from vllm_h3_plugin.cli import main
try:
    main({argv!r})
except SystemExit as done:
    assert done.code == 0, done.code
"""


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert _loaded_by("import vllm_h3_plugin") & HEAVY == set()


def test_help_loads_nothing_heavy() -> None:
    assert _loaded_by(HELP.format(argv=["--help"])) & HEAVY == set()


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_loads_neither_torch_nor_the_host(verb: str) -> None:
    assert _loaded_by(HELP.format(argv=[verb, "--help"])) & (HEAVY_PACKAGES | HOST_PACKAGES) == set()


def test_modules_of_light_rooms_load_neither_torch_nor_the_host() -> None:
    package = ROOT / PACKAGE
    modules = [
        ".".join((PACKAGE, *path.relative_to(package).with_suffix("").parts)).removesuffix(".__init__")
        for path in sorted(package.rglob("*.py"))
        if room_of(path.relative_to(package).parts) in LIGHT_ROOMS
    ]
    assert len(modules) > 5
    code = "\n".join(f"import {module}" for module in modules)
    assert _loaded_by(code) & (HEAVY_PACKAGES | HOST_PACKAGES) == set()


def _children_s() -> float:
    """Processor seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _best_over_bare_python(code: str) -> float:
    """Smallest processor time of a fresh interpreter with ``code`` minus the smallest without: noise only ever adds.

    Processor time, since `make test` runs two hosts side by side and neither has the machine to itself.
    """
    with_code, bare = [], []
    for _ in range(RUNS):
        for program, times in ((code, with_code), ("pass", bare)):
            before = _children_s()
            _python(program)
            times.append(_children_s() - before)
    return min(with_code) - min(bare)


def test_importing_the_package_is_within_its_budget() -> None:
    assert _best_over_bare_python("import vllm_h3_plugin") <= IMPORT_BUDGET_S


def test_help_is_within_its_budget() -> None:
    assert _best_over_bare_python(HELP.format(argv=["--help"])) <= HELP_BUDGET_S
