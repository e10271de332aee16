# SPDX-License-Identifier: Apache-2.0
"""A base image made of this machine, for a test that builds the real Dockerfile where no registry can be reached.

It holds this interpreter, the few programs that the Dockerfile runs, and the libraries of both. The host's packages
(8.5 GB) are not copied: they are mounted read-only, and the base's package folder holds a link to each. The plugin and
what the Dockerfile itself installs are left out, so that the build has to bring them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

# What the Dockerfile and the interpreter's own library call.
PROGRAMS = (
    "sh",
    "cat",
    "chmod",
    "cp",
    "date",
    "env",
    "find",
    "id",
    "install",
    "ln",
    "ls",
    "mkdir",
    "mv",
    "rm",
    "sleep",
    "touch",
    "uname",
)
# What wheels may take for granted (manylinux), found beside the C library.
SYSTEM_LIBRARIES = (
    "libc",
    "libm",
    "libmvec",
    "libdl",
    "libpthread",
    "librt",
    "libutil",
    "libresolv",
    "libnss_*",
    "libgcc_s",
    "libstdc++",
    "libz",
)
HOST_MOUNT = Path("/opt/host")
WHEELS_MOUNT = Path("/opt/wheels")
BASE_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    # An interpreter that was built for another folder looks for its library there.
    "LD_LIBRARY_PATH": "/usr/local/lib",
    # The packages that the Dockerfile adds come from a folder that the test fills, hashes checked all the same.
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": str(WHEELS_MOUNT),
}
BUILDERS = ("pip", "setuptools", "wheel", "_distutils_hack", "pkg_resources")


def libraries_of(files: Iterable[Path]) -> set[Path]:
    """Every library that these programs load, and the loader, as ``ldd`` names them."""
    found: set[Path] = set()
    for file in files:
        listed = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=False)
        found |= {Path(path) for path in re.findall(r"(?:=> |^\s*)(/\S+) \(0x", listed.stdout, re.M)}
    return found


def _copy(file: Path, root: Path) -> None:
    """Copy a file to its own path under ``root``, following links: a link's target may lie where nothing is copied."""
    target = root / file.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy2(file.resolve(), target)


def host_packages(site: Path) -> Iterator[Path]:
    """Entries of a host's package folder that belong into the base: all but the plugin and what the image adds."""
    ours = re.compile(
        r"(__editable__.*vllm_h3|vllm_h3_plugin|ffmpeg($|_python)|(future|past)($|-)|libfuturize|libpasteurize)"
    )
    for entry in sorted(site.iterdir()):
        named = entry.name.partition("-")[0] in BUILDERS or entry.name in ("__pycache__", "distutils-precedence.pth")
        if not named and not ours.match(entry.name):
            yield entry


def make_root(root: Path, site: Path, boot_site: Path) -> None:
    """Fill ``root`` with the file system of the base.

    Args:
        root: folder to fill, made here.
        site: ``site-packages`` of the environment that holds the host.
        boot_site: ``site-packages`` that holds pip.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix)
    for folder in ("etc", "tmp", "proc", "sys", "dev", "root", "opt/host", "opt/wheels", "usr/bin", "usr/local/bin"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "bin").symlink_to("usr/bin")
    (root / "tmp").chmod(0o1777)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\n")
    # An engine mounts this one; the ranks of a server meet at localhost.
    (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    (root / "etc" / "os-release").write_text("NAME=local\n")

    interpreter = base / "bin" / version
    programs = [Path(path) for name in PROGRAMS if (path := shutil.which(name))]
    for program in programs:
        shutil.copy2(program.resolve(), root / "usr" / "bin" / program.name)
    shutil.copy2(interpreter, root / "usr" / "local" / "bin" / version)
    (root / "usr" / "local" / "bin" / "python3").symlink_to(version)
    library = root / "usr" / "local" / "lib" / version
    skipped = shutil.ignore_patterns(
        "site-packages", "dist-packages", "__pycache__", "test", "idlelib", "tkinter", "config-*"
    )
    shutil.copytree(base / "lib" / version, library, ignore=skipped, symlinks=False)

    extensions = list((library / "lib-dynload").glob("*.so"))
    libraries = libraries_of([interpreter, *programs, *extensions])
    system = next(lib for lib in libraries if lib.name == "libc.so.6").parent
    libraries |= {lib for name in SYSTEM_LIBRARIES for lib in system.glob(f"{name}.so.*")}
    for lib in libraries:
        if lib.name.startswith("libpython"):
            shutil.copy2(lib, root / "usr" / "local" / "lib" / lib.name)
        else:
            _copy(lib, root)

    packages = library / "site-packages"
    if _debian(base):
        packages = library / "dist-packages"
    packages.mkdir(parents=True)
    for name in BUILDERS:
        source = site if (site / name).exists() else boot_site
        for entry in (*source.glob(name), *source.glob(f"{name}-*.dist-info")):
            shutil.copytree(entry, packages / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
    for entry in host_packages(site):
        (packages / entry.name).symlink_to(HOST_MOUNT / entry.name)


def _debian(base: Path) -> bool:
    """Whether this interpreter is Debian's, which looks for packages under another name."""
    return base == Path("/usr") and os.path.exists("/etc/debian_version")
