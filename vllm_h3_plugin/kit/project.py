# SPDX-License-Identifier: Apache-2.0
"""Which compose project is meant: its file, its name, the role of its cards, and the engine that runs it."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.kit.outside import Outside
from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.preflight.dotenv import parse_env

SPARK_FILE, ASCEND_FILE = "compose.yaml", "compose.ascend.yaml"


@dataclass(frozen=True)
class Project:
    """One compose project.

    Attributes:
        name: compose's name of it; all its containers carry it.
        file: the compose file, absolute.
        cards: role of an Ascend machine; None on a Spark.
        engine: the program that stands in for ``docker``.
        env_file: variables for compose; None leaves it to the ``.env`` beside the file.
        named: what a person typed for the folder; empty where it is the current one.
    """

    name: str
    file: Path
    cards: int | None = None
    engine: str = "docker"
    env_file: Path | None = None
    named: str = ""

    @property
    def folder(self) -> Path:
        """Folder of the compose file, which paths in it start from."""
        return self.file.parent

    @property
    def server(self) -> str:
        """Service that serves."""
        return "server" if self.cards is None else f"server-{self.cards}"

    @property
    def check(self) -> str:
        """Service that must end well before the server is started."""
        return "check" if self.cards is None else f"check-{self.cards}"

    @property
    def flags(self) -> str:
        """What other verbs must be told to mean this project; empty for the usual one."""
        cards = "" if self.cards is None else f" --cards {self.cards}"
        engine = "" if self.engine == "docker" else f" --engine {shlex.quote(self.engine)}"
        return cards + engine + (f" --directory {shlex.quote(self.named)}" if self.named else "")

    def compose(self, *words: str) -> tuple[str, ...]:
        """A compose command about this project. One word each, so that paths may have spaces."""
        role = () if self.cards is None else ("--profile", f"cards-{self.cards}")
        env = () if self.env_file is None else ("--env-file", str(self.env_file))
        named = ("--project-name", self.name, "--file", str(self.file))
        return (self.engine, "compose", *named, *env, *role, *words)


def open_project(
    outside: Outside, folder: Path, *, cards: int | None, engine: str, env_file: Path | None = None
) -> Project:
    """The project of a checkout.

    Args:
        folder: the top of the checkout, where the compose files are.
        cards: role on Ascend; None means the Spark's file.

    Raises:
        UsageError: no compose file there, or no such role.
    """
    if cards not in (None, 1, 2, 4):
        raise UsageError(f"--cards {cards}", why="Ascend has roles for 1, 2 and 4 cards", fix="Use one of these.")
    top = Path(os.path.abspath(folder.expanduser()))
    file = top / (SPARK_FILE if cards is None else ASCEND_FILE)
    raw = outside.machine.read(file)
    if isinstance(raw, Unknown):
        raise UsageError(
            f"no {file.name} in {top}",
            why=raw.reason,
            fix="Run it at the top of the checkout, or name that folder with --directory.",
        )
    found = re.search(r"^name:\s*(\S+)\s*$", raw.decode("utf-8", "replace"), re.MULTILINE)
    name = outside.machine.environ.get("COMPOSE_PROJECT_NAME") or (found[1] if found else top.name.lower())
    env_path = None if env_file is None else Path(os.path.abspath(env_file.expanduser()))
    named = "" if folder == Path() else str(folder)
    return Project(name, file, cards, engine, env_path, named)


def variable(outside: Outside, project: Project, name: str) -> str:
    """A variable as compose would have it: the caller's, be it empty, else the ``.env`` file's; empty without both."""
    environ = outside.machine.environ
    if name in environ:
        return environ[name]
    raw = outside.machine.read(project.env_file or project.folder / ".env")
    return "" if isinstance(raw, Unknown) else parse_env(raw, environ=environ).values.get(name, "")
