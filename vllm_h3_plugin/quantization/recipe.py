# SPDX-License-Identifier: Apache-2.0
"""Precision recipes: JSON files that give every linear layer a precision by its module path. Imports no torch.

A recipe is an ordered list of rules; the first whose glob matches a path decides. In a glob ``*`` stands for any part
of one segment, ``**`` alone for any number of segments, none included::

    transformer.**.adaln_proj.linear     blocks.3.adaln_proj.linear and final_layer.adaln_proj.linear of the DiT
    transformer.*_patch_proj             video_patch_proj and audio_patch_proj

``vllm_h3_plugin.quantization.plan`` applies a recipe to a model's layers.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_h3_plugin.data import data_path
from vllm_h3_plugin.errors import RecipeError
from vllm_h3_plugin.quantization.precision import Method, Precision

DEFAULT_RECIPES: dict[str | None, str] = {None: "bf16", "fp8": "fp8", "int8": "int8"}
"""Value of the host's ``--quantization`` flag -> recipe that it means on H3."""

_SEGMENT = re.compile(r"[A-Za-z0-9_*-]+")


class Adaln(Enum):
    """Where the AdaLN projections are. The value is the word that recipes use."""

    TABLE = "table"
    """They run once for each timestep of a schedule, from weights streamed off the disk; their output is kept."""
    RESIDENT = "resident"
    """Their BF16 weights stay in memory and run in every step."""


class AttentionPrecision(Enum):
    """What the DiT blocks' attention is computed in. The value is the word that recipes use."""

    EXACT = "exact"
    """BF16 with sums in FP32, by the fastest kernel of the device."""
    FP8 = "fp8"
    """FlashAttention-3 in FP8, a scale per head. Hopper."""
    INT8 = "int8"
    """Queries and keys in INT8, by the sageattention package."""


@dataclass(frozen=True)
class Rule:
    """One line of a recipe: paths that match ``match`` get ``precision``, because of ``why``."""

    match: str
    precision: Precision
    why: str

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts = []
        for segment in self.match.split("."):
            if segment == "**":
                parts.append(r"(?:[^.]+\.)*")
            else:
                parts.append(re.escape(segment).replace(r"\*", "[^.]*") + r"\.")
        return re.compile("".join(parts))

    def matches(self, path: str) -> bool:
        """Whether the glob matches the whole dotted path."""
        return self._regex.fullmatch(path + ".") is not None


@dataclass(frozen=True)
class Recipe:
    """A precision recipe.

    Attributes:
        name: short name, the file's stem for packaged recipes.
        description: one sentence for people.
        method: value of the host's ``--quantization`` flag that it goes with; None without the flag.
        adaln: where the AdaLN projections are.
        rules: in order; first match wins.
        source: the file it was read from.
        attention: what the DiT blocks' attention is computed in. The token refiner's is always exact.
    """

    name: str
    description: str
    method: Method | None
    adaln: Adaln
    rules: tuple[Rule, ...]
    source: str
    attention: AttentionPrecision = AttentionPrecision.EXACT


def recipe_names() -> tuple[str, ...]:
    """Names of the packaged recipes, sorted."""
    return tuple(sorted(path.stem for path in data_path("quant").glob("*.json")))


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Read a packaged recipe by name, or any JSON file by path (a ``Path``, or text with ``/`` or ending in ``.json``).

    Raises:
        RecipeError: no such recipe or file, malformed JSON, duplicate or unknown keys, wrong types, unknown precision
            or a glob that cannot be one. The message names the file and the place in it.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith(".json"):
        path = Path(text).expanduser()
    else:
        path = data_path("quant") / f"{text}.json"
        if text not in recipe_names():
            near = difflib.get_close_matches(text, recipe_names(), n=1)
            guess = f"Did you mean {near[0]}? " if near else ""
            raise RecipeError(
                f"unknown recipe {text!r}",
                why=f"the packaged recipes are {', '.join(recipe_names())}",
                fix=f"{guess}A recipe of your own is given as a path that ends in .json.",
                recipe=text,
            )
    return _parse(_read(path), str(path))


def resolve_recipe(quantization_method: str | None, explicit: str | None) -> Recipe:
    """The recipe that a server runs with.

    Args:
        quantization_method: value of the host's ``--quantization`` flag, None if it was not given.
        explicit: recipe name or path that the user gave (``H3_RECIPE``, ``--recipe``). It wins if it agrees with the
            flag. A flag that was not given contradicts nothing: the plugin puts the recipe in the flag's place.

    Raises:
        RecipeError: unsupported flag, or flag and recipe contradict each other; and as :func:`load_recipe`.
    """
    if quantization_method not in DEFAULT_RECIPES:
        raise RecipeError(
            f"--quantization {quantization_method}",
            why="H3 has no recipe for it",
            fix=f"Supported: {', '.join(m for m in DEFAULT_RECIPES if m)}; without the flag H3 runs in BF16.",
            method=quantization_method,
        )
    if explicit is None:
        return load_recipe(DEFAULT_RECIPES[quantization_method])
    recipe = load_recipe(explicit)
    if quantization_method is not None and recipe.method != quantization_method:
        goes_with = f"--quantization {recipe.method}" if recipe.method else "no --quantization flag"
        raise RecipeError(
            f"--quantization {quantization_method} and recipe {recipe.name} ({recipe.source}) contradict each other",
            why=f"that recipe goes with {goes_with}",
            fix="Drop the flag or name another recipe (`vllm-h3 recipe list`).",
            method=quantization_method,
            recipe=recipe.name,
        )
    return recipe


