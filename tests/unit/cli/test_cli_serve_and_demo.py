# SPDX-License-Identifier: Apache-2.0
"""``serve`` and ``demo`` refuse what cannot work before anything is started or read."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from vllm_h3_plugin.checkpoint.synthetic.spec import SynthSpec
from vllm_h3_plugin.checkpoint.synthetic.writer import write_checkpoint
from vllm_h3_plugin.cli.main import VERBS, main

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cli"), SynthSpec()).partitions[0]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("H3_REFERENCE", "H3_RECIPE", "H3_RUN_DIR", "H3_FFMPEG"):
        monkeypatch.delenv(name, raising=False)


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main([*args])
    return int(caught.value.code or 0)


def test_dry_run_checks_and_prints_the_command_and_starts_nothing(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))
    assert run("serve", "reference", "-c", str(checkpoint), "--dry-run", "--json") == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["ok"] and answer["environment"]["H3_REFERENCE"] == "1"
    assert "vllm_h3_plugin.host.launch serve" in err


def test_arguments_after_two_dashes_reach_the_host(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rest = ("--api-key", "s3cret", "--max-num-seqs", "1")
    assert run("serve", "reference", "-c", str(checkpoint), "--dry-run", "--json", "--", *rest) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["argv"][-4:] == ["--api-key", "***", "--max-num-seqs", "1"]
    assert "s3cret" not in out + err


def test_a_folder_is_served_by_its_absolute_path(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host finds a partition by its folder's name, and `.` has none."""
    monkeypatch.chdir(checkpoint)
    assert run("serve", "reference", "-c", ".", "--dry-run", "--json") == 0
    assert str(checkpoint) in json.loads(capsys.readouterr().out)["argv"]


@pytest.mark.parametrize("verb", ["inspect", "recipe", "synth", "verify", "doctor"])
def test_a_misspelt_variable_stops_every_verb(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("H3_REFRENCE", "1")
    assert run(verb, "--json") == 2
    assert "H3_REFERENCE" in capsys.readouterr().err


def test_wrong_arguments_end_with_one_json_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "--json", "--no-such-flag") == 2
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_a_refusal_of_the_system_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/models")

    monkeypatch.setattr("vllm_h3_plugin.checkpoint.inventory.take_inventory", refuse)
    assert run("inspect", str(tmp_path), "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["error"]["what"] == "/models: Permission denied"
    assert "fix:" in err


def test_a_checkpoint_folder_alone_is_enough(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("H3_REFERENCE", "1")
    monkeypatch.setenv("H3_RECIPE", "bf16")
    assert run("serve", str(checkpoint), "--dry-run", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert "--quantization" not in answer["argv"] and answer["environment"]["H3_RECIPE"] == "bf16"


def test_who_has_not_accepted_the_licence_gets_no_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("H3_REFERENCE", raising=False)
    monkeypatch.setenv("H3_ACCEPT_LICENSE", "no")
    assert run("serve", "spark", "-c", str(tmp_path)) == 2
    assert "H3_ACCEPT_LICENSE says no" in capsys.readouterr().err
    assert run("serve", "reference", "-c", str(tmp_path / "nowhere")) == 3  # nothing to accept there


def test_unknown_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "sprak") == 2
    assert "Did you mean spark" in capsys.readouterr().err


def test_profile_without_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "reference") == 2
    assert "--checkpoint" in capsys.readouterr().err


def test_missing_checkpoint_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "reference", "-c", str(tmp_path / "nowhere")) == 3
    assert "nowhere" in capsys.readouterr().err


def test_broken_checkpoint_is_refused_before_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = write_checkpoint(tmp_path / "broken", SynthSpec()).partitions[0]
    shard = next((broken / "transformer").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert run("serve", "reference", "-c", str(broken)) == 3
    assert shard.name in capsys.readouterr().err


def test_unknown_recipe(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "reference", "-c", str(checkpoint), "--recipe", "fp9") == 4
    assert "fp9" in capsys.readouterr().err


def test_ref2va_of_an_fl2va_checkpoint(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "reference", "-c", str(checkpoint), "--task", "ref2va") == 3
    assert "ref2va" in capsys.readouterr().err.lower()


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--task", "r2v"), ("--executor", "slurm"), ("--port", "70000")],
    ids=["task", "executor", "port"],
)
def test_wrong_flag_values_name_the_flag(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    assert run("serve", "reference", "-c", str(checkpoint), flag, value) == 2
    assert flag.lstrip("-") in capsys.readouterr().err


def test_port_in_use(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        assert run("serve", "reference", "-c", str(checkpoint), "--port", port) == 7
    assert port in capsys.readouterr().err


def test_a_typo_in_a_variable_stops_the_start(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("H3_REFERNCE", "1")
    assert run("serve", str(checkpoint), "--dry-run") == 2
    assert "H3_REFERENCE" in capsys.readouterr().err


def test_demo_without_ffmpeg_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("H3_FFMPEG", str(tmp_path / "no-such-ffmpeg"))
    assert run("demo", "--out", str(tmp_path / "out")) != 0
    assert "ffmpeg" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_demo_refuses_a_size_that_h3_cannot_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--size", "300", "--out", str(tmp_path / "out")) == 2
    assert "288" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_demo_whose_server_dies_leaves_no_clip_and_no_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert run("demo", "--out", str(tmp_path / "out"), "--json") == 7
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["type"] == "ServerError"
    assert "before it was ready" in err
    assert not [path for path in (tmp_path / "out").rglob("*") if path.suffix in (".mp4", ".part")]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_teaches(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(verb, "--help") == 0
    text = capsys.readouterr().out
    assert len(text) > 200 or "Commands" in text


def test_unknown_verb_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("srve") == 2
    assert "srve" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "code", "word"),
    [
        ("H3_VERIFY_CHECKSUMS", "/no/such.sha256", 3, "/no/such.sha256"),
        ("H3_MEMORY_HARD_FLOOR_GIB", "20", 2, "is above H3_MEMORY_FLOOR_GIB"),
        ("H3_CACHE_DIR", "/etc/hostname", 2, "is a file"),
        ("H3_MEMORY_FLOOR_GIB", "inf", 2, "H3_MEMORY_FLOOR_GIB"),
    ],
)
def test_settings_that_the_server_would_refuse_are_refused_before_it_starts(
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    code: int,
    word: str,
) -> None:
    monkeypatch.setenv(variable, value)
    assert run("serve", "reference", "-c", str(checkpoint), "--dry-run") == code
    assert word in capsys.readouterr().err
