# SPDX-License-Identifier: Apache-2.0
"""The real Dockerfile, built and run without an engine's daemon: contracts, layers, a clip from a read-only root."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.kit.local_base import BASE_ENVIRONMENT, HOST_MOUNT, WHEELS_MOUNT, make_root
from tests.kit.local_container import USER, Buildah, Mount, run_read_only
from tests.ports import own_port
from tools import image
from tools.environment import BOOT, ROOT, ensure_uv
from vllm_h3_plugin import __version__
from vllm_h3_plugin.checkpoint.synthetic.spec import SynthSpec
from vllm_h3_plugin.checkpoint.synthetic.writer import write_checkpoint
from vllm_h3_plugin.serving.command import ServerCommand
from vllm_h3_plugin.serving.provenance import content_digest
from vllm_h3_plugin.serving.server import Server

pytestmark = [pytest.mark.container, pytest.mark.server, pytest.mark.timeout(1800)]

READY_S = 420
KEY = "5ec2e7" * 6


def site_of(environment: Path) -> Path:
    """``site-packages`` of a virtual environment of this interpreter's version."""
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


@dataclass(frozen=True)
class Built:
    """An image in buildah's storage."""

    buildah: Buildah
    name: str
    base: image.Base
    source: image.Source
    mounts: tuple[Mount, ...]

    @property
    def config(self) -> dict[str, Any]:
        return self.buildah.config(self.name)

    def build(self, checkout: Path, name: str) -> Built:
        """Build a checkout as ``make build`` does."""
        volumes = [word for mount in self.mounts for word in ("--volume", f"{mount.source}:{mount.target}:ro")]
        options = ["--isolation", "chroot", "--no-cache", *volumes]
        command = image.build_command("buildah", self.base, self.source, name, options)
        done = subprocess.run(
            command,
            cwd=checkout,
            env=self.buildah.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        return Built(self.buildah, name, self.base, self.source, self.mounts)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """This checkout's image upon a base that is made of this machine."""
    folder = tmp_path_factory.mktemp("container")
    ensure_uv()
    wheels = folder / "wheels"
    pip = (str(BOOT / "bin" / "python"), "-m", "pip", "download", "--quiet")
    subprocess.run(
        [*pip, "--require-hashes", "--requirement", "requirements/image.txt", "--dest", str(wheels)],
        cwd=ROOT,
        check=True,
    )
    site = site_of(Path(sys.prefix))
    make_root(folder / "root", site, site_of(BOOT))
    buildah = Buildah(folder)
    digest = buildah.commit_root(folder / "root", "localhost/vllm-h3-local-base", BASE_ENVIRONMENT)
    base = image.Base("localhost/vllm-h3-local-base", digest)
    source = image.Source("0123456789abcdef0123456789abcdef01234567", dirty=False, epoch=1_700_000_000)
    mounts = (Mount(site, HOST_MOUNT), Mount(wheels, WHEELS_MOUNT))
    try:
        yield Built(buildah, "", base, source, mounts).build(ROOT, "localhost/vllm-h3-plugin:test")
    finally:
        buildah.remove_all()


@dataclass
class Box:
    """A container of the image: its root, its writable folders and how it is run."""

    built: Built
    root: Path
    writable: dict[str, Path]
    checkpoint: Path
    key_file: Path

    def command(self, *words: str, entrypoint: tuple[str, ...] | None = None, **env: str) -> list[str]:
        config = self.built.config
        if entrypoint is not None:
            config["config"]["Entrypoint"] = list(entrypoint)
        mounts = [
            self.built.mounts[0],
            Mount(self.checkpoint, Path("/checkpoint")),
            Mount(self.key_file.parent, Path("/run/secrets")),
            *(Mount(source, Path(target), writable=True) for target, source in self.writable.items()),
        ]
        return run_read_only(self.root, config, words, mounts, env)

    def run(self, *words: str, entrypoint: tuple[str, ...] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words, entrypoint=entrypoint), capture_output=True, text=True, check=False, timeout=300
        )


