# SPDX-License-Identifier: Apache-2.0
"""The health check and the key file: what a container asks of itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from vllm_h3_plugin.cli import serve
from vllm_h3_plugin.cli.main import main
from vllm_h3_plugin.errors import BusyError, ServerError, SettingsError
from vllm_h3_plugin.serving.api_key import read_api_key
from vllm_h3_plugin.serving.command import server_command
from vllm_h3_plugin.serving.health import check_health, describe_progress
from vllm_h3_plugin.serving.profile import load_profile

NOW = 1_700_000_000.0


def ask(health: int = 200, info: int = 200, progress: Any = None) -> str:
    """Health of a server that answers like this."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(health)
        return httpx.Response(info, json={"progress": progress})

    with httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer)) as http:
        return check_health(http, stuck_after_s=1800, now=NOW)


def denoising(seconds_ago: float) -> dict[str, Any]:
    return {"phase": "denoising", "step": 7, "steps": 50, "time": NOW - seconds_ago}


def test_a_long_generation_is_well_as_long_as_it_moves() -> None:
    assert ask(progress=denoising(1700)) == "denoising, step 7 of 50, 1700 s ago"


def test_a_generation_that_stopped_moving_is_stuck() -> None:
    with pytest.raises(ServerError) as caught:
        ask(progress=denoising(1900))
    assert (
        "step 7 of 50" in str(caught.value) and "1900 s" in str(caught.value) and "--stuck-after" in str(caught.value)
    )


@pytest.mark.parametrize("progress", [None, {"phase": "idle", "step": 0, "steps": None, "time": 0}])
def test_an_idle_server_may_be_idle_for_ever(progress: Any) -> None:
    assert describe_progress(progress, stuck_after_s=1, now=NOW) == "idle"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"health": 503}, "GET /health gave 503"),
        ({"info": 401}, "H3_API_KEY_FILE"),
        ({"info": 404}, "the plugin is not active"),
    ],
)
def test_a_dead_engine_a_key_and_a_foreign_server_are_told_apart(answers: dict[str, int], words: str) -> None:
    with pytest.raises(ServerError, match=words):
        ask(**answers)


def test_a_mute_server_is_busy_and_not_gone() -> None:
    def mute(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("", request=request)

    with (
        httpx.Client(base_url="http://server", transport=httpx.MockTransport(mute)) as http,
        pytest.raises(BusyError, match="no answer to GET /health"),
    ):
        check_health(http, stuck_after_s=1, now=NOW)


def test_the_verb_fails_where_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["health", "--url", "http://127.0.0.1:9", "--timeout", "2"])
    assert caught.value.code == ServerError.exit_code
    assert "http://127.0.0.1:9: cannot connect" in capsys.readouterr().err


def test_the_key_is_the_files_one_word(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\r\n")
    assert read_api_key(tmp_path / "key") == "s3cret"


@pytest.mark.parametrize(
    ("text", "why"), [("", "empty"), (" \n", "empty"), ("two words", "more than one"), (None, "No such")]
)
def test_a_key_file_without_a_key_never_means_an_open_server(tmp_path: Path, text: str | None, why: str) -> None:
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_api_key(path)
    assert f"H3_API_KEY_FILE={path}" in str(caught.value) and why in str(caught.value)


def test_serve_hands_the_key_to_the_server_and_prints_it_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    monkeypatch.setenv("H3_API_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("VLLM_API_KEY", "")
    serve._take_api_key()
    command = server_command(load_profile("spark"), tmp_path, run_dir=None, environ=os.environ)
    assert command.api_key == "s3cret" == os.environ["VLLM_API_KEY"]
    assert "s3cret" not in str(command) and "s3cret" not in repr(command)
