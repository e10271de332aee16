# SPDX-License-Identifier: Apache-2.0
"""Fields of a form or a JSON body into a :class:`~.ask.VideoAsk`; every name is known or named as unknown."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from pydantic import ValidationError

from vllm_h3_plugin.serving.rules.ask import Reference, VideoAsk, VideoFields
from vllm_h3_plugin.serving.rules.fault import Fault, shown
from vllm_h3_plugin.serving.rules.limits import EXTRA
from vllm_h3_plugin.serving.rules.names import (
    ALIASES,
    NESTED,
    NOT_OFFERED,
    OBJECTS,
    REFERENCES,
    UNUSED,
    WITHOUT_EFFECT,
)
from vllm_h3_plugin.serving.rules.type_faults import type_faults

FIELDS = frozenset(VideoFields.model_fields)

_BRACKETS = re.compile(r"^([^\[\]]+)\[([^\[\]]*)\]$")
_DEPTH = 2
"""Objects in objects: ``extra_params.target.duration_seconds`` is the deepest name there is."""
_URL_KEYS = ("image_url", "video_url", "audio_url", "url")


@dataclass(frozen=True)
class Upload:
    """A file of a multipart form, as a field's value."""

    file: BinaryIO
    filename: str | None = None


@dataclass
class _Reading:
    """What was understood so far: canonical name -> value, and how the client wrote that name."""

    values: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    unused: list[tuple[str, Any]] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def read(fields: Iterable[tuple[str, Any]]) -> tuple[VideoAsk, list[Fault]]:
    """What the fields ask for, and what is wrong with their names and types.

    Args:
        fields: names and values in the order of the request. A form's (``form.multi_items()``) are text, or
            :class:`Upload` for a file, and may repeat; a JSON body's are ``body.items()``.

    Returns:
        The request without the fields that are at fault, and those faults.
    """
    reading = _Reading()
    for name, value in _gathered(fields, reading.faults):
        _take(reading, name, value, name)
    own = {
        "written": {name: wrote for name, wrote in reading.written.items() if wrote != name},
        "unused": tuple(reading.unused),
        "extra_params": reading.extra,
        "references": tuple(reading.references),
    }
    try:
        ask = VideoAsk.model_validate({**reading.values, **own})
    except ValidationError as exc:
        faults, wrong = type_faults(exc, reading.written)
        reading.faults += faults
        ask = VideoAsk.model_validate({k: v for k, v in reading.values.items() if k not in wrong} | own)
    return ask, reading.faults


def _gathered(fields: Iterable[tuple[str, Any]], faults: list[Fault]) -> Iterable[tuple[str, Any]]:
    """Each name once, in order; JSON in text parsed; empty text, which forms send for what was left out, dropped."""
    gathered: dict[str, Any] = {}
    for raw, value in fields:
        raw = shown(str(raw))
        name, inner = raw, None
        if match := _BRACKETS.match(name):  # `input_references[]`, and OpenAI's `input_reference[image_url]`
            name, inner = match[1], match[2] or None
        if value is None or (value == "" and name != "prompt"):
            continue
        if isinstance(value, str) and (name in OBJECTS or inner) and value.lstrip()[:1] in ("{", "["):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                faults.append(Fault(raw, shown(value), "it is no valid JSON", "a JSON object or list"))
                continue
        if inner is not None:
            value = {inner: value}
        canonical = ALIASES.get(name, name)
        if name not in gathered:
            gathered[name] = value
        elif canonical in REFERENCES or canonical == "frame_indices":
            gathered[name] = [*_listed(gathered[name]), *_listed(value)]
        elif isinstance(value, dict) and isinstance(gathered[name], dict):
            gathered[name] = {**gathered[name], **value}
        elif gathered[name] != value:
            faults.append(Fault(name, shown(value), f"it is given twice, first as {shown(gathered[name])!r}", "once"))
    return gathered.items()


