# SPDX-License-Identifier: Apache-2.0
"""The package keeps the one-way flow, and the checker that says so sees each kind of fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.environment import ROOT
from tools.import_rules import PACKAGE, check_imports


def test_the_package_keeps_the_rules() -> None:
    assert [str(violation) for violation in check_imports(ROOT / PACKAGE)] == []


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("checkpoint/a.py", "from vllm_h3_plugin.host import register", "checkpoint may import"),
        ("checkpoint/a.py", "import vllm_h3_plugin.serving.jobs", "checkpoint may import"),
        ("memory/a.py", "def f():\n    from vllm_h3_plugin.cli import main", "memory may import"),
        ("serving/a.py", "from ..host import register", "serving may import"),
        ("serving/a.py", "from .. import host", "serving may import"),
        ("video/a.py", "from vllm_h3_plugin import checkpoint", "video may import"),
        ("errors.py", "from vllm_h3_plugin.settings import load", "errors may import no room"),
        ("serving/a.py", "def f():\n    import vllm.config", "only host/ may import vllm"),
        ("cli/a.py", "from vllm_omni import diffusion", "only host/ may import vllm_omni"),
        ("cli/a.py", "import importlib\nimportlib.import_module('vllm.config')", "only host/ may import vllm"),
        ("cli/a.py", "if True:\n    import torch", "cli must load without torch"),
        ("attic/a.py", "", "this room has no rule"),
    ],
)
def test_each_kind_of_violation_is_found(tmp_path: Path, file: str, source: str, expected: str) -> None:
    package = _package(tmp_path)
    module = package / file
    module.parent.mkdir(exist_ok=True)
    module.write_text(source)
    found = [str(violation) for violation in check_imports(package)]
    assert len(found) == 1
    assert expected in found[0]
    assert found[0].startswith(f"{PACKAGE}/{file.split('/')[0]}")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("quantization/a.py", "import torch\nfrom vllm_h3_plugin.checkpoint import layout"),
        ("serving/a.py", "from vllm_h3_plugin.video import probe\nfrom vllm_h3_plugin import __version__"),
        ("host/a.py", "import vllm\nfrom vllm_h3_plugin.memory import guard\nfrom .other import thing"),
        ("cli/a.py", "def f():\n    import torch\n    from vllm_h3_plugin.host import register"),
        ("video/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
    ],
)
def test_what_the_rules_allow_passes(tmp_path: Path, file: str, source: str) -> None:
    package = _package(tmp_path)
    (package / file).write_text(source)
    assert check_imports(package) == []


def _package(tmp_path: Path) -> Path:
    """A package with every room and nothing in them."""
    package = tmp_path / PACKAGE
    for room in ("checkpoint", "quantization", "memory", "serving", "video", "host", "cli"):
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").touch()
    for module in ("__init__", "errors", "data", "settings", "pins"):
        (package / f"{module}.py").touch()
    return package