@pytest.fixture(scope="module")
def box(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Box:
    folder = tmp_path_factory.mktemp("box with spaces")
    writable = {
        target: folder / Path(target).name
        for target in ("/var/cache/vllm-h3", "/var/lib/vllm-h3/clips", "/var/lib/vllm-h3/home")
    }
    for source in writable.values():
        source.mkdir(mode=0o750)
        os.chown(source, USER, USER)
    secrets = folder / "secrets"
    secrets.mkdir()
    (secrets / "api_key").write_text(KEY + "\n")
    made = write_checkpoint(folder / "checkpoint", SynthSpec())
    return Box(built, built.buildah.mounted(built.name), writable, made.root, secrets / "api_key")


@dataclass(frozen=True)
class Served:
    """A server that is ready in a container."""

    server: Server
    info: dict[str, Any]
    log: Path


@pytest.fixture(scope="module")
def served(box: Box, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The image's entrypoint with the reference profile, ready."""
    port = own_port()
    words = ("reference", "--checkpoint", "/checkpoint/FL2VA", "--address", "127.0.0.1", "--port", str(port))
    argv = box.command(*words, H3_API_KEY_FILE="/run/secrets/api_key")
    command = ServerCommand(tuple(argv), {}, f"http://127.0.0.1:{port}", api_key=KEY)
    log = tmp_path_factory.mktemp("log") / "server.log"
    with Server(command, log=log) as server:
        yield Served(server, server.wait_ready(READY_S), log)


def test_labels_name_version_commit_base_and_lock(built: Built) -> None:
    labels = built.config["config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == __version__
    assert labels["org.opencontainers.image.revision"] == built.source.commit
    assert labels["org.opencontainers.image.created"] == built.source.created
    assert f"{labels['org.opencontainers.image.base.name']}@{labels['org.opencontainers.image.base.digest']}" == str(
        built.base
    )
    assert len(labels["vllm-h3.image-lock.sha256"]) == 64


def test_the_image_holds_this_checkouts_plugin_and_nothing_of_a_model(built: Built, box: Box) -> None:
    (installed,) = box.root.glob("usr/local/lib/python3.*/*-packages/vllm_h3_plugin")
    assert content_digest(installed) == content_digest(ROOT / "vllm_h3_plugin")
    added = [path for path in box.root.rglob("*") if path.suffix in (".safetensors", ".bin", ".pt") and path.is_file()]
    assert not added
    assert not list(box.root.rglob("tests/kit")) and not (box.root / "src").exists()


def test_another_checkout_of_the_same_commit_gives_the_same_layers(built: Built, tmp_path: Path) -> None:
    other = tmp_path / "another place"
    before = os.umask(0o077)
    try:
        # What git has in the index and in files, without history: as another person's clone holds it.
        subprocess.run(
            ["git", "-c", "safe.directory=*", "checkout-index", "--all", f"--prefix={other}/"], cwd=ROOT, check=True
        )
        names = subprocess.run(
            ["git", "-c", "safe.directory=*", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.splitlines()
        for name in names:
            if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
                (other / name).write_bytes((ROOT / name).read_bytes())
    finally:
        os.umask(before)
    again = built.build(other, "localhost/vllm-h3-plugin:again")
    assert again.config["rootfs"]["diff_ids"] == built.config["rootfs"]["diff_ids"]


def test_the_build_record_and_the_list_of_materials_lie_in_the_image(built: Built, box: Box) -> None:
    record = json.loads((box.root / "usr/share/vllm-h3/build.json").read_text())
    assert record["revision"] == built.source.commit and record["base"] == str(built.base)
    materials = json.loads((box.root / "usr/share/vllm-h3/sbom.cdx.json").read_text())
    named = {component["name"] for component in materials["components"]}
    assert {"vllm", "vllm-omni", "torch", "ffmpeg-python"} <= {name.replace("_", "-") for name in named}


def test_the_process_is_a_plain_user_without_rights_on_a_root_it_cannot_write(box: Box) -> None:
    look = """id -u; id -G
for in in /etc /usr/share/vllm-h3 /checkpoint /run/secrets; do touch $in/x 2>/dev/null && echo wrote $in; done
touch /var/cache/vllm-h3/x /tmp/x && echo cache
while read name value; do case $name in CapEff:|NoNewPrivs:) echo $name$value;; esac; done < /proc/self/status"""
    done = box.run(look, entrypoint=("/bin/sh", "-c"))
    assert done.stdout.split() == [str(USER), str(USER), "cache", "CapEff:0000000000000000", "NoNewPrivs:1"], (
        done.stderr
    )


def test_the_entrypoint_teaches_and_refuses_what_it_does_not_know(box: Box) -> None:
    assert "vllm-h3 serve" in box.run("--help").stdout
    unknown = box.run("sparkle")
    assert unknown.returncode == 2 and "sparkle" in unknown.stderr and "spark" in unknown.stderr


def test_the_server_in_it_is_this_build_and_asks_for_the_key(served: Served, built: Built) -> None:
    assert served.info["plugin"] == __version__
    assert served.info["provenance"]["image"]["revision"] == built.source.commit
    assert httpx.get(f"{served.server.command.url}/v1/h3/info").status_code == 401
    assert KEY not in served.log.read_text()


def test_smoke_passes_against_it(served: Served, box: Box, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "vllm-h3"),
            "smoke",
            "--url",
            served.server.command.url,
            "--steps",
            "2",
            "--json",
        ],
        cwd=tmp_path,
        env={**os.environ, "H3_API_KEY_FILE": str(box.key_file)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["ok"] is True
    clips = sorted((tmp_path / "clips").glob("*.mp4"))
    assert len(clips) == 2 and all(clip.with_name(f"{clip.name}.sha256").is_file() for clip in clips)


def test_its_health_check_is_content(served: Served, box: Box) -> None:
    server = served.server
    check = box.command(
        "health", "--url", server.command.url, entrypoint=("vllm-h3",), H3_API_KEY_FILE="/run/secrets/api_key"
    )
    done = subprocess.run(check, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_stop_ends_it_and_all_it_started_well_within_the_grace_period(served: Served) -> None:
    server = served.server
    started = time.monotonic()
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait() == 130, "as Ctrl-C"
    assert time.monotonic() - started < 60, "compose.yaml allows 90 s"
    deadline = time.monotonic() + 120
    while left := [process.info for process in psutil.process_iter(["pid", "uids", "cmdline"]) if _is_ours(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def _is_ours(process: psutil.Process) -> bool:
    return process.info["uids"] is not None and process.info["uids"].real == USER
