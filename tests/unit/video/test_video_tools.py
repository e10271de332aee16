# SPDX-License-Identifier: Apache-2.0
"""Which ffmpeg is taken, and what is said when there is none."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from vllm_h3_plugin.errors import SettingsError, ToolMissingError
from vllm_h3_plugin.video.tools import find_ffmpeg


def program(path: Path, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(mode)
    return path


def carry(monkeypatch: pytest.MonkeyPatch, path: Path | None) -> None:
    def get_ffmpeg_exe() -> str:
        if path is None:
            raise RuntimeError("No ffmpeg exe could be found.")
        return str(path)

    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", types.SimpleNamespace(get_ffmpeg_exe=get_ffmpeg_exe))


def test_the_setting_wins_over_path_and_imageio(h3_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = program(tmp_path / "mine" / "ff")
    h3_environment.setenv("H3_FFMPEG", str(named))
    h3_environment.setenv("PATH", str(program(tmp_path / "bin" / "ffmpeg").parent))
    assert find_ffmpeg() == named


def test_path_wins_over_imageio(h3_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_path = program(tmp_path / "bin" / "ffmpeg")
    h3_environment.setenv("PATH", str(on_path.parent))
    carry(h3_environment, program(tmp_path / "carried"))
    assert find_ffmpeg() == on_path


def test_imageio_is_the_last_resort(h3_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    h3_environment.setenv("PATH", str(tmp_path))
    carried = program(tmp_path / "carried")
    carry(h3_environment, carried)
    assert find_ffmpeg() == carried


@pytest.mark.usefixtures("no_ffmpeg")
def test_no_ffmpeg_anywhere_says_how_to_get_one() -> None:
    with pytest.raises(ToolMissingError, match=r"ffmpeg.*PATH.*imageio-ffmpeg.*apt-get install ffmpeg.*H3_FFMPEG"):
        find_ffmpeg()


def test_an_imageio_wheel_without_a_program_counts_as_none(h3_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    h3_environment.setenv("PATH", str(tmp_path))
    carry(h3_environment, None)
    with pytest.raises(ToolMissingError, match="neither on PATH nor carried"):
        find_ffmpeg()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path, "no such file"),
        (lambda path: path.mkdir() or path, "not a file"),
        (lambda path: program(path, 0o644), "not executable"),
    ],
)
def test_a_named_program_that_cannot_run_is_not_replaced_by_another(
    h3_environment: pytest.MonkeyPatch, tmp_path: Path, make, why: str
) -> None:
    named = make(tmp_path / "ff")
    h3_environment.setenv("H3_FFMPEG", str(named))
    with pytest.raises(ToolMissingError, match=rf"H3_FFMPEG={named}: .*{why}.*unset it"):
        find_ffmpeg()


def test_a_misspelt_setting_is_named(h3_environment: pytest.MonkeyPatch) -> None:
    h3_environment.setenv("H3_FFMPG", "/usr/bin/ffmpeg")
    with pytest.raises(SettingsError, match=r"H3_FFMPG.*H3_FFMPEG"):
        find_ffmpeg()
