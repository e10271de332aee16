# SPDX-License-Identifier: Apache-2.0
"""A role map as the host can run it: its options, what the plugin adds, and where both depart from the map.

What vLLM-Omni 0.28.0 does (``diffusion/models/minimax_h3/pipeline_minimax_h3.py``, ``diffusion/data.py``): every rank
runs the DiT, on the first cards in order; the text encoder is cut between the first ranks; both VAEs are built on every
rank, and tiles of the video VAE are decoded by one rank or by all. No part can be on a card that does not run the DiT.

What the plugin adds (``host/placed_parts.py``): where one card runs the DiT, it builds the text encoder or the audio
VAE on another card of the same process. The host moves the text encoder's result to the DiT's card by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_h3_plugin.errors import SettingsError
from vllm_h3_plugin.placement.roles import RoleMap

MOVABLE = ("text_encoder", "audio_vae")
"""Parts that the plugin can build on another card of the process."""


@dataclass(frozen=True)
class Hosting:
    """How a role map is run.

    Attributes:
        ranks: worker processes, one a card that runs the DiT.
        ulysses: cards that a step's tokens are cut between.
        text_encoder_tp: cards that the text encoder is cut between.
        vae_tiles: cards that decode the video VAE's tiles.
        elsewhere: part -> card, for parts that are built beside the DiT's card.
        departures: sentences about what differs from the map.
    """

    ranks: int
    ulysses: int
    text_encoder_tp: int
    vae_tiles: int
    elsewhere: Mapping[str, int]
    departures: tuple[str, ...]

    def options(self) -> tuple[str, ...]:
        """Arguments of ``vllm serve --omni``. Without ``--usp`` more ranks would be copies that share requests."""
        words: list[str] = []
        if self.ranks > 1:
            words += ["--usp", str(self.ulysses)]
        if self.text_encoder_tp > 1:
            words += ["--text-encoder-tp-size", str(self.text_encoder_tp)]
        if self.vae_tiles > 1:
            words += ["--vae-patch-parallel-size", str(self.vae_tiles)]
        return tuple(words)

    def resident_on(self, card: int) -> tuple[str, ...]:
        """Parts whose weights lie on a card, as run and not as mapped."""
        if card >= self.ranks:
            return tuple(part for part, place in self.elsewhere.items() if place == card)
        here = ["dit"]
        if card < self.text_encoder_tp and "text_encoder" not in self.elsewhere:
            here.append("text_encoder")
        here.append("video_vae")
        if "audio_vae" not in self.elsewhere:
            here.append("audio_vae")
        return tuple(here)


def hosting(roles: RoleMap) -> Hosting:
    """How the host and the plugin run a map.

    Raises:
        SettingsError: neither can; names the part and what can be done.
    """
    ranks = len(roles.dit)
    if roles.dit != tuple(range(ranks)):
        raise _refused(
            roles,
            f"the DiT is on cards {_list(roles.dit)}",
            "the host numbers its ranks from the first visible card on",
            f"Put it on cards {_list(range(ranks))}.",
        )
    return _one_rank(roles) if ranks == 1 else _many_ranks(roles, ranks)


def _one_rank(roles: RoleMap) -> Hosting:
    elsewhere = {}
    for part, places in roles.places.items():
        if len(places) > 1:
            raise _refused(
                roles,
                f"{part} is on cards {_list(places)} and the DiT on card 0 alone",
                "the host cuts a part only between cards that run the DiT",
                f"Give {part} one card, or the DiT all of them.",
            )
        if places[0] == 0:
            continue
        if part not in MOVABLE:
            raise _refused(
                roles,
                f"{part} is on card {places[0]} and the DiT on card 0",
                f"only {' and '.join(MOVABLE)} can be built on another card",
                f"Put {part} on card 0.",
            )
        elsewhere[part] = places[0]
    return Hosting(1, 1, 1, 1, elsewhere, ())


def _many_ranks(roles: RoleMap, ranks: int) -> Hosting:
    if ranks != roles.cards:
        raise _refused(
            roles,
            f"the DiT is on {ranks} of {roles.cards} cards",
            "where more than one card runs the DiT, all do: a worker process without it does not exist in the host",
            f"Put the DiT on all {roles.cards} cards, or on card 0 alone.",
        )
    if roles.text_encoder != tuple(range(len(roles.text_encoder))):
        raise _refused(
            roles,
            f"the text encoder is on cards {_list(roles.text_encoder)}",
            "the host cuts it between the first cards",
            f"Put it on card 0 alone, or on all {ranks} cards.",
        )
    if len(roles.text_encoder) not in (1, ranks):
        raise _refused(
            roles,
            f"the text encoder is on {len(roles.text_encoder)} of {ranks} cards",
            "the host makes one group for it, of one rank or of all: its start fails on the ranks that are left out",
            f"Put it on card 0 alone, or on all {ranks} cards.",
        )
    departures = []
    if len(roles.video_vae) == 1:
        departures.append(f"the host keeps the video VAE on all {ranks} cards, and each decodes the whole clip")
    else:
        departures.append(f"the host keeps the video VAE on all {ranks} cards, not on card {roles.video_vae[0]} alone")
    departures.append(
        f"the host keeps the audio VAE on all {ranks} cards and decodes sound on each; the map has it on card "
        f"{roles.audio_vae[0]} alone"
    )
    return Hosting(ranks, ranks, len(roles.text_encoder), len(roles.video_vae), {}, tuple(departures))


def _refused(roles: RoleMap, what: str, why: str, fix: str) -> SettingsError:
    return SettingsError(f"role map {roles.name} cannot be run: {what}", why=why, fix=fix)


def _list(cards: range | tuple[int, ...]) -> str:
    return ", ".join(map(str, cards))
