# SPDX-License-Identifier: Apache-2.0
"""A forked process is what ``subprocess`` would have started, and ends with the tests however they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import psutil

from tests.server import forked

# Tests that start one and then wait. No host: the fork server of this process loads nothing.
TESTS = """
import os, time
from multiprocessing import get_context
from tests.server.forked import run
context = get_context("forkserver")
context.set_forkserver_preload([])
theirs, ours = context.Pipe(duplex=False)
argv = ["python", "-m", "http.server", "--bind", "127.0.0.1", "0"]
process = context.Process(target=run, args=(argv, dict(os.environ), ours))
process.start()
print(process.pid, os.read(theirs.fileno(), 100), flush=True)
time.sleep(600)
"""


def test_it_ends_with_tests_that_are_killed() -> None:
    tests = subprocess.Popen(
        [sys.executable, "-c", TESTS], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
    )
    assert tests.stdout is not None
    server = psutil.Process(int(tests.stdout.readline().split()[0]))
    family = [server, *psutil.Process(tests.pid).children(recursive=True)]
    assert os.getsid(server.pid) == server.pid
    os.kill(tests.pid, signal.SIGKILL)
    tests.communicate(timeout=60)
    alive = psutil.wait_procs(family, timeout=60)[1]
    for process in alive:
        process.kill()
    assert alive == []


def test_it_has_the_arguments_the_environment_and_the_exit_code_of_a_process(tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(
        "import json, os, sys\n"
        "print(json.dumps([__name__, sys.argv[1:], dict(os.environ), sys.stdin.read()]))\n"
        "print('and', file=sys.stderr)\n"
        "raise SystemExit(7)\n"
    )
    context = get_context("spawn")  # not the fork server, which has the host imported
    theirs, ours = context.Pipe(duplex=False)
    environment = {"PATH": "/bin", "H3_RECIPE": "fp8"}
    process = context.Process(target=_run_in, args=(tmp_path, ["python", "-m", "told", "a", "-b"], environment, ours))
    process.start()
    ours.close()
    with os.fdopen(os.dup(theirs.fileno()), encoding="utf-8") as stream:
        said, also = sorted(stream.read().splitlines())
    process.join(60)
    assert (json.loads(said), also, process.exitcode) == (["__main__", ["a", "-b"], environment, ""], "and", 7)


def _run_in(folder: Path, *arguments: object) -> None:
    sys.path.insert(0, str(folder))
    forked.run(*arguments)  # type: ignore[arg-type]
