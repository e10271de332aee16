# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 synth-lora``, and what ``vllm-h3 serve`` says of an adapter before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.test_cli_serve_and_demo import clean_environment, run  # noqa: F401
from vllm_h3_plugin.checkpoint.adapter import check_adapter
from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.checkpoint.synthetic.spec import SynthSpec
from vllm_h3_plugin.checkpoint.synthetic.writer import write_checkpoint

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cli"), SynthSpec()).partitions[0]


def made(checkpoint: Path, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Path:
    assert run("synth-lora", str(checkpoint), str(folder), "--json", *options) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["ok"] and answer["bytes"] > 0
    return Path(answer["path"])


@pytest.mark.parametrize("kind", ["turbo", "fasth3", "flashgen", "peft"])
def test_what_it_writes_fits_the_checkpoint(
    kind: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dit = take_inventory(checkpoint).partitions[0].dit
    assert dit is not None
    assert check_adapter(made(checkpoint, tmp_path, capsys, "--kind", kind), dit).kind == kind


def test_serve_hands_an_adapter_to_the_host_by_its_absolute_path(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(checkpoint, tmp_path, capsys)
    monkeypatch.chdir(tmp_path)
    assert run("serve", "reference", "-c", str(checkpoint), "--dry-run", "--json", "--lora", path.name) == 0
    argv = json.loads(capsys.readouterr().out)["argv"]
    assert argv[argv.index("--lora-path") + 1] == str(path)
    monkeypatch.setenv("H3_LORA", str(path))
    assert run("serve", "reference", "-c", str(checkpoint), "--dry-run", "--json") == 0
    assert "--lora-path" in json.loads(capsys.readouterr().out)["argv"]


def test_serve_refuses_an_adapter_that_does_not_fit(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made(checkpoint, tmp_path, capsys, "--broken", "nan")
    assert run("serve", "reference", "-c", str(checkpoint), "--dry-run", "--lora", str(path)) == 2
    err = capsys.readouterr().err
    assert path.name in err and "NaN" in err and "fix:" in err


def test_an_adapter_of_adaln_is_sent_to_a_recipe_with_resident_adaln(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made(checkpoint, tmp_path, capsys, "--kind", "flashgen")
    arguments = ("serve", "reference", "-c", str(checkpoint), "--dry-run", "--lora", str(path))
    assert run(*arguments) == 2
    assert '"adaln": "resident"' in capsys.readouterr().err
    assert run(*arguments, "--recipe", "bf16") == 0


def test_a_profile_of_an_adapter_wants_one_of_its_kind(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "p.toml"
    profile.write_text('description = "d"\nreference = true\nadapter = "turbo"\n')
    arguments = ("serve", str(profile), "-c", str(checkpoint), "--dry-run")
    assert run(*arguments) == 2
    assert "needs a turbo adapter" in capsys.readouterr().err
    fast = made(checkpoint, tmp_path, capsys, "--kind", "fasth3")
    assert run(*arguments, "--lora", str(fast)) == 2
    assert "it is a fasth3 adapter" in capsys.readouterr().err
    turbo = made(checkpoint, tmp_path, capsys)
    assert run(*arguments, "--lora", str(turbo)) == 0


def test_wrong_numbers_and_a_checkpoint_that_is_none(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("synth-lora", str(checkpoint), str(tmp_path), "--steps", "0") == 2
    assert run("synth-lora", str(tmp_path), str(tmp_path)) == 3
    assert "vllm-h3 synth" in capsys.readouterr().err
