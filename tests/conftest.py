# SPDX-License-Identifier: Apache-2.0
"""What every test shares: marks by folder, hardware gates, and a report of what was slow and what could not run.

A test that cannot run here is skipped only through this file, with a reason that `make test` prints beside its name.
Any other skip makes `make test` fail: a test that quietly does not run proves nothing.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from vllm_h3_plugin.errors import HostError
from vllm_h3_plugin.pins import HostPin, installed_host
from vllm_h3_plugin.serving.command import HOST_ENVIRONMENT

TESTS = Path(__file__).resolve().parent
ENVIRONMENT = pytest.StashKey[dict[str, str]]()
"""The variables that this run began with. The host sets some when it is imported, and so do verbs run in-process."""

# Folder -> marks of every test in it. Tests elsewhere carry their own marks.
FOLDER_MARKS = {
    "contract": ("host",),
    "server": ("host", "server"),
    "gpu": ("host", "gpu"),
    "npu": ("host", "npu"),
}
NEEDS = {
    "gpu": "needs a CUDA device: run `make test-gpu` on a machine that has one",
    "npu": "needs an Ascend device",
}

# Nothing in the tests may reach the network, and importing the host starts no compilers.
for _name, _value in {**HOST_ENVIRONMENT, "VLLM_NO_USAGE_STATS": "1"}.items():
    os.environ.setdefault(_name, _value)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vllm-h3-plugin")
    group.addoption("--accelerator", choices=sorted(NEEDS), help="Run the tests marked for this accelerator.")
    group.addoption("--soak", action="store_true", help="Run the tests marked soak: many ranks, many prompts, long.")
    group.addoption("--report", metavar="FILE", type=Path, help="Write what ran and what could not as JSON.")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--accelerator") is None:
        # Before any test module imports vLLM, which discovers its platform once.
        os.environ["H3_REFERENCE"] = "1"
    config.stash[ENVIRONMENT] = dict(os.environ)
    report = config.getoption("--report")
    if report:
        config.pluginmanager.register(Report(report, config), "h3-report")


def host_name() -> str | None:
    """Name of the pinned host in this environment; None where vLLM is not installed."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return None
    return installed_host().name


@pytest.fixture(scope="session")
def host_pin() -> HostPin:
    """The host that this environment holds."""
    return installed_host()


@pytest.fixture(autouse=True)
def _single_precision_by_default(request: pytest.FixtureRequest) -> Iterator[None]:
    """Contract tests are one rank with BF16 as torch's default dtype until the session ends; others must not see it."""
    torch = sys.modules.get("torch")
    folder = request.path.relative_to(TESTS).parts[0] if request.path.is_relative_to(TESTS) else ""
    if torch is None or folder not in {"unit", "kit"}:
        yield
        return
    outside = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(outside)