def _take(reading: _Reading, name: str, value: Any, wrote: str) -> None:
    """Put one field where it belongs."""
    canonical = ALIASES.get(name, name)
    if name in NESTED and wrote.count(".") < _DEPTH:
        _take_nested(reading, name, value, wrote)
    elif canonical in REFERENCES:
        for place, item in enumerate(items := _listed(value)):
            _take_reference(reading, canonical, item, f"{wrote}[{place}]" if len(items) > 1 else wrote)
    elif isinstance(value, Upload):
        why = NOT_OFFERED.get(name, "it takes no file")
        reading.faults.append(Fault(wrote, value.filename, why, "a file in input_reference or input_references"))
    elif canonical in FIELDS:
        if canonical == "frame_indices":
            value = _listed(value)
        if canonical in reading.values:
            if reading.values[canonical] == value:
                return
            first = reading.written[canonical]
            reading.faults.append(Fault(wrote, shown(value), f"{first} says {shown(reading.values[canonical])!r}"))
            return
        reading.values[canonical], reading.written[canonical] = value, wrote
    elif name in NOT_OFFERED:
        if not _same(value, WITHOUT_EFFECT.get(name, False)):
            reading.faults.append(Fault(wrote, shown(value), NOT_OFFERED[name], "leave it out"))
    elif name in UNUSED:
        if name not in WITHOUT_EFFECT or not _same(value, WITHOUT_EFFECT[name]):
            reading.unused.append((wrote, shown(value)))
    elif name in EXTRA and wrote != name:
        reading.extra[name] = value
    else:
        reading.faults.append(_unknown(name, value, wrote))


def _take_nested(reading: _Reading, name: str, value: Any, wrote: str) -> None:
    if not isinstance(value, Mapping):
        reading.faults.append(Fault(wrote, shown(value), "it is no object", "a JSON object"))
        return
    for key, inner in value.items():
        if inner is not None:
            _take(reading, shown(str(key)), inner, f"{wrote}.{shown(str(key))}")


def _take_reference(reading: _Reading, canonical: str, value: Any, wrote: str) -> None:
    kind = REFERENCES[canonical]
    if isinstance(value, Upload):
        reading.references.append(Reference(wrote, kind, file=value.file, filename=value.filename))
        return
    if isinstance(value, Mapping):
        if "file_id" in value:
            reading.faults.append(Fault(f"{wrote}.file_id", shown(value["file_id"]), NOT_OFFERED["file_id"]))
            return
        keys = [key for key in value if value[key] is not None]
        if len(keys) == 1 and keys[0] in _URL_KEYS:
            wrote, value = f"{wrote}.{keys[0]}", value[keys[0]]
    if not isinstance(value, str):
        expected = f"{kind or 'image'}_url"
        why = f"a reference is a file, a URL, or an object with {expected}"
        reading.faults.append(Fault(wrote, shown(value), why, f'{{"{expected}": "data:…"}}', code="invalid_reference"))
        return
    reading.references.append(Reference(wrote, kind, url=value))


def _unknown(name: str, value: Any, wrote: str) -> Fault:
    """An unknown name, with the known one that it was perhaps meant to be."""
    prefix = wrote.removesuffix(name)
    known = [*FIELDS, *ALIASES, *REFERENCES, *UNUSED, *NESTED, *(EXTRA if prefix else ())]
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.7)
    if not near and name in EXTRA:
        near, prefix = [name], "extra_params."
    suggestion = f"{prefix}{near[0]}" if near else None
    why = "no such field" + (f"; did you mean {suggestion}?" if suggestion else "")
    allowed = "" if suggestion else ", ".join(sorted(FIELDS | REFERENCES.keys() | (EXTRA if prefix else set())))
    return Fault(wrote, shown(value), why, allowed, suggestion, "unknown_parameter")


def _same(value: Any, neutral: Any) -> bool:
    """Whether a value, which may be a form's text, is the neutral one."""
    if isinstance(neutral, bool):
        return str(value).strip().lower() in (("true", "1", "yes", "on") if neutral else ("false", "0", "no", "off"))
    if isinstance(neutral, float):
        try:
            return float(value) == neutral
        except (TypeError, ValueError):
            return False
    return bool(value == neutral)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
