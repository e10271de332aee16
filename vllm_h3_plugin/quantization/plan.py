# SPDX-License-Identifier: Apache-2.0
"""A recipe applied to a model: one precision and one rule for every linear layer. Imports no torch.

A plan depends on module paths alone, so that it is the same on every rank and at every tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm_h3_plugin.checkpoint.layout import FP32_LAYERS, LinearSpec
from vllm_h3_plugin.errors import RecipeError
from vllm_h3_plugin.quantization.precision import Precision
from vllm_h3_plugin.quantization.recipe import Recipe, Rule

_FP32_PATHS = frozenset(f"transformer.{name}" for name in FP32_LAYERS)
ADALN_SUFFIX = ".adaln_proj.linear"
"""End of every AdaLN layer's path."""
VISION = "text_encoder.vision."
"""Begin of the path of every layer of the vision tower."""


@dataclass(frozen=True)
class Assignment:
    """What one linear layer gets, and the rule that gave it."""

    precision: Precision
    rule: Rule


@dataclass(frozen=True)
class PrecisionPlan:
    """Precision of every linear layer of a model.

    Attributes:
        recipe: where it comes from.
        assignments: module path -> assignment, in module order.
    """

    recipe: Recipe
    assignments: Mapping[str, Assignment]

    def __getitem__(self, path: str) -> Assignment:
        """The assignment of one path.

        Raises:
            RecipeError: the plan was made for a model without this layer.
        """
        try:
            return self.assignments[path]
        except KeyError:
            raise RecipeError(
                f"linear layer {path} is not in the precision plan of recipe {self.recipe.name}",
                why="the plan was made from checkpoint configs that have no such layer",
                fix="Check the checkpoint with `vllm-h3 inspect` and the recipe with `vllm-h3 recipe show`.",
                path=path,
            ) from None

    @property
    def quantized(self) -> tuple[str, ...]:
        """Paths that a quantization backend computes."""
        return tuple(path for path, given in self.assignments.items() if given.precision.quantized)

    @property
    def vision(self) -> Precision:
        """Of the whole vision tower, its norms and embeddings included."""
        return next(
            (given.precision for path, given in self.assignments.items() if path.startswith(VISION)), Precision.BF16
        )


def plan(recipe: Recipe, linears: Iterable[LinearSpec]) -> PrecisionPlan:
    """Apply a recipe to a model's linear layers.

    Raises:
        RecipeError: a layer that no rule matches; a rule that decides nothing, because it matches nothing or earlier
            rules take all that it matches; or a precision that a layer cannot have (the six FP32 layers are FP32,
            AdaLN BF16, the vision tower BF16 or FP32 as a whole, and nothing else is FP32).
    """
    specs = tuple(linears)
    assignments: dict[str, Assignment] = {}
    unmatched: list[str] = []
    deciding: set[int] = set()
    for spec in specs:
        number = next((i for i, rule in enumerate(recipe.rules) if rule.matches(spec.path)), None)
        if number is None:
            unmatched.append(spec.path)
            continue
        deciding.add(number)
        rule = recipe.rules[number]
        _check_precision(recipe, number, spec)
        assignments[spec.path] = Assignment(rule.precision, rule)
    if unmatched:
        more = f" and {len(unmatched) - 1} more" if len(unmatched) > 1 else ""
        raise RecipeError(
            f"recipe {recipe.source}: no rule matches linear layer {unmatched[0]}{more}",
            why="every linear layer needs a precision",
            fix="Add a rule that matches.",
            unmatched=len(unmatched),
            path=unmatched[0],
        )
    for number in range(len(recipe.rules)):
        if number not in deciding:
            raise _idle_rule(recipe, number, specs)
    _check_vision(recipe, assignments)
    return PrecisionPlan(recipe, assignments)


def required_precision(spec: LinearSpec) -> tuple[Precision, str] | None:
    """The one precision that a layer can have, and why; None where a recipe may choose."""
    if spec.path in _FP32_PATHS:
        return Precision.FP32, "it is one of the six FP32 layers, which the host builds in FP32"
    if spec.path.endswith(ADALN_SUFFIX):
        return Precision.BF16, "AdaLN stays BF16: its output shifts and scales every token of its block"
    return None


def _check_precision(recipe: Recipe, number: int, spec: LinearSpec) -> None:
    rule = recipe.rules[number]
    required = required_precision(spec)
    if spec.part == "vision":
        if not rule.precision.quantized:
            return
        required = Precision.BF16, "the host builds the vision tower from plain layers, which are BF16 or FP32"
    elif required is None and rule.precision is not Precision.FP32:
        return
    if required is not None and rule.precision is required[0]:
        return
    if required is None:
        why, fix = "the host builds this layer in BF16", "Give it bf16 or a quantized precision."
    else:
        why, fix = required[1], f"Give it {required[0].value}, by a rule before this one if need be."
    raise RecipeError(
        f"{_name(recipe, number)} gives {spec.path} {rule.precision.value}", why=why, fix=fix, path=spec.path
    )


def _check_vision(recipe: Recipe, assignments: Mapping[str, Assignment]) -> None:
    given = {path: one for path, one in assignments.items() if path.startswith(VISION)}
    words = sorted({one.precision.value for one in given.values()})
    if len(words) > 1:
        path = next(path for path, one in given.items() if one.precision is Precision.FP32)
        raise RecipeError(
            f"recipe {recipe.source} gives the vision tower {' and '.join(words)}",
            why="its layers hand each other what they computed as it is",
            fix=f"Give {VISION}** one precision, bf16 or fp32.",
            path=path,
        )


def _idle_rule(recipe: Recipe, number: int, specs: tuple[LinearSpec, ...]) -> RecipeError:
    matched = [spec.path for spec in specs if recipe.rules[number].matches(spec.path)]
    if not matched:
        return RecipeError(
            f"{_name(recipe, number)} matches no linear layer",
            why=f"the model has {len(specs)} linear layers and none has such a path",
            fix="`vllm-h3 recipe show --all` lists the paths; correct the pattern or drop the rule.",
        )
    takers = sorted({next(i for i, rule in enumerate(recipe.rules) if rule.matches(path)) for path in matched})
    shadows = " and ".join(f"rule {i + 1} ({recipe.rules[i].match})" for i in takers)
    return RecipeError(
        f"{_name(recipe, number)} decides nothing",
        why=f"the first match wins and all {len(matched)} layers that it matches are taken by {shadows}",
        fix="Move the narrower rule up, or drop it.",
    )


def _name(recipe: Recipe, number: int) -> str:
    return f"recipe {recipe.source}, rule {number + 1} ({recipe.rules[number].match})"
