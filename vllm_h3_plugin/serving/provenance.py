# SPDX-License-Identifier: Apache-2.0
"""What this installation is made of: image, commit, wheels, recipe, patches, host and driver, as one JSON object.

Nothing is guessed: what cannot be known here is null, and ``unknown`` says why.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from vllm_h3_plugin import __version__
from vllm_h3_plugin.errors import HostError
from vllm_h3_plugin.pins import HostPin, installed_host, load_pins, lock_file
from vllm_h3_plugin.quantization.recipe import load_recipe

PACKAGE = Path(__file__).resolve().parents[1]
BUILD_RECORD = Path("/usr/share/vllm-h3/build.json")
"""Written into the image by the Dockerfile."""
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
ASCEND_DRIVER = Path("/usr/local/Ascend/driver/version.info")
PACKAGES = ("vllm", "vllm-omni", "torch", "transformers", "diffusers", "vllm-h3-plugin")


def collect(recipe: str | None, *, build_record: Path = BUILD_RECORD) -> dict[str, Any]:
    """Everything, as JSON-serialisable values; reads files and asks git, imports no torch.

    Args:
        recipe: name or path of the precision recipe to describe; None: nobody named one.
        build_record: what the image build left; absent outside of an image.

    Raises:
        RecipeError: the recipe cannot be read.
    """
    unknown: dict[str, str] = {}
    return {
        "plugin": {"version": __version__, "content_sha256": content_digest(PACKAGE), **_wheel(unknown)},
        "git": _git(build_record, unknown),
        "image": _image(build_record, unknown),
        "image_lock_sha256": _sha256(lock_file()),
        "host": _host(unknown),
        "packages": {name: _version(name) for name in PACKAGES},
        "recipe": _recipe(recipe, unknown),
        "patches": [
            {"file": path.name, "sha256": _sha256(path)} for path in sorted((PACKAGE.parent / "patches").glob("*.diff"))
        ],
        "machine": {
            "architecture": platform.machine(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "driver": _driver(unknown),
        "unknown": unknown,
    }


def content_digest(folder: Path) -> str:
    """SHA-256 over path and content of every file below ``folder`` but compiled ones: equal in a checkout and a wheel.

    Links are followed, as the build of a wheel does.
    """
    files: dict[str, Path] = {}
    pending = [(folder, "")]
    while pending:
        at, prefix = pending.pop()
        for path in at.iterdir():
            name = f"{prefix}{path.name}"
            if path.is_dir():
                if path.name != "__pycache__":
                    pending.append((path, f"{name}/"))
            elif path.suffix != ".pyc":
                files[name] = path
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{_sha256(files[name])}  {name}\n".encode())
    return total.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def wheel_digest(found: Distribution) -> str | None:
    """SHA-256 of the wheel file that a package was installed from, where the installer recorded it (PEP 610)."""
    text = found.read_text("direct_url.json")
    hashes = json.loads(text).get("archive_info", {}).get("hashes", {}) if text else {}
    digest: str | None = hashes.get("sha256")
    return digest


def record_digest(found: Distribution) -> str | None:
    """SHA-256 of a package's RECORD, which lists every installed file with its own digest."""
    text = found.read_text("RECORD")
    return hashlib.sha256(text.encode()).hexdigest() if text else None


def _wheel(unknown: dict[str, str]) -> dict[str, Any]:
    try:
        digest = wheel_digest(distribution("vllm-h3-plugin"))
    except PackageNotFoundError:
        unknown["plugin.wheel_sha256"] = "the plugin is not installed, only imported"
        return {"wheel_sha256": None}
    if digest is None:
        unknown["plugin.wheel_sha256"] = "it was not installed from a wheel file"
    return {"wheel_sha256": digest}


def _image(record: Path, unknown: dict[str, str]) -> dict[str, Any] | None:
    if not record.is_file():
        unknown["image"] = f"not in an image of this project: no {record}"
        return None
    built: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    pinned = {pin.image.pinned for pin in load_pins().hosts if pin.image.pinned}
    return {**built, "base_is_locked": built["base"] in pinned}


def _git(record: Path, unknown: dict[str, str]) -> dict[str, Any] | None:
    if record.is_file():
        commit, dash, _ = json.loads(record.read_text(encoding="utf-8"))["revision"].partition("-")
        return {"commit": commit, "dirty": bool(dash)}
    root = PACKAGE.parent
    if not (root / ".git").exists():
        unknown["git"] = "neither an image of this project nor a checkout"
        return None

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-c", "safe.directory=*", "-C", str(root), *words], check=True, capture_output=True, text=True
        ).stdout

    try:
        return {"commit": git("rev-parse", "HEAD").strip(), "dirty": bool(git("status", "--porcelain").strip())}
    except (OSError, subprocess.CalledProcessError) as exc:
        unknown["git"] = f"git could not tell: {exc}"
        return None


def _host(unknown: dict[str, str]) -> dict[str, Any] | None:
    try:
        pin: HostPin = installed_host()
    except HostError as exc:
        unknown["host"] = str(exc)
        return None
    return {
        "name": pin.name,
        "wheels": {wheel.file: wheel.sha256 for wheel in pin.wheels},
        "installed_record_sha256": {name: record_digest(distribution(name)) for name in ("vllm", "vllm-omni")},
    }


def recipe_file(name: str) -> dict[str, str]:
    """Name and SHA-256 of a recipe.

    Raises:
        RecipeError: it cannot be read.
    """
    recipe = load_recipe(name)
    return {"name": recipe.name, "sha256": _sha256(Path(recipe.source))}


def _recipe(name: str | None, unknown: dict[str, str]) -> dict[str, Any] | None:
    if name is None:
        unknown["recipe"] = "H3_RECIPE is unset: the workers chose one, and name it"
        return None
    return recipe_file(name)


def _driver(unknown: dict[str, str]) -> str | None:
    for path in (NVIDIA_DRIVER, ASCEND_DRIVER):
        if path.is_file():
            return path.read_text(encoding="utf-8", errors="replace").splitlines()[0].strip()
    unknown["driver"] = f"neither {NVIDIA_DRIVER} nor {ASCEND_DRIVER} is there"
    return None
