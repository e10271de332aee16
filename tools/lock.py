# SPDX-License-Identifier: Apache-2.0
"""Regenerate the lock files and the wheel hashes: ``python -m tools.lock [--upgrade]``.

Versions come from ``launch/image.lock`` (hosts), ``pyproject.toml`` (the plugin) and ``requirements/*.in`` (tools).
Without ``--upgrade`` every version that still fits is kept. Wheel hashes in ``image.lock`` are compared with the
package index's; a difference is an error, never an edit: a changed hash of a published wheel wants a person.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence

from tools.environment import BOOT_LOCK, ROOT, ensure_uv
from vllm_h3_plugin.errors import H3Error, HostError
from vllm_h3_plugin.pins import HostPin, load_pins

COMPILE = ("pip", "compile", "--quiet", "--universal", "--python-version", "3.11")
HASHED = ("--generate-hashes", "--no-emit-index-url", "--custom-compile-command", "make lock")

IMAGE_LOCK, CLUSTER_LOCK = "requirements/image.txt", "requirements/cluster.txt"
_WRITTEN = "Written by `make lock`, with the versions and hashes of the host locks."
_HEADERS = {
    IMAGE_LOCK: f"""\
# SPDX-License-Identifier: Apache-2.0
# What the plugin needs and neither vLLM nor vLLM-Omni brings: all that is added to the pinned image beside the plugin
# itself. {_WRITTEN}
""",
    CLUSTER_LOCK: f"""\
# SPDX-License-Identifier: Apache-2.0
# What Ray needs and neither the host nor image.txt brings, Ray included: added to an image for several machines
# (`make build CLUSTER=1`). {_WRITTEN}
""",
}
_PIN = re.compile(r"(?P<name>[a-z0-9][a-z0-9._-]*)==")


def host_requirements(pin: HostPin) -> str:
    """The two requirements that make a host."""
    return f"vllm=={pin.vllm}\nvllm-omni=={pin.vllm_omni}\n"


def _uv(*words: str, stdin: str | None = None) -> str:
    done = subprocess.run(
        [str(ensure_uv()), *words], cwd=ROOT, input=stdin, text=True, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise HostError(f"uv {' '.join(words)} failed", why=f"exit code {done.returncode}, see above")
    return done.stdout


def check_wheels(pin: HostPin) -> None:
    """Compare a host's wheels with the package index.

    Raises:
        HostError: names the wheel, the pinned hash and the published one.
    """
    answer = _uv(*COMPILE, "--no-deps", "--format", "pylock.toml", "-", stdin=host_requirements(pin))
    published = {
        wheel["url"].rsplit("/", 1)[1]: wheel["hashes"]["sha256"]
        for package in tomllib.loads(answer)["packages"]
        for wheel in package["wheels"]
    }
    pinned = {wheel.file: wheel.sha256 for wheel in pin.wheels}
    for file in sorted(published.keys() | pinned.keys()):
        if published.get(file) != pinned.get(file):
            raise HostError(
                f"{file}: launch/image.lock has {pinned.get(file)}, the index has {published.get(file)}",
                fix=f"Correct [{pin.name}.wheels] in launch/image.lock once you know why they differ.",
            )


def pinned_blocks(lock: str) -> dict[str, str]:
    """Package -> its lines of a lock file: the pin and what is indented under it. Pure."""
    blocks: dict[str, str] = {}
    name = ""
    for line in lock.splitlines(keepends=True):
        if found := _PIN.match(line):
            name = found["name"]
            blocks[name] = line
        elif name and line.startswith(" "):
            blocks[name] += line
        else:
            name = ""
    return blocks


def reached(blocks: Mapping[str, str], roots: Iterable[str]) -> set[str]:
    """Packages that ``roots`` need, directly or through others, as the lock's ``# via`` notes tell. Pure."""
    needed: dict[str, set[str]] = {}
    for name, block in blocks.items():
        notes = block.partition("# via")[2]
        for parent in re.findall(r"^(?:    #)? +(\S+)", notes, re.M):
            needed.setdefault(parent, set()).add(name)
    found: set[str] = set()
    pending = list(roots)
    while pending:
        for name in needed.get(pending.pop(), set()) - found:
            found.add(name)
            pending.append(name)
    return found


def image_lock(pin: HostPin) -> str:
    """What the plugin needs and the host does not bring, as the host's own lock has it."""
    blocks = pinned_blocks((ROOT / pin.requirements).read_text(encoding="utf-8"))
    return _lines(blocks, reached(blocks, ["vllm-h3-plugin"]) - _of_host(blocks))


def cluster_lock(pin: HostPin) -> str:
    """Ray and what it needs beyond the host and the plugin, likewise."""
    blocks = pinned_blocks((ROOT / pin.requirements).read_text(encoding="utf-8"))
    wanted = {"ray"} | reached(blocks, ["ray"])
    return _lines(blocks, wanted - reached(blocks, ["vllm-h3-plugin"]) - _of_host(blocks))


def _of_host(blocks: Mapping[str, str]) -> set[str]:
    return reached(blocks, ["vllm", "vllm-omni"])


def _lines(blocks: Mapping[str, str], names: set[str]) -> str:
    return "".join(block for name, block in blocks.items() if name in names)


def write_image_locks() -> None:
    """Write requirements/image.txt and requirements/cluster.txt.

    Raises:
        HostError: two hosts would need different files; the image installs one.
    """
    for file, make in ((IMAGE_LOCK, image_lock), (CLUSTER_LOCK, cluster_lock)):
        locks = {pin.name: make(pin) for pin in load_pins().hosts}
        if len(set(locks.values())) > 1:
            raise HostError(
                "the hosts do not lack the same packages",
                why="; ".join(f"{name}: {', '.join(pinned_blocks(lock))}" for name, lock in locks.items()),
                fix=f"Give the Dockerfile one {file} for each host.",
            )
        (ROOT / file).write_text(_HEADERS[file] + next(iter(locks.values())), encoding="utf-8")
        print(file)


def main(argv: Sequence[str]) -> int:
    """Write every lock file."""
    upgrade = ("--upgrade",) if "--upgrade" in argv else ()
    try:
        _uv(*COMPILE, *HASHED, *upgrade, "-o", str(BOOT_LOCK.relative_to(ROOT)), "requirements/boot.in")
        for pin in load_pins().hosts:
            check_wheels(pin)
            sources = ("-", "pyproject.toml", "requirements/test.in")
            _uv(*COMPILE, *HASHED, *upgrade, "-o", pin.requirements, *sources, stdin=host_requirements(pin))
            print(f"{pin.requirements}: {pin}")
        write_image_locks()
    except H3Error as exc:
        print(f"error: {exc}", file=sys.stderr)
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