class _RuleFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    match: str
    precision: Precision
    why: str = Field(min_length=1)


class _RecipeFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(min_length=1)
    description: str = Field(min_length=1)
    method: Method | None
    adaln: Adaln
    rules: tuple[_RuleFile, ...] = Field(min_length=1)
    attention: AttentionPrecision = AttentionPrecision.EXACT


class _DuplicateKeyError(Exception):
    pass


def _read(path: Path) -> str:
    if path.exists() and not path.is_file():
        # A pipe would be waited for without end.
        raise RecipeError(
            f"recipe {path} is no file", why="it is a folder, a pipe or a device", fix="Give a JSON file."
        )
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as exc:
        raise RecipeError(
            f"recipe file {path} not found", fix=f"Packaged recipes are given by name: {', '.join(recipe_names())}."
        ) from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise RecipeError(f"recipe file {path} cannot be read", why=str(exc), fix="Give a JSON file in UTF-8.") from exc


def _parse(text: str, source: str) -> Recipe:
    try:
        json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as exc:
        raise RecipeError(
            f"recipe {source}, line {exc.lineno}, column {exc.colno}",
            why=f"not JSON: {exc.msg}",
            fix="Correct the file there.",
            line=exc.lineno,
            column=exc.colno,
        ) from exc
    except RecursionError as exc:
        raise RecipeError(
            f"recipe {source}", why="it is nested deeper than a recipe can be", fix="Correct the file."
        ) from exc
    except _DuplicateKeyError as exc:
        raise RecipeError(f"recipe {source}: key {exc} stands twice in one object", fix="Keep one of them.") from exc
    try:
        # Strict validation wants the text: in Python values an array is no tuple and a word no enum.
        file = _RecipeFile.model_validate_json(text)
    except ValidationError as exc:
        raise _schema_error(exc, source) from exc
    for number, rule in enumerate(file.rules, 1):
        _check_glob(rule.match, f"recipe {source}, rule {number}")
    _check_method(file, source)
    rules = tuple(Rule(rule.match, rule.precision, rule.why) for rule in file.rules)
    return Recipe(file.name, file.description, file.method, file.adaln, rules, source, file.attention)


def _check_method(file: _RecipeFile, source: str) -> None:
    methods = sorted({rule.precision.method for rule in file.rules if rule.precision.method})
    if len(methods) > 1:
        raise RecipeError(
            f"recipe {source} has both {' and '.join(word.upper() for word in methods)} rules",
            why="one server computes its quantized layers by one method",
            fix="Keep fp8_channel and fp8_tensor (CUDA) or int8 (Ascend).",
        )
    if methods == ([] if file.method is None else [file.method]):
        return
    if methods:
        why = f"the recipe has {methods[0].upper()} rules"
        fix = f'Set "method" to "{methods[0]}".'
    else:
        why = f"the recipe has no {str(file.method).upper()} rule"
        fix = 'Set "method" to "fp8" if any rule is fp8_channel or fp8_tensor, to "int8" if any is int8, else to null.'
    raise RecipeError(f"recipe {source}: method {json.dumps(file.method)}", why=why, fix=fix)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise _DuplicateKeyError(json.dumps(key))
        seen[key] = value
    return seen


def _schema_error(exc: ValidationError, source: str) -> RecipeError:
    # A misspelt key is both unknown and missing; the unknown one says which word to mend.
    first = min(exc.errors(), key=lambda error: error["type"] != "extra_forbidden")
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    model = _RuleFile if len(first["loc"]) > 1 else _RecipeFile
    keys = ", ".join(model.model_fields)
    required = ", ".join(name for name, field in model.model_fields.items() if field.is_required())
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(first["loc"][-1]), model.model_fields, n=1)
        fix = f"Did you mean {near[0]!r}? Known keys: {keys}." if near else f"Known keys: {keys}."
        return RecipeError(f"recipe {source}: unknown key {place}", fix=fix, key=place)
    if first["type"] == "missing":
        return RecipeError(f"recipe {source}: key {place} is missing", fix=f"Required keys: {required}.", key=place)
    shown = json.dumps(first["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return RecipeError(
        f"recipe {source}: {place or 'the file'} is {shown}",
        why=first["msg"][:1].lower() + first["msg"][1:],
        fix="`docs/PRECISION.md` describes the format; `vllm-h3 recipe list` shows working examples.",
        key=place,
    )


def _check_glob(match: str, where: str) -> None:
    for segment in match.split("."):
        if _SEGMENT.fullmatch(segment) and ("**" not in segment or segment == "**"):
            continue
        raise RecipeError(
            f"{where}: match {match!r} is no path pattern",
            why="** must be a whole segment" if "**" in segment else f"segment {segment!r} is not a name",
            fix="Use dotted module paths; * is any part of one segment, ** any number of segments.",
        )
