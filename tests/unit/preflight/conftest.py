# SPDX-License-Identifier: Apache-2.0
"""A sound tiny checkpoint, a healthy made-up Spark, and the verb run on it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.unit.preflight.preflight_machine import MadeMachine, Outcome, Preflight
from vllm_h3_plugin.checkpoint.synthetic import SynthSpec, tiny_dit, write_checkpoint
from vllm_h3_plugin.cli import preflight as verb
from vllm_h3_plugin.cli.main import main
from vllm_h3_plugin.preflight import survey
from vllm_h3_plugin.preflight.need import need_of


@pytest.fixture
def machine() -> MadeMachine:
    return MadeMachine()


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("preflight") / "H3"
    write_checkpoint(root, SynthSpec(partition="fl2va", dit=tiny_dit(layers=1), shard_bytes=400_000))
    return root


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    """FL2VA folder of a copy that a test may break."""
    root = tmp_path / "H3"
    shutil.copytree(pristine, root, copy_function=os.link)
    return root / "FL2VA"


@pytest.fixture
def preflight(
    machine: MadeMachine,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Preflight:
    """Run ``vllm-h3 preflight`` on the made machine, with the true model's needs."""

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "this_machine", lambda: machine)
    monkeypatch.setattr(survey, "need_of", lambda recipe, inventory: need_of(recipe, None))

    def run(*args: str, where: Path | None = checkpoint) -> Outcome:
        named = () if where is None else ("--checkpoint", str(where))
        with pytest.raises(SystemExit) as ended:
            main(["preflight", *named, *args, "--json"])
        code = ended.value.code
        out = capsys.readouterr().out
        return Outcome(code if isinstance(code, int) else 0, out, json.loads(out.splitlines()[-1]))

    return run
