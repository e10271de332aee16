# SPDX-License-Identifier: Apache-2.0
"""torch_npu's wheel as an oracle: its operators' declarations, for tests on machines without a card.

``ensure_oracle`` has pip download the wheel that launch/image.lock pins, whatever this machine is, and unpacks three of
its files below ``.cache/oracle``. It is never installed: without CANN torch_npu breaks ``import torch``. Only the
standard library is needed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tools.environment import BOOT, ROOT, ensure_uv
from vllm_h3_plugin.errors import H3Error, ToolMissingError
from vllm_h3_plugin.pins import Wheel, load_pins

CACHE = ROOT / ".cache" / "oracle"
LIBRARY = "torch_npu/lib/libtorch_npu.so"
META = "torch_npu/op_plugin/meta/_meta_registrations.py"
MEMBERS = (LIBRARY, META, "torch_npu/utils/_error_code.py")
_FETCH = "`python -m tools.oracle` (or `make test`) fetches 40 MB from the package index."
_FILE = re.compile(
    r"(?P<name>\w+)-(?P<version>[^-]+)-cp(?P<python>\d)(?P<minor>\d+)-(?P<abi>\w+)-(?P<platform>\w+)\.whl"
)


def wheel_pin() -> Wheel:
    """The pinned wheel."""
    wheel = load_pins().host("ascend").oracle
    assert wheel is not None  # launch/image.lock has one
    return wheel


def oracle_folder(wheel: Wheel) -> Path:
    """Where a wheel's files lie, once they are there. Named by its hash, so that another pin is another folder."""
    return CACHE / wheel.sha256[:16]


def why_no_oracle() -> str | None:
    """Why tests cannot read the wheel; None if they can."""
    if oracle_folder(wheel_pin()).is_dir():
        return None
    failed = CACHE / "failed.txt"
    last = f" The last attempt: {failed.read_text(encoding='utf-8').strip()}." if failed.is_file() else ""
    return f"{wheel_pin().file} is not in .cache/oracle: {_FETCH}{last}"


def ensure_oracle() -> Path:
    """The folder with the wheel's files, fetched if needed.

    Raises:
        ToolMissingError: the download failed, or the wheel lacks a file; the reason is kept for the tests' summary.
    """
    wheel = wheel_pin()
    folder = oracle_folder(wheel)
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=CACHE) as work:
            _unpack(_download(wheel, Path(work)), Path(work) / "files")
            (Path(work) / "files").rename(folder)
    except H3Error as exc:
        (CACHE / "failed.txt").write_text(f"{exc.what}: {exc.why}\n", encoding="utf-8")
        raise
    (CACHE / "failed.txt").unlink(missing_ok=True)
    return folder


def _download(wheel: Wheel, work: Path) -> Path:
    """Fetch the wheel with pip, which holds it against the pinned hash."""
    ensure_uv()  # makes .venv-boot, whose pip this is
    found = _FILE.fullmatch(wheel.file)
    assert found, wheel.file
    wanted = work / "wanted.txt"
    wanted.write_text(f"{found['name']}=={found['version']} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    command = [str(BOOT / "bin" / "python"), "-m", "pip", "download", "-qq", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--python-version", f"{found['python']}.{found['minor']}", "--abi", found["abi"]]
    command += ["--platform", found["platform"], "--dest", str(work), "--requirement", str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    path = work / wheel.file
    if done.returncode or not path.is_file():
        said = done.stderr.strip().splitlines()
        raise ToolMissingError(
            f"{wheel.file} could not be fetched",
            why=said[-1] if said else f"pip ended with {done.returncode}",
            fix="Check the network and pip's configuration; tests of Ascend's operators do not run without it.",
        )
    return path


def _unpack(path: Path, folder: Path) -> None:
    with zipfile.ZipFile(path) as wheel:
        lacking = sorted(set(MEMBERS) - set(wheel.namelist()))
        if lacking:
            raise ToolMissingError(
                f"{path.name} has no {lacking[0]}",
                why="the wheel is laid out differently",
                fix="Correct tools/oracle.py.",
            )
        for member in MEMBERS:
            target = folder / member
            target.parent.mkdir(parents=True, exist_ok=True)
            with wheel.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)


def main() -> int:
    """Fetch it. Without it the other tests run, and those that read it say why they do not: never a failure."""
    try:
        ensure_oracle()
    except ToolMissingError as exc:
        print(exc.report().replace("error:", "set-up:", 1), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
