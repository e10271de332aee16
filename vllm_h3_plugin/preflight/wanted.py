# SPDX-License-Identifier: Apache-2.0
"""What is to be started: flags over the caller's environment over the ``.env`` file over the profile, as compose does.

The variables are those of ``compose.yaml`` and ``compose.ascend.yaml``. Where no container is used, only ``H3_*`` are
looked at: ``vllm-h3 serve`` reads no other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_h3_plugin import settings
from vllm_h3_plugin.errors import SettingsError
from vllm_h3_plugin.preflight.check import Unknown, is_number
from vllm_h3_plugin.preflight.dotenv import EnvFile, parse_env
from vllm_h3_plugin.preflight.expected import Expected, Kind, expected_of
from vllm_h3_plugin.preflight.machine import READ_LIMIT, Machine
from vllm_h3_plugin.serving.profile import Profile, load_profile

DEFAULT_PROFILE = "spark"

COMPOSE_VARIABLES = (
    "VLLM_H3_API_KEY_FILE",
    "VLLM_H3_BIND",
    "VLLM_H3_CHECKPOINT",
    "VLLM_H3_MEMORY_LIMIT",
    "VLLM_H3_PARTITION",
    "VLLM_H3_PORT",
    "VLLM_H3_PROFILE",
    "VLLM_H3_SHM_SIZE",
    "ASCEND_2_PROFILE",
    *(f"ASCEND_CARD_{number}" for number in range(4)),
)
"""Variables of the compose files that preflight looks at."""

SHM_DEFAULT = "8g"
"""``shm_size`` of the compose files."""

MEMORY_DEFAULT = "110g"
"""``mem_limit`` of compose.yaml; compose.ascend.yaml has no default."""

_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30}


@dataclass(frozen=True)
class Flags:
    """What the command line said; None where it said nothing."""

    profile: str | None = None
    checkpoint: Path | None = None
    recipe: str | None = None
    port: int | None = None
    env_path: Path | None = None
    without_docker: bool = False


@dataclass(frozen=True)
class Wanted:
    """What is to be started here.

    Attributes:
        profile: with flags and variables applied.
        recipe: the one that a flag names; None leaves it to H3_RECIPE and the profile.
        env_path: the ``.env`` file.
        env_file: what is in it; None where there is none and none was asked for.
        variables: those of compose that have a value.
        known: names that settings, compose files beside ``env_path`` and preflight read.
    """

    expected: Expected
    profile: Profile
    recipe: str | None
    env_path: Path
    env_file: EnvFile | Unknown | None
    variables: Mapping[str, str]
    known: frozenset[str]

    @property
    def cards(self) -> tuple[int, ...]:
        """Numbers of the Ascend cards that compose passes: ASCEND_CARD_0 and so on, by default 0, 1, 2, 3."""
        chosen = (self.variables.get(f"ASCEND_CARD_{n}", str(n)) for n in range(self.expected.cards))
        return tuple(int(number) for number in chosen if is_number(number))

    @property
    def key_file(self) -> Path | None:
        """The file with the API key, relative to the compose file's folder; None without one."""
        name = self.variables.get("VLLM_H3_API_KEY_FILE")
        return self.env_path.parent / name if name else None

    @property
    def memory_limit(self) -> str | None:
        """The container's memory limit, as compose writes it; None where it must be set and is not."""
        default = None if self.expected.kind is Kind.ASCEND else MEMORY_DEFAULT
        return self.variables.get("VLLM_H3_MEMORY_LIMIT", default)

    @property
    def shm_size(self) -> str:
        """Size of the container's /dev/shm, as compose writes it."""
        return self.variables.get("VLLM_H3_SHM_SIZE", SHM_DEFAULT)


def resolve(machine: Machine, flags: Flags) -> Wanted:
    """Read the ``.env`` file and decide what is to be started.

    Raises:
        UsageError: no such profile.
        SettingsError: the profile is malformed, or VLLM_H3_PORT is no port.
    """
    path = flags.env_path or Path(".env")
    env_file = _env_file(machine, path, required=flags.env_path is not None)
    values = env_file.values if isinstance(env_file, EnvFile) else {}
    variables = {}
    if not flags.without_docker:
        together = {**values, **machine.environ}
        variables = {name: together[name] for name in COMPOSE_VARIABLES if together.get(name)}
    name = flags.profile or variables.get("VLLM_H3_PROFILE") or DEFAULT_PROFILE
    chosen = {
        "checkpoint": flags.checkpoint or _checkpoint(variables),
        "recipe": flags.recipe,
        "port": flags.port or _port(variables),
        "address": variables["VLLM_H3_BIND"].strip("[]") if "VLLM_H3_BIND" in variables else None,
    }
    profile = load_profile(name).with_flags({key: value for key, value in chosen.items() if value is not None})
    expected = expected_of(name, profile, containers=not flags.without_docker)
    return Wanted(expected, profile, flags.recipe, path, env_file, variables, _known(machine, path.parent))


def size_bytes(text: str) -> int | None:
    """Bytes of a size as compose writes it (``8g``, ``512m``, ``1024``); None if it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([bkmg]?)b?", text.strip().lower())
    try:
        return None if match is None else int(float(match[1]) * _UNITS[match[2]])
    except OverflowError:
        return None


def _env_file(machine: Machine, path: Path, *, required: bool) -> EnvFile | Unknown | None:
    if not machine.exists(path):
        if path.is_symlink():
            return Unknown(f"{path} is a link that leads nowhere")
        if not required:
            return None
    raw = machine.read(path)
    if isinstance(raw, Unknown):
        return raw
    if len(raw) >= READ_LIMIT:
        return Unknown(f"{path} is larger than 1 MiB, which no .env is")
    return parse_env(raw, name=str(path), environ=machine.environ)


def _known(machine: Machine, folder: Path) -> frozenset[str]:
    names: set[str] = set()
    for file in machine.names(folder):
        if re.fullmatch(r"(docker-)?compose.*\.ya?ml", file):
            raw = machine.read(folder / file)
            if not isinstance(raw, Unknown):
                names |= set(re.findall(r"\$\{?([A-Z_][A-Z0-9_]*)", raw.decode("utf-8", "replace")))
    # A compose file hands on what it names and nothing else: a setting that it does not name reaches no server.
    return frozenset({*names, *COMPOSE_VARIABLES} if names else {*settings.known_variables(), *COMPOSE_VARIABLES})


def _checkpoint(variables: Mapping[str, str]) -> Path | None:
    root = variables.get("VLLM_H3_CHECKPOINT")
    return Path(root) / variables.get("VLLM_H3_PARTITION", "FL2VA") if root else None


def _port(variables: Mapping[str, str]) -> int | None:
    text = variables.get("VLLM_H3_PORT")
    if text is None:
        return None
    if not is_number(text) or not 1 <= int(text) <= 65535:
        raise SettingsError(f"VLLM_H3_PORT={text!r}", why="it is no TCP port", fix="Set it to a number such as 8000.")
    return int(text)
