# SPDX-License-Identifier: Apache-2.0
"""A profile's cards: how its role map is run, whether as many are visible and compute its recipe, what fits on each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_h3_plugin.errors import SettingsError
from vllm_h3_plugin.placement.hosting import Hosting, hosting
from vllm_h3_plugin.placement.roles import ALL, RoleMap, role_map
from vllm_h3_plugin.placement.visible import check_count, visible_cards
from vllm_h3_plugin.serving.profile import Profile

if TYPE_CHECKING:
    from vllm_h3_plugin.checkpoint.inventory import Inventory


def placement_of(profile: Profile) -> Hosting | None:
    """How the profile's role map is run; None on one card without a map.

    Raises:
        SettingsError: the map is wrong, or neither host nor plugin can run it.
    """
    roles = _roles_of(profile)
    return None if roles is None else hosting(roles)


def _roles_of(profile: Profile) -> RoleMap | None:
    """Several cards without a map share all that can be cut: the host would have each make every clip on its own."""
    if profile.roles is not None:
        return role_map(profile.roles, profile.devices)
    return role_map(ALL, profile.devices) if profile.devices > 1 else None


def check_cards(profile: Profile, name: str, environ: Mapping[str, str], host: str) -> None:
    """Hold a profile's cards against those that are visible. Reads no file.

    One CUDA device without roles may be one of several: the host takes the first. Everywhere else configured and
    visible must be equal. On the reference platform ranks share the CPU and nothing is counted.

    Args:
        name: the profile's, for messages.
        host: name of the installed host in ``launch/image.lock``.

    Raises:
        SettingsError: a wrong map, another number of cards than are visible (names both and the variable), or Ascend
            cards under the other host.
    """
    placed = placement_of(profile)
    if placed and placed.elsewhere and host != "ascend":
        parts = " and ".join(placed.elsewhere)
        raise SettingsError(
            f"profile {name}: {parts} beside the DiT's card",
            why="only in the ascend host can the plugin show a process more cards than it has ranks",
            fix="Put every part on the DiT's cards, or use the ascend host.",
        )
    if profile.reference:
        return
    visible = visible_cards(profile.accelerator, environ)
    one_of_several = profile.accelerator == "cuda" and profile.devices == 1 and placed is None
    if one_of_several and visible.present == 0 and "CUDA_VISIBLE_DEVICES" not in environ:
        return  # Devices without nodes, as under WSL: the host counts them itself.
    if profile.executor == "ray":
        # Each node has one; the executor counts the nodes, and Ray shows each rank its own card.
        check_count(name or profile.description, 1, visible, exactly=False)
    else:
        check_count(name or profile.description, profile.devices, visible, exactly=not one_of_several)
    if profile.accelerator == "npu" and host != "ascend":
        raise SettingsError(
            f"profile {name or profile.description} is for Ascend cards and the {host} host is installed",
            why="the two hosts are pinned to different versions, and the image for Ascend has the ascend one",
            fix="Start it in that image, or in the environment that `HOST=ascend make setup` makes.",
        )


def check_method_of(profile: Profile, name: str) -> None:
    """Refuse an INT8 recipe on CUDA and an FP8 recipe on Ascend before a server imports anything.

    Raises:
        BackendError: with the recipe that there is in its place.
        RecipeError: the profile's recipe cannot be read.
    """
    from vllm_h3_plugin.quantization.contract import check_method
    from vllm_h3_plugin.quantization.recipe import load_recipe

    method = load_recipe(profile.recipe).method
    if method is not None and not profile.reference:
        # Profiles of a family are for one chip.
        capability = {"spark": 121, "h200": 90}.get(name.partition("-")[0])
        check_method(method, profile.accelerator, capability)


def check_room_on_cards(profile: Profile, inventory: Inventory) -> list[str]:
    """Hold the role map against the model: heads, and bytes on each card.

    Returns:
        Sentences for people: how the host departs from the map, and what lies on each card. None on one card without
        a map; no bytes where several cards have none, whose ``card_gib`` nobody has set.

    Raises:
        SettingsError: heads that do not divide.
        RecipeError: a card would hold more than it has; with the numbers and the recipe that would fit.
    """
    roles = _roles_of(profile)
    if roles is None:
        return []
    from vllm_h3_plugin.memory.weights import shapes_of
    from vllm_h3_plugin.placement.fit import check_fit
    from vllm_h3_plugin.quantization.recipe import load_recipe

    shapes, placed = shapes_of(inventory), hosting(roles)
    roles.check_shapes(shapes.dit, shapes.text)
    recipe, stages = load_recipe(profile.recipe), profile.resident == "stage"
    found = check_fit(placed, roles.cards, shapes, recipe, profile.card_gib, stages=stages) if profile.roles else []
    lines = [*(f"role map {roles.name}: {departure}" for departure in placed.departures), *map(str, found)]
    # Where each card is on a node of its own, a card's number is the node's.
    return [re.sub(r"\bcard(s?)\b", r"node\1", line) for line in lines] if profile.executor == "ray" else lines
