# SPDX-License-Identifier: Apache-2.0
"""torch_npu's wheel is fetched once, held against its hash, unpacked beside sys.path, and missed by name."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import oracle
from vllm_h3_plugin.errors import ToolMissingError
from vllm_h3_plugin.quantization.npu_operators import TORCH_NPU


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(oracle, "CACHE", tmp_path / "oracle")
    monkeypatch.setattr(oracle, "ensure_uv", lambda: Path("uv"))
    return tmp_path / "oracle"


def pip(monkeypatch: pytest.MonkeyPatch, members: tuple[str, ...] | None, said: str = "") -> list[list[str]]:
    """Let pip leave a wheel with these members, or fail with what it said."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        calls.append(command)
        if members is None:
            return SimpleNamespace(returncode=1, stderr=said)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / oracle.wheel_pin().file, "w") as wheel:
            for member in members:
                wheel.writestr(member, member)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(oracle.subprocess, "run", run)
    return calls


def test_the_pin_is_the_version_that_the_table_of_operators_names() -> None:
    wheel = oracle.wheel_pin()
    assert wheel.file.startswith(f"torch_npu-{TORCH_NPU}-") and len(wheel.sha256) == 64


def test_the_wheel_is_fetched_once_by_hash_and_unpacked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pip(monkeypatch, oracle.MEMBERS)
    folder = oracle.ensure_oracle()
    assert oracle.ensure_oracle() == folder and len(calls) == 1 and "--require-hashes" in calls[0]
    assert [path.read_text() for path in map(folder.joinpath, oracle.MEMBERS)] == list(oracle.MEMBERS)
    assert [path.name for path in cache.iterdir()] == [folder.name], "the wheel itself is not kept"
    assert oracle.why_no_oracle() is None and str(folder) not in sys.path


def test_a_failed_download_is_named_to_whoever_asks_why_tests_did_not_run(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip(monkeypatch, None, "WARNING: retrying\nERROR: no route to host")
    with pytest.raises(ToolMissingError, match="could not be fetched: ERROR: no route to host"):
        oracle.ensure_oracle()
    why = oracle.why_no_oracle()
    assert why and oracle.wheel_pin().file in why and "no route to host" in why and "tools.oracle" in why
    assert oracle.main() == 0, "everything else runs without it"
    assert "no route to host" in capsys.readouterr().err
    pip(monkeypatch, oracle.MEMBERS)
    oracle.ensure_oracle()
    assert oracle.why_no_oracle() is None and not (cache / "failed.txt").exists()


def test_a_wheel_of_another_layout_leaves_nothing_half_unpacked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, oracle.MEMBERS[1:])
    with pytest.raises(ToolMissingError, match=r"has no torch_npu/lib/libtorch_npu\.so"):
        oracle.ensure_oracle()
    assert [path.name for path in cache.iterdir()] == ["failed.txt"]
