# SPDX-License-Identifier: Apache-2.0
"""A checkout whose path has a space, and a made-up world around it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.made_outside import ROOT, Ended, MadeOutside, run_verb
from vllm_h3_plugin.cli import kit_shared
from vllm_h3_plugin.preflight import run
from vllm_h3_plugin.preflight.check import passed

Verb = Callable[..., Ended]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The compose files in a folder of their own, which is the current one."""
    folder = tmp_path / "my checkout"
    folder.mkdir()
    for name in ("compose.yaml", "compose.ascend.yaml"):
        shutil.copy(ROOT / name, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def outside(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> MadeOutside:
    """A machine that passes its checks and runs nothing yet."""
    world = MadeOutside(checkout)
    monkeypatch.setattr(kit_shared, "this_outside", lambda: world)
    monkeypatch.setattr(
        run, "run_preflight", lambda survey, **options: run.Report((passed("docker", "engine 28"),), {})
    )
    return world


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]) -> Verb:
    """Run a verb as a person would."""
    return lambda name, *args: run_verb(name, *args, capsys=capsys)
