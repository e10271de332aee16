# SPDX-License-Identifier: Apache-2.0
"""Pydantic's errors as faults: the client's name, the allowed range from the model itself, the nearest valid value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError

from vllm_h3_plugin.serving.rules.ask import VideoFields
from vllm_h3_plugin.serving.rules.fault import Fault, shown

_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "a JSON object",
}


def type_faults(exc: ValidationError, written: Mapping[str, str]) -> tuple[list[Fault], set[str]]:
    """One fault for each field, and the names of the fields that cannot be used.

    Args:
        exc: of ``VideoFields``.
        written: field -> the name that the client used.
    """
    faults: dict[str, Fault] = {}
    wrong: set[str] = set()
    for error in exc.errors(include_url=False):
        place = [str(part) for part in error["loc"]]
        wrong.add(place[0])
        path = [part for part in place[1:] if part.isidentifier() and "[" not in part and part not in _UNION_PARTS]
        name = ".".join([written.get(place[0], place[0]), *path])
        if name not in faults:
            spec = _spec(place[0], tuple(path))
            value = shown(error["input"])
            missing = error["type"] == "missing"
            faults[name] = Fault(
                name,
                None if missing else value,
                "it is missing" if missing else _why(error, spec),
                _allowed(spec),
                None if missing else _nearest(error["input"], spec),
                "missing_parameter" if missing else "invalid_value",
            )
    return list(faults.values()), wrong


_UNION_PARTS = frozenset({"int", "float", "str", "bool", "none"})


@cache
def _schema() -> dict[str, Any]:
    return VideoFields.model_json_schema()


def _spec(field: str, path: tuple[str, ...]) -> dict[str, Any]:
    """The JSON schema of a field, of the one type that it has beside null."""
    schema = _schema()
    spec = _concrete(schema["properties"].get(field, {}), schema)
    for part in path:
        spec = _concrete(spec.get("properties", {}).get(part, {}), schema)
    return spec


def _concrete(spec: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    for variant in spec.get("anyOf", ()):
        if variant.get("type") != "null":
            spec = {**spec, **variant}
            break
    if "$ref" in spec:
        spec = schema["$defs"][spec["$ref"].rpartition("/")[2]]
    return spec


def _why(error: Any, spec: Mapping[str, Any]) -> str:
    """Pydantic's message as a clause of ours."""
    kind = str(error["type"])
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind == "extra_forbidden":
        return "no such field"
    if kind in ("literal_error", "enum"):
        return "it is none of the known words"
    if kind.startswith(("greater_than", "less_than")):
        return "it is out of range"
    if kind in ("string_too_long", "string_too_short"):
        return str(error["msg"]).lower().replace("string should have", "it should have")
    if kind == "string_unicode":
        return "it is no valid Unicode text"
    if kind == "finite_number":
        return "it is no finite number"
    expected = _TYPES.get(str(spec.get("type")), "")
    return f"it is not {expected}" if expected else str(error["msg"]).lower()


def _allowed(spec: Mapping[str, Any]) -> str:
    if "enum" in spec:
        return ", ".join(str(value) for value in spec["enum"])
    kind = _TYPES.get(str(spec.get("type")), "")
    low, high = spec.get("minimum"), spec.get("maximum")
    if low is not None and high is not None:
        return f"{kind} from {low:g} to {high:g}" if abs(high) < 1e9 else f"{kind} from {low} to {high}"
    if spec.get("type") == "string" and "maxLength" in spec:
        return f"text of at most {spec['maxLength']} characters"
    if spec.get("type") == "array" and "enum" in (items := spec.get("items", {})):
        return f"a list of {' or '.join(str(value) for value in items['enum'])}"
    return kind


def _nearest(value: Any, spec: Mapping[str, Any]) -> Any:
    if "enum" in spec:
        near = difflib.get_close_matches(str(value).lower(), [str(word) for word in spec["enum"]], n=1, cutoff=0.4)
        return near[0] if near else None
    if spec.get("type") not in ("integer", "number") or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    # Where the range is the server's, the model does not know it, and a nearest value would be a guess.
    if math.isnan(number) or "minimum" not in spec or "maximum" not in spec:
        return None
    low, high = spec["minimum"], spec["maximum"]
    if number <= low or number >= high:
        return low if number <= low else high
    return round(number) if spec["type"] == "integer" else number
