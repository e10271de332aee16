# SPDX-License-Identifier: Apache-2.0
"""What lies on each card under a role map, and whether it fits there. Imports no torch.

Weights are counted as the host places them (``hosting.Hosting.resident_on``). On top comes the widest phase that a card
takes part in, of one clip of 768x448 and 124 frames. Phases are counted whole on each card: cutting tokens between
cards makes them smaller, by how much is unmeasured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_h3_plugin.checkpoint.linears import linear_layers
from vllm_h3_plugin.errors import RecipeError
from vllm_h3_plugin.memory.activations import predict_peak
from vllm_h3_plugin.memory.requests import RequestSize
from vllm_h3_plugin.memory.weights import ModelShapes, predict_resident
from vllm_h3_plugin.placement.hosting import Hosting
from vllm_h3_plugin.quantization.footprint import GIB
from vllm_h3_plugin.quantization.plan import plan
from vllm_h3_plugin.quantization.recipe import Recipe, load_recipe, recipe_names

CARD_GIB = 64.0
"""Memory of the cards that the published role maps are for."""

USUAL_CLIP = RequestSize(768, 448, 124)

_WEIGHTS = {
    "dit": ("dit", "refiner", "adaln", "transformer_ref"),
    "text_encoder": ("text_encoder", "vision"),
    "video_vae": ("video_vae", "vaes"),
    "audio_vae": ("audio_vae",),
}
_PHASES = {"dit": ("denoise",), "text_encoder": ("text",), "video_vae": ("decode", "references"), "audio_vae": ()}


@dataclass(frozen=True)
class Load:
    """One card.

    Attributes:
        parts: part -> bytes of its weights there.
        stages: whether stages take turns once all are loaded.
        phase: the widest phase that the card takes part in, and its bytes.
    """

    card: int
    parts: dict[str, int]
    phase: tuple[str, int]
    stages: bool = False

    @property
    def nbytes(self) -> int:
        """Weights and the widest phase. Stages that take turns need all weights at the load, and then the widest."""
        weights = sum(self.parts.values())
        if not self.stages:
            return weights + self.phase[1]
        vaes = sum(nbytes for part, nbytes in self.parts.items() if part.endswith("vae"))
        return max(weights, max(vaes, *self.parts.values(), 0) + self.phase[1])

    def __str__(self) -> str:
        parts = " + ".join(f"{part} {nbytes / GIB:.1f}" for part, nbytes in self.parts.items())
        name, nbytes = self.phase
        return f"card {self.card}: {self.nbytes / GIB:.1f} GiB ({parts} + {name} {nbytes / GIB:.1f})"


def loads(
    placed: Hosting, cards: int, shapes: ModelShapes, recipe: Recipe, *, stages: bool = False
) -> tuple[Load, ...]:
    """Predicted bytes of each card; ``stages``: those of the stage that runs, once all were loaded."""
    given = plan(recipe, linear_layers(shapes.dit, shapes.text))
    whole = predict_resident(shapes, given).parts
    cut = predict_resident(shapes, given, tp=placed.text_encoder_tp).parts
    peak = predict_peak(shapes, USUAL_CLIP, quantized=bool(given.quantized))
    phases = {phase.name: phase.device_bytes for phase in peak.phases}
    result = []
    for card in range(cards):
        parts, widest = {}, ("nothing", 0)
        for part in placed.resident_on(card):
            source = cut if part == "text_encoder" else whole
            parts[part] = sum(source.get(name, 0) for name in _WEIGHTS[part])
            for name, nbytes in phases.items():
                if name.startswith(_PHASES[part]) and nbytes > widest[1]:
                    widest = (name, nbytes)
        result.append(Load(card, {part: size for part, size in parts.items() if size}, widest, stages))
    return tuple(result)


def check_fit(
    placed: Hosting, cards: int, shapes: ModelShapes, recipe: Recipe, card_gib: float, *, stages: bool = False
) -> tuple[Load, ...]:
    """Refuse what does not fit, with the numbers and the recipe that would.

    Args:
        card_gib: memory of one card in GiB.

    Raises:
        RecipeError: a card would hold more than it has.
    """
    found = loads(placed, cards, shapes, recipe, stages=stages)
    over = [load for load in found if load.nbytes > card_gib * GIB]
    if not over:
        return found
    fitting = next(
        (
            other
            for other in _others(recipe)
            if all(load.nbytes <= card_gib * GIB for load in loads(placed, cards, shapes, other, stages=stages))
        ),
        None,
    )
    turns = not stages and all(
        load.nbytes <= card_gib * GIB for load in loads(placed, cards, shapes, recipe, stages=True)
    )
    fix = (
        f"Recipe {fitting.name} fits: {fitting.description}"
        if fitting
        else "No recipe of this kind fits: use more cards (role maps two-resident, four) or cards with more memory."
    )
    if turns:
        fix += " Stages that take turns fit too: --resident stage."
    raise RecipeError(
        f"recipe {recipe.name} does not fit on {', '.join(f'card {load.card}' for load in over)} of {card_gib:g} GiB",
        why="; ".join(map(str, over)),
        fix=fix,
        cards={str(load.card): load.nbytes for load in found},
    )


def _others(recipe: Recipe) -> Iterable[Recipe]:
    """Packaged recipes for the same accelerator, by name: of ``int8`` and ``int8-text`` the first is the closer one."""
    for name in recipe_names():
        other = load_recipe(name)
        if name != recipe.name and other.method is not None and other.method == (recipe.method or "int8"):
            yield other
