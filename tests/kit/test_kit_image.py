# SPDX-License-Identifier: Apache-2.0
"""Building the image: which base, which command, and a wheel that is the same for the same commit."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tools import image
from vllm_h3_plugin.errors import HostError, UsageError
from vllm_h3_plugin.pins import load_pins
from vllm_h3_plugin.serving.provenance import content_digest

ROOT = Path(__file__).resolve().parents[2]
DIGEST = "sha256:" + "ab" * 32
SOURCE = image.Source("0123abc", dirty=False, epoch=1_700_000_000)


def test_the_base_is_the_locks() -> None:
    pin = load_pins().host("nvidia")
    assert str(image.choose_base(pin, None)) == pin.image.pinned


def test_a_host_without_a_digest_needs_one_from_the_operator() -> None:
    pin = load_pins().host("ascend")
    with pytest.raises(HostError) as caught:
        image.choose_base(pin, None)
    assert pin.image.reference in str(caught.value) and "--base NAME@sha256:DIGEST" in str(caught.value)
    assert image.choose_base(pin, f"quay.io/ascend/x:v1-a3@{DIGEST}") == image.Base("quay.io/ascend/x:v1-a3", DIGEST)


@pytest.mark.parametrize(
    "given", ["vllm/vllm-omni:v0.30.0", "vllm-omni", "x@sha256:12", f"x@{DIGEST.upper()}", f"@{DIGEST}"]
)
def test_a_base_without_its_digest_is_refused(given: str) -> None:
    with pytest.raises(UsageError) as caught:
        image.choose_base(load_pins().host("nvidia"), given)
    assert given in str(caught.value) and "NAME@sha256:DIGEST" in str(caught.value)


@pytest.mark.parametrize("engine", image.ENGINES)
def test_the_command_gives_every_argument_of_the_dockerfile(engine: str) -> None:
    command = image.build_command(engine, image.Base("some/base:v1", DIGEST), SOURCE, "tag")
    given = {word.partition("=")[0]: word.partition("=")[2] for word in command if word.split("=")[0].isupper()}
    text = (ROOT / "Dockerfile").read_text()
    wanted = {line.split()[1] for line in text.splitlines() if line.startswith("ARG ")}
    assert set(given) == wanted
    assert (given["BASE_NAME"], given["BASE_DIGEST"]) == ("some/base:v1", DIGEST)
    assert given["CREATED"] == "2023-11-14T22:13:20Z" and given["SOURCE_DATE_EPOCH"] == "1700000000"
    lock = (ROOT / "launch" / "image.lock").read_bytes()
    assert given["LOCK_SHA256"] == hashlib.sha256(lock).hexdigest()


def test_ray_is_in_the_image_only_if_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "read_source", lambda: SOURCE)
    for flags, tag, value in (
        ((), "vllm-h3-plugin:nvidia ", "CLUSTER= "),
        (("--cluster",), ":nvidia-cluster ", "CLUSTER=1 "),
    ):
        assert image.main(["build", "--engine", "docker", "--dry-run", *flags]) == 0
        out = capsys.readouterr().out
        assert tag in out and value in out


def test_a_tree_that_is_not_its_commit_says_so() -> None:
    assert replace(SOURCE, dirty=True).revision == "0123abc-dirty"


def test_dry_run_prints_the_command_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "read_source", lambda: SOURCE)
    assert image.main(["build", "--engine", "buildah", "--base", f"local/base@{DIGEST}", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("buildah bud ") and f"BASE_DIGEST={DIGEST}" in out
    assert "not in launch/image.lock" in err


def test_a_missing_engine_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "read_source", lambda: SOURCE)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert image.main(["build"]) == 9
    assert "docker, buildah, podman" in capsys.readouterr().err


def build_wheel(source: Path, out: Path) -> Path:
    """What `pip wheel --no-build-isolation` does, in a copy of what .dockerignore lets in."""
    code = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=source, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def test_the_same_commit_gives_the_same_wheel_and_its_content_is_the_checkouts(tmp_path: Path) -> None:
    wheels = []
    for name, when in (("one", 1_600_000_000), ("two tries", 1_650_000_000)):
        source = tmp_path / name
        source.mkdir()
        for part in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / part, source)
        for part in ("quant", "launch", "vllm_h3_plugin"):
            shutil.copytree(ROOT / part, source / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        for path in source.rglob("*"):
            os.utime(path, (when, when), follow_symlinks=False)
        wheels.append(build_wheel(source, tmp_path / f"{name}-dist"))
    first, second = (hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels)
    assert first == second
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(tmp_path / "installed")
    assert content_digest(tmp_path / "installed" / "vllm_h3_plugin") == content_digest(ROOT / "vllm_h3_plugin")
