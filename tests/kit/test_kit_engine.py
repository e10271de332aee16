# SPDX-License-Identifier: Apache-2.0
"""The engine's command line as it is really called: a program named ``docker`` on PATH, paths with spaces, streams."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.conftest import Verb
from tests.kit.made_outside import Box
from vllm_h3_plugin.errors import BusyError, CheckpointError, ServerError, ToolMissingError, UsageError
from vllm_h3_plugin.kit import containers, outside, start
from vllm_h3_plugin.kit.outside import LocalOutside
from vllm_h3_plugin.preflight import run
from vllm_h3_plugin.preflight.check import Unknown, passed

LOG = ["INFO one", "error: 1 fault in /checkpoint/FL2VA", "  why: shard 3 is not there", "  fix: Copy it."]

Engine = Callable[..., Callable[[], list[list[str]]]]


@pytest.fixture
def engine(tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Put a ``docker`` on PATH; returns what it was asked."""
    monkeypatch.setattr(
        run, "run_preflight", lambda survey, **options: run.Report((passed("docker", "engine 28"),), {})
    )

    def make(*boxes: Box, up: bool = True, log: list[str] = LOG, **fail: list[Any]) -> Callable[[], list[list[str]]]:
        folder = tmp_path / "an engine"
        folder.mkdir()
        source = Path(__file__).with_name("fake_docker.py").read_text(encoding="utf-8")
        program = folder / "docker"
        program.write_text(f"#!{sys.executable} -SE\n{source}", encoding="utf-8")
        program.chmod(0o755)
        containers = [box.inspect(checkout) for box in boxes]
        state = {"containers": containers, "up": up, "log": log, "fail": fail}
        (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
        monkeypatch.setenv("PATH", str(folder))
        return lambda: [json.loads(line) for line in (folder / "asked.jsonl").read_text("utf-8").splitlines()]

    return make


def test_a_checkout_with_a_space_in_its_path_reaches_the_engine_as_one_word(
    engine: Engine, verb: Verb, checkout: Path
) -> None:
    (checkout / "my vars").write_text("VLLM_H3_CHECKPOINT=/models/Mini Max\n", encoding="utf-8")
    asked = engine(Box("check", "exited", health=""), Box(status="exited", exit_code=1, health=""), up=False)
    ended = verb("up", "--env-file", "my vars")
    assert ended.code != 0 and "shard 3 is not there" in ended.err
    compose = next(words for words in asked() if words[0] == "compose")
    named = ["--project-name", "vllm-h3", "--file", str(checkout / "compose.yaml")]
    assert compose == ["compose", *named, "--env-file", str(checkout / "my vars"), "up", "--detach"]


def test_both_streams_of_a_log_are_read_in_order(engine: Engine, verb: Verb) -> None:
    engine(Box())
    ended = verb("logs", "--errors")
    assert ended.out == "vllm-h3-server-1: 1 fault in /checkpoint/FL2VA\n  why: shard 3 is not there\n  fix: Copy it.\n"
    assert verb("logs").out.splitlines() == LOG
    assert verb("logs", "--follow").out.splitlines() == LOG


def test_a_failed_check_ends_with_its_code(engine: Engine, verb: Verb) -> None:
    check = Box("check", "exited", 3, health="")
    engine(check, Box(status="created", health=""), up=False)
    state = Path(os.environ["PATH"]) / "state.json"
    program = Path(os.environ["PATH"]) / "docker"
    # It starts its containers and then says what compose says.
    text = program.read_text("utf-8").replace("    return 0\n", "    return 1 if verb == 'up' else 0\n")
    program.write_text(text, encoding="utf-8")
    ended = verb("up")
    assert ended.code == CheckpointError.exit_code and "shard 3 is not there" in ended.err
    assert json.loads(state.read_text("utf-8"))["up"] is True


def test_down_removes_what_has_ended(engine: Engine, verb: Verb, checkout: Path) -> None:
    asked = engine(Box(status="exited", health=""))
    assert verb("down").code == 0
    assert asked()[-1] == ["compose", "--project-name", "vllm-h3", "--file", str(checkout / "compose.yaml"), "down"]
    assert verb("down").out == "nothing to stop\n"


def test_a_container_of_another_checkout_is_left_alone(engine: Engine, verb: Verb) -> None:
    asked = engine(Box(files="/srv/other/compose.yaml"))
    assert verb("down", "--now").code == BusyError.exit_code
    assert not any("down" in words for words in asked())


def test_no_rights_names_the_group(engine: Engine, verb: Verb) -> None:
    said = "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock"
    engine(ps=[1, said])
    ended = verb("up")
    assert ended.code == ToolMissingError.exit_code and "sudo usermod -aG docker" in ended.err


def test_no_program_at_all(verb: Verb, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = verb("logs")
    assert ended.code == ToolMissingError.exit_code and "docker is not there" in ended.err


STUBBORN = """#!/bin/sh
trap '' TERM
case "$1" in
  ps) echo id-server ;;
  inspect) cat "{folder}/inspect.json" ;;
  logs) echo INFO one; echo "error: bad"; {what} ;;
  *) {what} ;;
esac
"""


@pytest.fixture
def stubborn(tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A ``docker`` that ignores SIGTERM, and whose logs do what is said once they have given two lines."""
    monkeypatch.setattr(containers, "LOG_TIMEOUT_S", 0.5)
    monkeypatch.setattr(outside, "GRACE_S", 0.2)

    def make(what: str) -> None:
        folder = tmp_path / "an engine"
        folder.mkdir()
        described = json.dumps([Box().inspect(checkout)])
        # No port is published: nothing that may listen on this machine has a part in it.
        (folder / "inspect.json").write_text(described.replace('"8000"', '"1"'), encoding="utf-8")
        (folder / "docker").write_text(STUBBORN.format(folder=folder, what=what), encoding="utf-8")
        (folder / "docker").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    return make


# The child is one that holds the output after its parent is gone, as compose does with docker.
@pytest.mark.parametrize("what", ["sleep 60", "sleep 60 & sleep 60", "exec yes hello"])
def test_an_engine_whose_log_does_not_end_is_not_waited_for(
    stubborn: Callable[[str], None], verb: Verb, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    stubborn(what)
    began = time.monotonic()
    assert verb("status").code == BusyError.exit_code
    ended = verb("logs", "--errors")
    flooded = "yes" in what
    assert ended.code == 0 and ended.out == f"vllm-h3-server-1: {'no error in its log' if flooded else 'bad'}\n"
    monkeypatch.setattr(start, "LOOK_S", 0.2)
    ended = verb("up", "--timeout", "1")
    assert ended.code == ServerError.exit_code and "not ready after 1 s" in ended.err
    assert time.monotonic() - began < 20


def test_a_followed_log_ends_soon_after_its_reader_though_the_engine_ignores_it(
    stubborn: Callable[[str], None],
) -> None:
    stubborn("sleep 60 & sleep 60")
    lines = LocalOutside().lines(("docker", "logs", "--follow", "id-server"))
    assert next(lines) == "INFO one"
    began = time.monotonic()
    lines.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 5


def test_a_command_that_does_not_end_is_ended_with_its_children(stubborn: Callable[[str], None]) -> None:
    stubborn("sleep 60 & echo $!; wait")
    began = time.monotonic()
    answer = LocalOutside().run(("docker", "compose"), 0.5)
    assert isinstance(answer, Unknown) and "no answer in 0.5 s" in answer.reason
    assert time.monotonic() - began < 5


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="http://h:abc is no address"):
        LocalOutside().http("http://h:abc", None)


def test_what_this_process_holds_is_counted_and_what_is_gone_is_not() -> None:
    outside = LocalOutside()
    assert (outside.held_bytes(os.getpid()) or 0) > 2**20
    assert outside.held_bytes(2**22 + 1) is None
