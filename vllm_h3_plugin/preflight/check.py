# SPDX-License-Identifier: Apache-2.0
"""What a check says, and what an answer is that could not be had."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Outcome of a check. Only ``FAIL`` stops what follows."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Unknown:
    """An answer that the machine did not give, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table.

    Attributes:
        name: what was looked at.
        detail: what was found, with numbers; never a value of a secret.
        remedy: what to do, a command where there is one; empty only where the check passed.
    """

    name: str
    state: State
    detail: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """The check as a JSON object."""
        return {"name": self.name, "state": self.state.value, "detail": self.detail, "remedy": self.remedy}


def passed(name: str, detail: str) -> Check:
    """All is well."""
    return Check(name, State.PASS, detail)


def warned(name: str, detail: str, remedy: str) -> Check:
    """It may work; somebody should know."""
    return Check(name, State.WARN, detail, remedy)


def failed(name: str, detail: str, remedy: str) -> Check:
    """It will not work."""
    return Check(name, State.FAIL, detail, remedy)


def is_number(text: str) -> bool:
    """Whether a text is a whole number in ASCII digits; ``isdigit`` also takes digits that ``int`` does not."""
    return text.isascii() and text.isdigit()
