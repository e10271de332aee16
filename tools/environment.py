# SPDX-License-Identifier: Apache-2.0
"""Make the virtual environments of a checkout: ``python -m tools.environment HOST...``.

``.venv-boot`` holds uv, installed by pip with its hash. uv then fills ``.venv-HOST`` with exactly what
``requirements/HOST.txt`` locks, and the plugin itself as an editable install. A stamp in each environment names what
it was made from, so a second call costs nothing. Only the standard library is needed, since nothing is installed yet.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_h3_plugin.errors import H3Error, ToolMissingError
from vllm_h3_plugin.pins import HostPin, load_pins

ROOT = Path(__file__).resolve().parents[1]
BOOT = ROOT / ".venv-boot"
BOOT_LOCK = ROOT / "requirements" / "boot.txt"
STAMP = "h3-setup.sha256"
PLACE_STAMP = "h3-place.sha256"
# One host environment, measured on x86-64; uv's cache and both environments share most of it through hard links.
VENV_GB = 9


def venv_path(host: str) -> Path:
    """Environment of a host, e.g. ``.venv-nvidia``."""
    return ROOT / f".venv-{host}"


def make_key(*inputs: Path) -> str:
    """What an environment depends on: the interpreter, where the checkout lies, and the content of ``inputs``."""
    digest = hashlib.sha256()
    for text in (platform.python_version(), platform.machine(), sys.base_prefix, str(ROOT)):
        digest.update(text.encode() + b"\0")
    for path in inputs:
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def is_current(venv: Path, key: str, stamp: str = STAMP) -> bool:
    """Whether the environment was completed from the same inputs."""
    path = venv / stamp
    return path.is_file() and path.read_text().strip() == key


def _run(command: Sequence[str | Path], fix: str) -> None:
    """Run one installer step in the checkout; its own output is the detail of an error."""
    env = {name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    # The lock decides which Python there is: uv must not fetch another one.
    env |= {"UV_PYTHON_DOWNLOADS": "never", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([str(word) for word in command], cwd=ROOT, env=env, check=False)
    if done.returncode:
        shown = " ".join(str(word) for word in command)
        raise ToolMissingError(f"set-up step failed: {shown}", why=f"exit code {done.returncode}, see above", fix=fix)


def ensure_uv() -> Path:
    """The uv program of ``.venv-boot``, installed if needed.

    Raises:
        ToolMissingError: no venv module, or the installation failed.
    """
    key = make_key(BOOT_LOCK)
    uv = BOOT / "bin" / "uv"
    if not is_current(BOOT, key):
        print("set-up: installer into .venv-boot", file=sys.stderr, flush=True)
        _run(
            [sys.executable, "-m", "venv", "--clear", BOOT],
            fix="Python's venv module is needed (Debian and Ubuntu: apt-get install python3-venv).",
        )
        _run(
            [BOOT / "bin" / "python", "-m", "pip", "install", "-qq", "--require-hashes", "-r", BOOT_LOCK],
            fix="Check the network and pip's configuration, then run the same command again.",
        )
        (BOOT / STAMP).write_text(key + "\n")
    return uv


def ensure_host(pin: HostPin) -> Path:
    """The environment of a host with the plugin in it, installed if needed; returns its folder.

    Raises:
        ToolMissingError: a step failed; the next call starts it again.
    """
    venv = venv_path(pin.name)
    lock = ROOT / pin.requirements
    key = make_key(lock, ROOT / "pyproject.toml")
    if is_current(venv, key):
        return venv
    uv = ensure_uv()
    print(f"set-up: {pin} into {venv.name}, up to {VENV_GB} GB; later runs reuse it", file=sys.stderr, flush=True)
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < VENV_GB:
        print(f"set-up: only {free_gb:.1f} GB are free here, this may not fit", file=sys.stderr, flush=True)
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    again = f"Check the network and the disk, then run the same command again; `rm -r {venv.name}` starts afresh."
    # Reused only if it was completed before and neither the interpreter nor the checkout has moved since; without its
    # stamps a half-made environment looks like none.
    reusable = is_current(venv, make_key(), PLACE_STAMP)
    for stamp in (STAMP, PLACE_STAMP):
        (venv / stamp).unlink(missing_ok=True)
    if not reusable:
        _run([uv, "venv", *quiet, "--clear", "--python", sys.executable, venv], fix=again)
    into: list[str | Path] = ["--python", venv / "bin" / "python", "--build-constraints", lock, *quiet]
    _run([uv, "pip", "sync", *into, "--require-hashes", lock], fix=again)
    _run([uv, "pip", "install", *into, "--no-deps", "--editable", "."], fix=again)
    (venv / PLACE_STAMP).write_text(make_key() + "\n")
    (venv / STAMP).write_text(key + "\n")
    return venv


def main(names: Sequence[str]) -> int:
    """Make the named environments; ``boot`` is the installer alone."""
    try:
        pins = load_pins()
        for name in names:
            if name == "boot":
                ensure_uv()
            else:
                ensure_host(pins.host(name))
    except H3Error as exc:
        print(exc.report(), file=sys.stderr)
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
