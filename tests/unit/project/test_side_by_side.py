# SPDX-License-Identifier: Apache-2.0
"""Stages of `make test` run at once: each to its end, readable, and none outlives an interrupted run."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import assert_gone
from tools.environment import ROOT
from tools.side_by_side import run_side_by_side


def python(code: str) -> list[str]:
    """A command."""
    return [sys.executable, "-u", "-c", code]


def meets(name: str, other: str) -> list[str]:
    """A command that ends well only if the other one runs at the same time."""
    return python(
        f"import pathlib, time\n"
        f"pathlib.Path({name!r}).touch()\n"
        f"for _ in range(600):\n"
        f"    if pathlib.Path({other!r}).exists(): print('met'); break\n"
        f"    time.sleep(0.1)\n"
        f"else: raise SystemExit('alone')\n"
    )


def test_commands_run_at_the_same_time(tmp_path: Path) -> None:
    out = io.StringIO()
    ended, interrupted = run_side_by_side({"a": meets("a", "b"), "b": meets("b", "a")}, tmp_path, tmp_path, out)
    assert ([end.exit_code for end in ended.values()], interrupted) == ([0, 0], False)
    assert sorted(out.getvalue().splitlines()) == ["a      | met", "b      | met"]


def test_a_command_that_fails_leaves_the_others_running(tmp_path: Path) -> None:
    commands = {"bad": python("raise SystemExit(3)"), "good": python("import time; time.sleep(1); print('done')")}
    ended, _ = run_side_by_side(commands, tmp_path, tmp_path, io.StringIO())
    assert {name: end.exit_code for name, end in ended.items()} == {"bad": 3, "good": 0}
    assert list(ended) == list(commands)
    assert ended["good"].seconds >= 1
    assert (tmp_path / "good.log").read_text() == "done\n"


def test_lines_stay_whole_and_are_kept_without_colours(tmp_path: Path) -> None:
    talk = python("for n in range(300): print('\\x1b[31m' + 'x' * 500 + '\\x1b[0m')\nprint('no newline', end='')")
    out = io.StringIO()
    run_side_by_side({"a": talk, "b": talk}, tmp_path, tmp_path, out)
    lines = out.getvalue().splitlines()
    assert len(lines) == 602
    assert {line.partition("| ")[2] for line in lines} == {"\x1b[31m" + "x" * 500 + "\x1b[0m", "no newline"}
    assert (tmp_path / "a.log").read_text().splitlines() == ["x" * 500] * 300 + ["no newline"]


def test_what_a_command_left_behind_ends_with_it(tmp_path: Path) -> None:
    leave = python(
        "import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)\n"
    )
    started = time.monotonic()
    ended, _ = run_side_by_side({"a": leave}, tmp_path, tmp_path, io.StringIO())
    assert ended["a"].exit_code == 0 and time.monotonic() - started < 300
    assert_gone([int((tmp_path / "a.log").read_text())])


# Prints its id, tidies up when it is interrupted, and has a child.
TIDY = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
try:
    print(os.getpid(), child.pid, flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("tidy", flush=True)
    raise SystemExit(2)
"""
DEAF = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(600)
"""
RUN = """
import sys
from pathlib import Path
from tools.side_by_side import run_side_by_side
folder = Path(sys.argv[1])
commands = {name: [sys.executable, "-c", code] for name, code in zip(("one", "two"), sys.argv[3:])}
ended, interrupted = run_side_by_side(commands, folder, folder, grace_s=float(sys.argv[2]))
print("ended", {name: end.exit_code for name, end in ended.items()}, interrupted)
"""


def start(folder: Path, grace_s: float, *codes: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A run that has started, and the ids that its commands printed. Its SIGINT is ignored, as of a background job."""
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder), str(grace_s), *codes],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert run.stdout is not None
    said = [run.stdout.readline() for _ in codes]
    return run, [int(word) for line in said for word in line.partition("|")[2].split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_lets_its_commands_tidy_up_and_leaves_no_process(tmp_path: Path, number: int) -> None:
    run, pids = start(tmp_path, 60, TIDY, TIDY)
    assert len(pids) == 4
    run.send_signal(number)
    said, _ = run.communicate(timeout=180)
    assert said.count("tidy") == 2
    assert said.endswith("ended {'one': 2, 'two': 2} True\n")
    assert_gone(pids)


def test_ctrl_c_is_what_an_interrupted_run_is_named_after(tmp_path: Path) -> None:
    code = RUN.replace("import sys\n", "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n")
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), "60", TIDY], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    pids = [int(word) for word in run.stdout.readline().partition("|")[2].split()]
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=180)
    assert said.endswith("ended {'one': 2} True\n")
    assert_gone(pids)


def test_a_command_that_will_not_end_is_killed(tmp_path: Path) -> None:
    # Seconds enough for the one that tidies up, on a machine that has other work.
    run, pids = start(tmp_path, 6, DEAF, TIDY)
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=180)
    assert said.endswith("ended {'one': -9, 'two': 2} True\n")
    assert_gone(pids)


def test_commands_do_not_outlive_a_run_that_was_killed(tmp_path: Path) -> None:
    run, pids = start(tmp_path, 60, "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    os.kill(run.pid, signal.SIGKILL)
    run.communicate(timeout=180)
    assert_gone(pids)
