# SPDX-License-Identifier: Apache-2.0
"""Building and running images with buildah alone, in a storage of the test's own: no engine has to run.

``buildah run`` cannot make a root read-only, so a container is run as compose.yaml describes it by the programs that
engines use themselves: a mount namespace, bind mounts, chroot, a plain user and no new privileges.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

USER = 10001
# The bind mounts come first: what lies below a root that is read-only can no longer be mounted upon by accident.
_ENTER = """set -e
root=$1; shift
mount --bind "$root" "$root"
for folder in proc sys dev; do mount --rbind "/$folder" "$root/$folder"; done
mount -t tmpfs -o size=2g,mode=1777,nosuid,nodev tmpfs "$root/tmp"
while [ "$1" != -- ]; do
  mkdir -p "$root/$2"
  mount --bind "$1" "$root/$2"
  [ "$3" = rw ] || mount -o remount,bind,ro "$root/$2"
  shift 3
done
shift
mount -o remount,bind,ro "$root"
exec setpriv --no-new-privs chroot --userspec=$H3_USER:$H3_USER --groups= "$root" "$@"
"""


@dataclass(frozen=True)
class Mount:
    """One bind mount of a container."""

    source: Path
    target: Path
    writable: bool = False


@dataclass(frozen=True)
class Buildah:
    """buildah with its own storage under ``folder``."""

    folder: Path

    def environment(self) -> dict[str, str]:
        """Variables with which buildah uses this storage; the machine's own is not touched."""
        conf = self.folder / "storage.conf"
        if not conf.exists():
            conf.write_text(
                f'[storage]\ndriver = "overlay"\ngraphroot = "{self.folder}/store"\nrunroot = "{self.folder}/run"\n'
            )
        return {**os.environ, "CONTAINERS_STORAGE_CONF": str(conf)}

    def __call__(self, *words: str) -> str:
        """Run one command; its standard output."""
        done = subprocess.run(["buildah", *words], env=self.environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"buildah {' '.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    def remove_all(self) -> None:
        """Unmount and remove every container and image; a mounted root would outlive the test's folder."""
        for words in (("umount", "--all"), ("rm", "--all"), ("rmi", "--all", "--force")):
            subprocess.run(["buildah", *words], env=self.environment(), capture_output=True, check=False)
        for name in ("store", "run"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def commit_root(self, root: Path, name: str, env: Mapping[str, str]) -> str:
        """An image of one layer that holds ``root``; its digest."""
        container = self("from", "scratch")
        self("add", "--quiet", container, str(root), "/")
        settings = [word for key, value in env.items() for word in ("--env", f"{key}={value}")]
        self("config", *settings, container)
        self("commit", "--quiet", "--rm", container, name)
        return self("inspect", "--type", "image", "--format", "{{.FromImageDigest}}", name)

    def config(self, image: str) -> dict[str, Any]:
        """Configuration of an image, as the OCI names it."""
        found: dict[str, Any] = json.loads(self("inspect", "--type", "image", image))["OCIv1"]
        return found

    def mounted(self, image: str) -> Path:
        """Root of a new container of the image, writable until it is run read-only."""
        return Path(self("mount", self("from", "--pull-never", image)))


def run_read_only(
    root: Path, config: Mapping[str, Any], words: Iterable[str], mounts: Sequence[Mount], env: Mapping[str, str]
) -> list[str]:
    """The command that runs an image as compose.yaml describes it: its user, its variables, its entrypoint.

    Args:
        root: from :meth:`Buildah.mounted`.
        config: from :meth:`Buildah.config`.
        words: after the entrypoint, as ``command:`` has them.
        mounts: bind mounts.
        env: variables beside the image's own.
    """
    settings = config["config"]
    variables = [*settings["Env"], *(f"{name}={value}" for name, value in env.items())]
    inside = ["/usr/bin/env", "-i", f"--chdir={settings['WorkingDir']}", *variables, *settings["Entrypoint"], *words]
    places = [
        word
        for mount in mounts
        for word in (str(mount.source), str(mount.target).lstrip("/"), "rw" if mount.writable else "ro")
    ]
    script = _ENTER.replace("$H3_USER", settings["User"].partition(":")[0])
    return [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        script,
        "sh",
        str(root),
        *places,
        "--",
        *inside,
    ]