_EXPECTED_SKIPS = pytest.StashKey[set[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by folder and gate those that this machine or host cannot run."""
    accelerator = config.getoption("--accelerator")
    host = host_name()
    expected = config.stash.setdefault(_EXPECTED_SKIPS, set())
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        for mark in FOLDER_MARKS.get(folder, ()):
            item.add_marker(mark)
        only = item.get_closest_marker("only_host")
        reason = next((NEEDS[kind] for kind in NEEDS if kind != accelerator and item.get_closest_marker(kind)), None)
        if reason is None and item.get_closest_marker("soak") and not config.getoption("--soak"):
            reason = "takes long: run `make soak`"
        if reason is None and item.get_closest_marker("container"):
            reason = container_refusal()
        programs = item.get_closest_marker("programs")
        missing = [name for name in (programs.args if programs else ()) if shutil.which(name) is None]
        if reason is None and missing:
            reason = f"needs {', '.join(missing)}: apt-get install {' '.join(missing)}"
        if reason is None and item.get_closest_marker("browser"):
            reason = browser_refusal()
        if reason is None and item.get_closest_marker("oracle"):
            from tools.oracle import why_no_oracle

            reason = why_no_oracle()
        if reason is None and only is not None and host is not None and host not in only.args:
            reason = f"only on {', '.join(only.args)}: {only.kwargs['reason']}"
        if reason is not None:
            expected.add(item.nodeid)
            item.add_marker(pytest.mark.skip(reason=reason))
        elif host is None and item.get_closest_marker("host"):
            item.add_marker(pytest.mark.skip(reason="no vLLM host in this environment: `make setup` installs one"))


@cache
def container_refusal() -> str | None:
    """Why no container can be built and run here; None: it can. Tried once, since some machines let nobody mount."""
    missing = [name for name in ("buildah", "unshare", "setpriv", "chroot") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install buildah util-linux coreutils"
    if os.geteuid() != 0:
        return "needs root: a container is built and run without an engine's daemon"
    with tempfile.TemporaryDirectory() as folder:
        conf = Path(folder) / "storage.conf"
        conf.write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/store"\nrunroot = "{folder}/run"\n')
        environment = {**os.environ, "CONTAINERS_STORAGE_CONF": str(conf)}
        (Path(folder) / "mnt").mkdir()
        trials = (
            ("unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "tmpfs", f"{folder}/mnt"),
            ("buildah", "from", "--name", "trial", "scratch"),
            ("buildah", "mount", "trial"),
        )
        try:
            for words in trials:
                done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
                    return f"`{' '.join(words[:2])}` is refused on this machine: {said[:200]}"
        finally:
            for words in (("umount", "trial"), ("rm", "trial")):
                subprocess.run(["buildah", *words], env=environment, capture_output=True, check=False)
            for mounted in ("store/overlay", "store"):
                subprocess.run(["umount", f"{folder}/{mounted}"], capture_output=True, check=False)
    return None


def chromium() -> str | None:
    """The Chromium of this machine's distribution."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@cache
def browser_refusal() -> str | None:
    """Why no browser can be driven here; None: it can. Tried once, since a packaged one may lack what it needs."""
    program = chromium()
    if program is None:
        return "needs Chromium: apt-get install chromium"
    if find_spec("playwright") is None:
        return "needs playwright: `make setup` installs it"
    with tempfile.TemporaryDirectory() as folder:
        words = ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--dump-dom")
        try:
            done = subprocess.run(
                (program, *words, "data:text/html,<p>alive</p>"),
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            return f"{program} does not run on this machine: {str(exc)[:200]}"
    if "alive" not in done.stdout:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"{program} does not run on this machine: {said[:200]}"
    return None


PHASES = ("setup", "call", "teardown")
SLOWEST = 25
FAILURE_LINES = 12
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Report:
    """Collects outcomes and seconds and writes them as JSON for the summary of `make test`."""

    def __init__(self, path: Path, config: pytest.Config) -> None:
        self.path = path
        self.config = config
        self.counts: Counter[str] = Counter()
        self.could_not_run: list[dict[str, Any]] = []
        self.failed: list[dict[str, str]] = []
        self.figures: dict[str, Any] = {}
        self.tests: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * len(PHASES))
        self.modules: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * len(PHASES))
        self.started = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        phase = PHASES.index(report.when)
        self.tests[report.nodeid][phase] += report.duration
        self.modules[report.nodeid.partition("::")[0]][phase] += report.duration
        if report.skipped:
            self._skip(report.nodeid, report)
        elif report.failed:
            self.counts["failed" if report.when == "call" else "errors"] += 1
            self._fail(report)
        elif report.when == "call":
            self.counts["passed"] += 1
            self.figures |= {str(name): value for name, value in report.user_properties}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._skip(report.nodeid, report)
        elif report.failed:
            self.counts["errors"] += 1
            self._fail(report)

    def _fail(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Keep the end of what pytest says: the summary must name the failure where the log is cut above it."""
        text = _COLOUR.sub("", report.longreprtext).strip()
        said = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines()
        self.failed.append(
            {"test": report.nodeid, "when": report.when or "collect", "said": "\n".join(said[-FAILURE_LINES:])}
        )

    def _skip(self, nodeid: str, report: pytest.TestReport | pytest.CollectReport) -> None:
        if hasattr(report, "wasxfail"):
            reason, expected = f"expected failure: {report.wasxfail}", False
        else:
            longrepr = report.longrepr
            reason = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr).removeprefix("Skipped: ")
            expected = nodeid in self.config.stash.get(_EXPECTED_SKIPS, set())
        self.counts["skipped"] += 1
        self.could_not_run.append({"test": nodeid, "reason": reason, "expected": expected})

    def pytest_sessionfinish(self) -> None:
        document = {
            "host": host_name_or_error(),
            "python": platform.python_version(),
            "seconds": round(time.monotonic() - self.started, 1),
            "counts": dict(self.counts),
            "failed": self.failed,
            "could_not_run": self.could_not_run,
            "figures": self.figures,
            "slowest": {"modules": _slowest(self.modules), "tests": _slowest(self.tests)},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _slowest(seconds: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """The slowest, slowest first: name -> seconds of each phase."""
    names = sorted(seconds, key=lambda name: -sum(seconds[name]))[:SLOWEST]
    return {name: [round(phase, 2) for phase in seconds[name]] for name in names}


def host_name_or_error() -> str | None:
    """Like :func:`host_name`, but a wrong host is shown and not raised."""
    try:
        return host_name()
    except HostError as exc:
        return str(exc)
