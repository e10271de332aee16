# SPDX-License-Identifier: Apache-2.0
"""Build the container image: ``python -m tools.image build [--host NAME] [--base NAME@sha256:…] [-- ENGINE OPTIONS]``.

The base comes from ``launch/image.lock`` and is always named by digest. Only the standard library is needed, so a
machine that has Python and a container engine can build.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from tools.environment import ROOT
from vllm_h3_plugin import __version__
from vllm_h3_plugin.errors import H3Error, HostError, ToolMissingError, UsageError
from vllm_h3_plugin.pins import HostPin, load_pins, lock_file

ENGINES = ("docker", "buildah", "podman")
_PINNED = re.compile(r"(?P<name>[^@\s]+)@(?P<digest>sha256:[0-9a-f]{64})")
_HOW = "Give --base NAME@sha256:DIGEST; `docker buildx imagetools inspect NAME` prints the digest of a tag."


@dataclass(frozen=True, slots=True)
class Base:
    """The image that is built upon, by digest."""

    name: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}"


@dataclass(frozen=True, slots=True)
class Source:
    """What is built: the commit, whether the tree differs from it, and the commit's time in seconds since 1970."""

    commit: str
    dirty: bool
    epoch: int

    @property
    def revision(self) -> str:
        """The commit, marked where the tree is not it."""
        return f"{self.commit}-dirty" if self.dirty else self.commit

    @property
    def created(self) -> str:
        """The commit's time as RFC 3339, which image labels use."""
        return datetime.fromtimestamp(self.epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def choose_base(pin: HostPin, given: str | None) -> Base:
    """The base of a host: the lock's, unless the operator names another by digest.

    Raises:
        HostError: the lock has no digest of this image and none was given.
        UsageError: what was given is a name or a tag without a digest.
    """
    wanted = given or pin.image.pinned
    if wanted is None:
        raise HostError(
            f"no digest of {pin.image.reference} is known",
            why=f"launch/image.lock has none for {pin.name}, and a tag can be moved to another image",
            fix=_HOW,
        )
    found = _PINNED.fullmatch(wanted)
    if found is None:
        raise UsageError(f"--base {wanted}", why="a base without its digest can be another image tomorrow", fix=_HOW)
    return Base(found["name"], found["digest"])


def read_source() -> Source:
    """State of this checkout.

    Raises:
        UsageError: it is not a git checkout, so an image of it could not be traced.
    """

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-c", "safe.directory=*", *words], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()

    try:
        return Source(
            git("rev-parse", "HEAD"), bool(git("status", "--porcelain")), int(git("log", "-1", "--format=%ct"))
        )
    except (OSError, subprocess.CalledProcessError) as exc:
        raise UsageError(
            f"{ROOT} is not a git checkout",
            why="an image names the commit that it was built from",
            fix="Build from a clone of the repository.",
        ) from exc


def build_command(
    engine: str, base: Base, source: Source, tag: str, options: Sequence[str] = (), *, cluster: bool = False
) -> list[str]:
    """The engine's command, run at the top of the checkout. Pure.

    With ``cluster`` the image holds Ray, for several machines that are one server.

    ``options`` are the engine's own, handed on as they are: a proxy, a network, an isolation.
    docker needs BuildKit (``buildx``). buildah and podman set every time in the new layers themselves; with docker the
    Dockerfile does, which leaves the times of the layers' empty parents to the engine.
    """
    arguments = {
        "BASE_NAME": base.name,
        "BASE_DIGEST": base.digest,
        "SOURCE_DATE_EPOCH": str(source.epoch),
        "VERSION": __version__,
        "REVISION": source.revision,
        "LOCK_SHA256": hashlib.sha256(lock_file().read_bytes()).hexdigest(),
        "CREATED": source.created,
        "CLUSTER": "1" if cluster else "",
    }
    start = {
        "docker": ["docker", "buildx", "build", "--load", "--provenance=false"],
        # docker's format: OCI's has no place for SHELL, HEALTHCHECK and the like.
        "buildah": ["buildah", "bud", "--format", "docker", "--timestamp", str(source.epoch)],
        "podman": ["podman", "build", "--format", "docker", "--timestamp", str(source.epoch)],
    }[engine]
    words = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    return [*start, *options, "--file", "Dockerfile", "--tag", tag, *words, "."]


def find_engine() -> str:
    """The first container engine on PATH.

    Raises:
        ToolMissingError: there is none.
    """
    for engine in ENGINES:
        if shutil.which(engine):
            return engine
    raise ToolMissingError(
        "no container engine on PATH",
        why=f"looked for {', '.join(ENGINES)}",
        fix="Install Docker Engine with its buildx and compose plugins (DGX OS brings them), or buildah.",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.image", description=__doc__)
    build = parser.add_subparsers(dest="verb", required=True).add_parser("build", help="Build the image of a host.")
    build.add_argument("--host", default=load_pins().hosts[0].name, help="Host of launch/image.lock. [%(default)s]")
    build.add_argument("--base", metavar="NAME@sha256:DIGEST", help="Another base than the lock's, by digest.")
    build.add_argument("--tag", help="Name of the result. [vllm-h3-plugin:HOST, with --cluster :HOST-cluster]")
    build.add_argument("--cluster", action="store_true", help="Add Ray, for several machines that are one server.")
    build.add_argument("--engine", choices=ENGINES, help="Container engine. [the first on PATH]")
    build.add_argument("--dry-run", action="store_true", help="Print the command, build nothing.")
    build.add_argument(
        "options", nargs="*", metavar="-- OPTION", help="Options of the engine itself, such as -- --network host."
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Build, or print what would be built; exits with the error tree's code."""
    given = _parser().parse_args(argv)
    try:
        pin = load_pins().host(given.host)
        base, source = choose_base(pin, given.base), read_source()
        if str(base) != pin.image.pinned:
            print(f"image: base {base} is not in launch/image.lock", file=sys.stderr)
        if source.dirty:
            print("image: the checkout has changes that no commit holds; labelled -dirty", file=sys.stderr)
        engine = given.engine or find_engine()
        tag = given.tag or f"vllm-h3-plugin:{pin.name}{'-cluster' if given.cluster else ''}"
        command = build_command(engine, base, source, tag, given.options, cluster=given.cluster)
        print(shlex.join(command), flush=True)
        if given.dry_run:
            return 0
        try:
            return subprocess.run(command, cwd=ROOT, check=False).returncode
        except FileNotFoundError as exc:
            raise ToolMissingError(f"{engine} is not installed", fix="Install it, or name another --engine.") from exc
    except H3Error as exc:
        print(exc.report(), file=sys.stderr)
        return exc.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
