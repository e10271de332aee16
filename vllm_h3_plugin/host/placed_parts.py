# SPDX-License-Identifier: Apache-2.0
"""Parts on another card of the same process: the text encoder or the audio VAE beside the DiT's card.

Why: vLLM-Omni 0.28.0 builds every part on its rank's device. Two cards that hold everything resident (role maps ``two``
and ``two-resident``) need one part on the second card while one rank runs the DiT on the first.
How: while the pipeline is built, the host's classes for these parts are replaced by subclasses under their own names
that are constructed on the other card. The host moves the text encoder's result to the DiT's device itself
(``_broadcast_tensor``, pipeline_minimax_h3.py:602); the audio VAE is given its latents on its own.
Scope: only parts that ``H3_PARTS_ON`` names. Run on no card yet.
Removal: when the host takes a device for each component.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.logger import init_logger
from vllm_omni.diffusion.models.minimax_h3 import pipeline_minimax_h3 as host_pipeline

from vllm_h3_plugin.errors import SettingsError
from vllm_h3_plugin.placement.hosting import MOVABLE
from vllm_h3_plugin.settings import Settings

logger = init_logger(__name__)

_CLASSES = {"text_encoder": "MiniMaxH3Qwen3VLEncoder", "audio_vae": "MiniMaxH3AudioVAE"}


def parse_parts_on(text: str | None) -> dict[str, int]:
    """``text_encoder=1,audio_vae=1`` as part -> card.

    Raises:
        SettingsError: a part that cannot be moved, or no card number.
    """
    placed: dict[str, int] = {}
    for word in filter(None, (text or "").split(",")):
        part, _, card = word.strip().partition("=")
        if part not in MOVABLE or not card.isdigit() or part in placed:
            raise SettingsError(
                f"H3_PARTS_ON={text!r}",
                why=f"{word.strip()!r} is not one of {', '.join(f'{name}=CARD' for name in MOVABLE)}, each once",
                fix="Leave it to `vllm-h3 serve`, which sets it from the profile's role map.",
            )
        placed[part] = int(card)
    return placed


def card_device(card: int, own: torch.device) -> torch.device:
    """A card of the kind that this rank computes on. The CPU is one device under any number."""
    return own if own.type == "cpu" else torch.device(own.type, card)


@contextmanager
def parts_on_cards(settings: Settings, own: torch.device) -> Iterator[Mapping[str, torch.device]]:
    """Build the named parts on their cards while this is active; yields part -> device.

    Args:
        own: device of this rank.

    Raises:
        SettingsError: see :func:`parse_parts_on`.
    """
    devices = {part: card_device(card, own) for part, card in parse_parts_on(settings.parts_on).items()}
    originals = {part: getattr(host_pipeline, _CLASSES[part]) for part in devices}
    for part, device in devices.items():
        logger.info("H3 %s: built on %s, the DiT on %s", part, device, own)
        setattr(host_pipeline, _CLASSES[part], on_device(originals[part], device))
    try:
        yield devices
    finally:
        for part, original in originals.items():
            setattr(host_pipeline, _CLASSES[part], original)


def on_device(part: type, device: torch.device) -> type:
    """A subclass of a host's part, under its name, that is built and computes on ``device``."""

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("load_device") is not None:
            kwargs["load_device"] = device
        with device:
            part.__init__(self, *args, **{**kwargs, "device": device})  # type: ignore[misc]

    names: dict[str, Any] = {"__init__": construct, "__module__": part.__module__, "__qualname__": part.__qualname__}
    decode = getattr(part, "decode_latent", None)
    if decode is not None:
        names["decode_latent"] = lambda self, latent: decode(self, latent.to(device))
    return type(part.__name__, (part,), names)
