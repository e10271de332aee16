# SPDX-License-Identifier: Apache-2.0
"""Set-up is repeated exactly when its inputs change, and says what is wrong with the interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import environment
from tools.environment import ROOT, STAMP, ensure_host, is_current, make_key
from vllm_h3_plugin.errors import ToolMissingError
from vllm_h3_plugin.pins import load_pins


def test_the_key_follows_the_lock_and_the_checkouts_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("a==1")
    first = make_key(lock)
    assert make_key(lock) == first
    lock.write_text("a==2")
    second = make_key(lock)
    assert second != first
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert make_key(lock) != second


def test_only_a_finished_environment_of_the_same_inputs_is_current(tmp_path: Path) -> None:
    assert not is_current(tmp_path, "key")
    (tmp_path / STAMP).write_text("other\n")
    assert not is_current(tmp_path, "key")
    (tmp_path / STAMP).write_text("key\n")
    assert is_current(tmp_path, "key")


def test_a_current_environment_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = load_pins().host("nvidia")
    monkeypatch.setattr(environment, "venv_path", lambda host: tmp_path)
    monkeypatch.setattr(environment, "ensure_uv", lambda: pytest.fail("the installer was asked for"))
    (tmp_path / STAMP).write_text(make_key(ROOT / pin.requirements, ROOT / "pyproject.toml") + "\n")
    assert ensure_host(pin) == tmp_path


def test_a_failed_step_leaves_no_stamp_and_names_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "venv_path", lambda host: tmp_path)
    monkeypatch.setattr(environment, "ensure_uv", lambda: Path("/bin/false"))
    (tmp_path / STAMP).write_text("stale\n")
    with pytest.raises(ToolMissingError, match=r"set-up step failed: /bin/false venv.*run the same command again"):
        ensure_host(load_pins().host("nvidia"))
    assert not (tmp_path / STAMP).exists()


@pytest.mark.parametrize("version", [(3, 9, 18), (3, 10, 14), (3, 13, 0)])
def test_another_python_is_refused_by_name_before_anything_is_imported(version: tuple[int, int, int]) -> None:
    code = (
        f"import sys, runpy; sys.modules['tomllib'] = None; sys.version_info = {version}; sys.argv = ['x', 'boot'];"
        "runpy.run_module('tools.environment', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert sys.executable in done.stderr
    assert "locked for Python 3.11 and 3.12" in done.stderr
    assert "PYTHON=" in done.stderr


def _make(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *words]
    inherited = {"PATH": environment.os.environ["PATH"]}
    return subprocess.run(
        command, cwd=ROOT, env=inherited | env, capture_output=True, text=True, timeout=180, check=False
    )


def test_make_alone_teaches_every_target() -> None:
    done = _make()
    assert done.returncode == 0
    targets = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets
    for target in targets[1].split():
        assert re.search(rf"^  {target} +\S", done.stdout, re.MULTILINE), target


def test_make_ignores_a_host_variable_that_names_the_machine() -> None:
    assert "(now nvidia)" in _make(HOST="my-laptop").stdout
    assert "(now ascend)" in _make(HOST="ascend").stdout


def test_an_unknown_host_on_the_command_line_is_refused() -> None:
    done = _make("setup", "HOST=amd", f"PYTHON={sys.executable}")
    assert done.returncode != 0
    assert "unknown host 'amd'" in done.stderr


def test_no_python_is_said_so() -> None:
    done = _make("setup", "PYTHON=")
    assert done.returncode != 0
    assert "Python 3.11 or 3.12 is needed" in done.stderr


def test_an_installed_wheel_finds_its_data(tmp_path: Path) -> None:
    """Built offline with the environment's setuptools, unpacked, and asked from outside the checkout."""
    source = tmp_path / "source"
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "vllm_h3_plugin", "quant", "launch", "pyproject.toml"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in (*names[:-1], "LICENSE"):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        else:
            target.write_bytes((ROOT / name).read_bytes())
    (source / "README.md").touch()
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True)
    site = tmp_path / "site"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
        packed = set(wheel.namelist())
    page = (ROOT / "vllm_h3_plugin" / "serving" / "page").iterdir()
    assert {f"vllm_h3_plugin/serving/page/{path.name}" for path in page if path.is_file()} <= packed
    ask = (
        "from vllm_h3_plugin.data import data_path; from vllm_h3_plugin.pins import load_pins;"
        "print(data_path('quant')); print(*sorted(p.name for p in data_path('quant').glob('*.json')));"
        "print(*(pin.name for pin in load_pins().hosts))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {ask}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    folder, recipes, hosts = done.stdout.splitlines()
    assert Path(folder).is_relative_to(site)
    assert "fp8.json" in recipes.split()
    assert hosts == "nvidia ascend"
