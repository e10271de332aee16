# SPDX-License-Identifier: Apache-2.0
"""The static gates: ``python -m tools.lint`` runs all of them and fails if one fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tools.environment import ROOT

BIN = Path(sys.executable).parent
SHELL_SCRIPTS = (".ci/run", "launch/**/*.sh")


def gates() -> dict[str, list[str]]:
    """Name -> command of each gate. A program that is missing is a command that fails by name."""
    scripts = [str(path.relative_to(ROOT)) for pattern in SHELL_SCRIPTS for path in sorted(ROOT.glob(pattern))]
    return {
        "ruff check": [str(BIN / "ruff"), "check", "--quiet", "."],
        "ruff format": [str(BIN / "ruff"), "format", "--check", "--quiet", "."],
        "mypy": [str(BIN / "mypy"), "--no-error-summary"],
        "shellcheck": [_program("shellcheck"), *scripts],
        "hadolint": [_program("hadolint"), "--failure-threshold", "info", "Dockerfile"],
    }


def _program(name: str) -> str:
    """A program that comes as a wheel for x86-64 only; elsewhere the system's serves."""
    wheel = BIN / name
    return str(wheel) if wheel.exists() else shutil.which(name) or name


def main() -> int:
    """Run every gate; one line each."""
    failed = []
    for name, command in gates().items():
        try:
            code = subprocess.run(command, cwd=ROOT, check=False).returncode
        except FileNotFoundError:
            print(f"{command[0]} is not installed (apt-get install {command[0]})", file=sys.stderr)
            code = 127
        print(f"lint: {name:12} {'ok' if code == 0 else f'FAILED (exit {code})'}", flush=True)
        if code:
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
