# SPDX-License-Identifier: Apache-2.0
"""Show the server's one rank the cards that its other parts are built on.

Why: for a model without a deploy file vLLM-Omni 0.28.0 makes one stage whose ``devices`` are as many as it has ranks
(``engine/async_omni_engine.py:1096``), and hides all other cards from the process (``entrypoints/stage_utils.py:94``).
``--stage-overrides`` does not reach that stage.
Scope: only where ``H3_PARTS_ON`` names a card, and only in that host. Idempotent.
Fragility: the name and the place of ``devices`` in what it returns; checked, and refused if they differ.
Removal: with the 0.28.0 host.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from vllm_h3_plugin.errors import HostError
from vllm_h3_plugin.settings import Settings

_MARK = "_h3_shows_cards"


def show_cards(settings: Settings) -> None:
    """Add the cards of ``H3_PARTS_ON`` to the devices of the host's default stage.

    Raises:
        HostError: the host has no such stage to change.
        SettingsError: ``H3_PARTS_ON`` is malformed.
    """
    from vllm_h3_plugin.host.placed_parts import parse_parts_on

    cards = parse_parts_on(settings.parts_on).values()
    if not cards:
        return
    from vllm_omni.engine.async_omni_engine import AsyncOmniEngine

    original = getattr(AsyncOmniEngine, "_create_default_diffusion_stage_cfg", None)
    if original is None:
        raise HostError(
            f"H3_PARTS_ON={settings.parts_on} in a host that does not make its stage where 0.28.0 does",
            why="its other cards would stay hidden from the process",
            fix="Put every part on the DiT's cards, or use the ascend host.",
        )
    if getattr(original, _MARK, False):
        return

    @wraps(original)
    def with_cards(kwargs: dict[str, Any]) -> list:
        stages = original(kwargs)
        runtime = stages[0]["runtime"]
        own = [int(number) for number in str(runtime["devices"]).split(",")]
        runtime["devices"] = ",".join(str(number) for number in sorted({*own, *cards}))
        return stages

    setattr(with_cards, _MARK, True)
    AsyncOmniEngine._create_default_diffusion_stage_cfg = staticmethod(with_cards)
