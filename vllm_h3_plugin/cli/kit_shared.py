# SPDX-License-Identifier: Apache-2.0
"""What `up`, `status`, `logs` and `down` have in common: which project is meant, and a line that shows what goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_h3_plugin.kit.outside import Outside
    from vllm_h3_plugin.kit.project import Project

Cards = Annotated[
    int | None,
    typer.Option(
        "--cards", help="Role of an Ascend machine: 1, 2 or 4 cards.", show_default="the Spark's compose.yaml"
    ),
]
Engine = Annotated[str, typer.Option("--engine", metavar="PROGRAM", help="Container engine with `PROGRAM compose`.")]
Directory = Annotated[
    Path,
    typer.Option("--directory", "-C", help="Top of the checkout, with compose.yaml and .env.", show_default="here"),
]
AsJson = Annotated[bool, typer.Option("--json", help="End with one JSON line on stdout.")]
HERE = Path()


def this_outside() -> Outside:
    """The world that is asked and changed; tests put another one here."""
    from vllm_h3_plugin.kit.outside import LocalOutside

    return LocalOutside()


def find_project(outside: Outside, directory: Path, cards: int | None, engine: str) -> Project:
    """The project that verbs other than `up` mean: without --cards, the Ascend role that has containers, if one has.

    Raises:
        UsageError: there is no compose file.
        ToolMissingError: the engine does not answer.
    """
    from vllm_h3_plugin.errors import UsageError
    from vllm_h3_plugin.kit.containers import list_containers
    from vllm_h3_plugin.kit.project import open_project

    project = open_project(outside, directory, cards=cards, engine=engine)
    if cards is not None or list_containers(outside, project):
        return project
    try:
        ascend = open_project(outside, directory, cards=1, engine=engine)
    except UsageError:
        return project
    for one in list_containers(outside, ascend):
        role = one.service.rpartition("-")[2]
        if role.isdigit() and one.serves:
            return open_project(outside, directory, cards=int(role), engine=engine)
    return project


class Line:
    """What goes on now: one line that changes on a terminal, and a line for each change of subject elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("") if console.is_terminal else None
        self._subject = ""

    def show(self, subject: str, detail: str = "", after: str = "") -> None:
        """
        Args:
            subject: printed again, off a terminal, only when it changes.
            detail: how far it is.
            after: time that went by, for a terminal.
        """
        from rich.text import Text

        text = f"{subject}: {detail}" if detail else subject
        if self._status is not None:
            self._status.update(Text(f"{text}{after}"))
        elif subject != self._subject:
            self._console.print(text, markup=False)
        self._subject = subject

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False)

    @contextmanager
    def shown(self) -> Iterator[Line]:
        """While it is shown."""
        if self._status is None:
            yield self
            return
        with self._status:
            yield self
