# SPDX-License-Identifier: Apache-2.0
"""Which cards a process of this environment sees, from variables and device nodes. Reads no other file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vllm_h3_plugin.errors import SettingsError

Accelerator = Literal["cuda", "npu"]

_VARIABLE: dict[Accelerator, str] = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
_NODE: dict[Accelerator, re.Pattern[str]] = {"cuda": re.compile(r"nvidia(\d+)"), "npu": re.compile(r"davinci(\d+)")}
_NODES = {"cuda": "/dev/nvidiaN", "npu": "/dev/davinciN"}

_NUMBER = re.compile(r"0|[1-9][0-9]*")
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")


@dataclass(frozen=True)
class Visible:
    """What is seen.

    Attributes:
        cards: the visible cards: numbers as the runtime counts them, or CUDA's UUIDs.
        said_by: the variable with its value, or the device nodes.
        present: device nodes that there are.
    """

    accelerator: Accelerator
    cards: tuple[str, ...]
    said_by: str
    present: int

    @property
    def count(self) -> int:
        return len(self.cards)


def device_nodes(folder: Path = Path("/dev")) -> list[str]:
    """Names in ``/dev``."""
    return os.listdir(folder)


def visible_cards(accelerator: Accelerator, environ: Mapping[str, str], nodes: Iterable[str] | None = None) -> Visible:
    """The cards that a server of this environment sees.

    Args:
        nodes: names in ``/dev``; None: looked up.

    Raises:
        SettingsError: the variable lists a card twice, one that has no device node, or what is no card; names variable
            and word.
    """
    variable, pattern = _VARIABLE[accelerator], _NODE[accelerator]
    matches = (pattern.fullmatch(name) for name in (device_nodes() if nodes is None else nodes))
    present = sum(match is not None for match in matches)
    if variable not in environ:
        said_by = f"{present} of {_NODES[accelerator]} and no {variable}"
        return Visible(accelerator, tuple(map(str, range(present))), said_by, present)
    value = environ[variable]
    cards = [word.strip() for word in value.split(",") if word.strip()]
    if cards == ["-1"]:
        # What people write to hide all cards.
        return Visible(accelerator, (), f"{variable}={value}", present)
    for card in cards:
        if not _NUMBER.fullmatch(card) and not (accelerator == "cuda" and _UUID.fullmatch(card)):
            # CUDA ends its list at such a word without a word; counted, it would stand for a card that nobody sees.
            raise SettingsError(
                f"{variable}={value} names {card!r}",
                why=f"a card is a number{' or a UUID' if accelerator == 'cuda' else ''}; they are separated by commas",
                fix=f"Name cards that are there, for example {variable}=0,1.",
            )
        if cards.count(card) > 1:
            raise SettingsError(
                f"{variable}={value} lists card {card} twice",
                why="two ranks on one card would each hold a copy of the model",
                fix="Name each card once.",
            )
        # Both runtimes count what the process can open: in a container that was given davinci3 alone, it is card 0.
        if _NUMBER.fullmatch(card) and int(card) >= present and (present or accelerator == "npu"):
            there = f"{present} of {_NODES[accelerator]}, counted from 0" if present else f"no {_NODES[accelerator]}"
            raise SettingsError(
                f"{variable}={value} names card {card}", why=f"there are {there}", fix="Name cards that are there."
            )
    return Visible(accelerator, tuple(cards), f"{variable}={value}", present)


def check_count(profile: str, configured: int, visible: Visible, *, exactly: bool = True) -> None:
    """Refuse a profile for another number of cards than are visible.

    Args:
        profile: its name, for the message.
        configured: its ``devices``.
        exactly: whether more cards than configured are a fault too. Else the first are taken.

    Raises:
        SettingsError: names both numbers and the variable.
    """
    if visible.count == configured or (visible.count > configured and not exactly):
        return
    variable, nodes = _VARIABLE[visible.accelerator], _NODES[visible.accelerator]
    other = f", or choose a profile for {visible.count}" if visible.count else ""
    if visible.present >= configured:
        first = ",".join(str(number) for number in range(configured))
        fix = f"Set {variable} to {configured} of them, for example {variable}={first}{other}."
    else:
        fix = f"Make them visible to this process ({nodes}, {variable}){other}."
    raise SettingsError(
        f"{configured} {'card is' if configured == 1 else 'cards are'} configured in profile {profile} and "
        f"{visible.count} {'is' if visible.count == 1 else 'are'} visible",
        why=visible.said_by,
        fix=fix,
        configured=configured,
        visible=visible.count,
    )
