# SPDX-License-Identifier: Apache-2.0
"""Role maps: on which cards each part of the model is. Pure."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_h3_plugin.checkpoint.configs import DitConfig, TextEncoderConfig
from vllm_h3_plugin.errors import SettingsError

PARTS = ("dit", "text_encoder", "video_vae", "audio_vae")
"""Every part that has a place. A second DiT (both partitions served) is where the first is."""

TEXT_ENCODER_SIZES = (1, 2, 4, 8)
"""Tensor-parallel sizes of the text encoder: divisors of its 8 key/value heads (pipeline_minimax_h3.py)."""


@dataclass(frozen=True)
class RoleMap:
    """Which cards each part is on.

    Attributes:
        name: for messages.
        cards: how many cards there are; they are numbered from 0.
        dit: cards that share a step: tokens are cut between them, weights are whole on each.
        text_encoder: cards that share its tensors.
        video_vae: the first keeps it, all decode tiles.
        audio_vae: one card.

    Raises:
        SettingsError: see :meth:`of`.
    """

    name: str
    cards: int
    dit: tuple[int, ...]
    text_encoder: tuple[int, ...]
    video_vae: tuple[int, ...]
    audio_vae: tuple[int, ...]

    @classmethod
    def of(cls, name: str, cards: int, places: Mapping[str, Sequence[int]]) -> RoleMap:
        """A map written by hand, checked.

        Raises:
            SettingsError: a part that is left out or unknown, a card that is not there, listed twice or left without a
                part; names map, part and card.
        """
        for part in places:
            if part not in PARTS:
                near = difflib.get_close_matches(part, PARTS, n=1)
                fix = f"Did you mean {near[0]}?" if near else f"Parts: {', '.join(PARTS)}."
                raise SettingsError(f"role map {name}: unknown part {part}", fix=fix)
        for part in PARTS:
            _check_part(name, cards, part, tuple(places.get(part, ())))
        idle = sorted(set(range(cards)) - {card for part in PARTS for card in places[part]})
        if idle:
            raise SettingsError(
                f"role map {name}: nothing is on card {', '.join(map(str, idle))}",
                why=f"{cards} cards are configured",
                fix=f"Give it a part, or configure {cards - len(idle)} cards (`devices`).",
            )
        return cls(name, cards, *(tuple(places[part]) for part in PARTS))

    def on(self, card: int) -> tuple[str, ...]:
        """Parts that the map puts on a card."""
        return tuple(part for part in PARTS if card in self.places[part])

    @property
    def places(self) -> dict[str, tuple[int, ...]]:
        """Part -> cards."""
        return {part: getattr(self, part) for part in PARTS}

    def check_shapes(self, dit: DitConfig, text: TextEncoderConfig) -> None:
        """Hold the map against a model.

        Raises:
            SettingsError: attention heads that do not divide between the cards of a part.
        """
        if dit.num_attention_heads % len(self.dit):
            raise SettingsError(
                f"role map {self.name}: the DiT is on {len(self.dit)} cards",
                why=f"they do not divide its {dit.num_attention_heads} attention heads (Ulysses gives each card some)",
                fix=f"Use one of {_divisors(dit.num_attention_heads, 8)} cards for it.",
            )
        size = len(self.text_encoder)
        counts = {"attention": text.num_attention_heads, "key/value": text.num_key_value_heads}
        odd = [f"{count} {kind} heads" for kind, count in counts.items() if count % size]
        if size not in TEXT_ENCODER_SIZES or odd:
            raise SettingsError(
                f"role map {self.name}: the text encoder is on {size} cards",
                why=f"they do not divide its {' and '.join(odd)}" if odd else "its tensors are cut in 1, 2, 4 or 8",
                fix=f"Use one of {_divisors(math.gcd(*counts.values(), 8), 8)} cards for it.",
            )


def _check_part(name: str, cards: int, part: str, places: tuple[int, ...]) -> None:
    if not places:
        raise SettingsError(
            f"role map {name} leaves {part} out",
            why="every part has to be somewhere",
            fix=f"Add `{part} = [CARD]`; cards are 0 to {cards - 1}.",
        )
    for card in places:
        if not 0 <= card < cards:
            raise SettingsError(
                f"role map {name}: {part} is on card {card}",
                why=f"{cards} cards are configured, 0 to {cards - 1}",
                fix="Correct the number, or configure more cards (`devices`).",
            )
        if places.count(card) > 1:
            raise SettingsError(
                f"role map {name}: {part} lists card {card} twice", fix="Name each card once; a part is once on a card."
            )
    if part == "audio_vae" and len(places) > 1:
        raise SettingsError(f"role map {name}: audio_vae is on {len(places)} cards", fix="Give it one card.")
    if part == "video_vae" and len(places) not in (1, cards):
        raise SettingsError(
            f"role map {name}: video_vae is on {len(places)} of {cards} cards",
            why="its tiles are decoded by one card or by all of them",
            fix=f"Give it one card, or all {cards}.",
        )


def _divisors(number: int, most: int) -> str:
    return ", ".join(str(count) for count in range(1, most + 1) if number % count == 0)


def _published(name: str, cards: int, dit: str, text: str, video: str, audio: str) -> RoleMap:
    places = dict(zip(PARTS, (dit, text, video, audio), strict=True))
    return RoleMap.of(name, cards, {part: tuple(map(int, numbers)) for part, numbers in places.items()})


ROLE_MAPS: dict[str, RoleMap] = {
    made.name: made
    for made in (
        _published("one", 1, "0", "0", "0", "0"),
        # Comfy-NPU's two cards.
        _published("two", 2, "0", "0", "0", "1"),
        # Dual-card residency: everything stays where it is between prompts.
        _published("two-resident", 2, "0", "1", "0", "0"),
        # Tokens are cut, weights are not; the text encoder is cut; the video VAE's tiles are decoded on all.
        _published("four", 4, "0123", "0123", "0123", "3"),
    )
}
"""The maps that are published for Ascend, by name."""


ALL = "all"
"""The map for any number of cards, as ``four`` is for four: what can be cut is cut between all."""


def role_map(roles: str | Mapping[str, Sequence[int]], cards: int) -> RoleMap:
    """The map that a profile names or writes out.

    Args:
        roles: a name of :data:`ROLE_MAPS`, :data:`ALL`, or part -> cards.
        cards: the profile's ``devices``.

    Raises:
        SettingsError: unknown name, a map for another number of cards, or one that is wrong (:meth:`RoleMap.of`).
    """
    if not isinstance(roles, str):
        return RoleMap.of("of the profile", cards, roles)
    if roles == ALL:
        every = tuple(range(cards))
        return RoleMap(ALL, cards, every, every, every, (cards - 1,))
    found = ROLE_MAPS.get(roles)
    if found is None:
        near = difflib.get_close_matches(roles, (*ROLE_MAPS, ALL), n=1)
        guess = f"Did you mean {near[0]}? " if near else ""
        raise SettingsError(
            f"unknown role map {roles!r}",
            fix=f"{guess}Known: {', '.join((*ROLE_MAPS, ALL))}; or write one out under [roles].",
        )
    if found.cards != cards:
        fitting = [name for name, other in ROLE_MAPS.items() if other.cards == cards]
        more = f", or use role map {' or '.join(fitting)}" if fitting else ""
        raise SettingsError(
            f"role map {roles} is for {found.cards} cards and the profile configures {cards}",
            fix=f"Set devices = {found.cards}{more}.",
        )
    return found
