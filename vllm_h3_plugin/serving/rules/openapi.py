# SPDX-License-Identifier: Apache-2.0
"""What is really accepted, as OpenAPI 3.1: made from the model that requests are read into and this server's limits."""

from __future__ import annotations

from typing import Any

from vllm_h3_plugin.serving.rules.ask import VideoFields
from vllm_h3_plugin.serving.rules.canvas import SHORT_EDGE
from vllm_h3_plugin.serving.rules.conditions import MAX_REFERENCES
from vllm_h3_plugin.serving.rules.fault import Code
from vllm_h3_plugin.serving.rules.length import longest_frames, shortest_frames
from vllm_h3_plugin.serving.rules.limits import Limits
from vllm_h3_plugin.serving.rules.names import ALIASES, REFERENCES, UNUSED
from vllm_h3_plugin.serving.rules.ratios import RATIOS
from vllm_h3_plugin.video.geometry import FPS

_JSON_FIELDS = ("lora", "frame_indices", "extra_params", "image_reference", "video_reference", "audio_reference")


def request_body(limits: Limits) -> dict[str, Any]:
    """The ``requestBody`` of ``POST /v1/videos`` and ``/v1/videos/sync``, as a form and as JSON."""
    return {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": schema(limits, form=True),
                "encoding": {name: {"contentType": "application/json"} for name in _JSON_FIELDS},
            },
            "application/json": {"schema": schema(limits, form=False)},
        },
    }


def schema(limits: Limits, *, form: bool) -> dict[str, Any]:
    """JSON schema of a request.

    Args:
        limits: this server's.
        form: references may be files.
    """
    made = VideoFields.model_json_schema()
    properties: dict[str, Any] = {
        name: _plain(field, made.get("$defs", {})) for name, field in made["properties"].items()
    }
    for name, limit in _limits(limits).items():
        properties[name] |= limit
    for alias, name in ALIASES.items():
        if name in properties:
            properties[alias] = {**properties[name], "description": f"Another name of `{name}`.", "deprecated": True}
    properties |= _references(form)
    extra = ", ".join(f"`{name}`" for name in sorted(limits.extra))
    properties["extra_params"] = {
        "type": "object",
        "description": "Any field above" + (f", and for H3 by name: {extra}." if extra else "."),
        "additionalProperties": True,
    }
    for name, why in UNUSED.items():
        properties[name] = {"description": f"Without effect: {why}.", "deprecated": True}
    return {
        "type": "object",
        "required": ["prompt"],
        "additionalProperties": False,
        "properties": properties,
    }


def error_response() -> dict[str, Any]:
    """The answer to a request that is refused: OpenAI's error object, with every fault beside it."""
    text = {"type": "string"}
    fault = {
        "type": "object",
        "required": ["field", "value", "why", "allowed", "nearest", "code"],
        "properties": {
            "field": {**text, "description": "As the client wrote it."},
            "value": {"description": "As it was sent; long text is cut."},
            "why": text,
            "allowed": {**text, "description": "What is allowed, in words."},
            "nearest": {"description": "The nearest valid value; null where there is none."},
            "code": {**text, "enum": list(Code.__args__)},  # type: ignore[attr-defined]
        },
    }
    error = {
        "type": "object",
        "required": ["message", "type", "param", "code"],
        "properties": {
            "message": {**text, "description": "Every fault, in one line."},
            "type": {"const": "invalid_request_error"},
            "param": {"type": ["string", "null"], "description": "Field of the first fault."},
            "code": {"type": ["string", "integer", "null"]},
        },
    }
    body = {
        "type": "object",
        "required": ["error", "faults"],
        "properties": {"error": error, "faults": {"type": "array", "minItems": 1, "items": fault}},
    }
    return {"description": "The request cannot be honoured", "content": {"application/json": {"schema": body}}}


def _limits(limits: Limits) -> dict[str, dict[str, Any]]:
    """What the model leaves to the server, by field."""
    least, most, default = limits.usual_steps
    return {
        "prompt": {"minLength": 1, "pattern": r"\S"},
        "task": {"enum": list(limits.tasks)},
        "aspect_ratio": {"enum": [*RATIOS, "auto"]},
        "short_edge": {"const": SHORT_EDGE},
        "fps": {"const": FPS},
        "seconds": {"minimum": limits.shortest_s, "maximum": longest_frames(limits) / FPS},
        "num_frames": {"minimum": shortest_frames(limits), "maximum": longest_frames(limits)},
        "num_inference_steps": {"minimum": least, "maximum": most, "default": default},
        "n": {"minimum": 1, "maximum": limits.outputs},
        **({"model": {"const": limits.model}} if limits.model is not None else {}),
    }


def _references(form: bool) -> dict[str, Any]:
    """Fields that carry references."""
    url = {"type": "string", "description": "A `data:` URI, or an https URL where the server fetches from its host."}
    file = {"type": "string", "format": "binary", "description": "A file."}
    fields: dict[str, Any] = {}
    for name, kind in REFERENCES.items():
        item: dict[str, Any] = {
            "type": "object",
            "required": [f"{kind or 'image'}_url"],
            "properties": {f"{kind or 'image'}_url": url},
            "additionalProperties": False,
        }
        one = {"anyOf": [*([file] if form else ()), url, item]}
        many = {"type": "array", "minItems": 1, "maxItems": MAX_REFERENCES, "items": one}
        what = f"{kind} references" if kind else "references of any kind, told by their bytes"
        fields[name] = {"anyOf": [*one["anyOf"], many], "description": f"{what.capitalize()}, in order."}
        if kind is None:
            fields["input_reference"] = {**one, "description": "One reference: the first frame, if it is a picture."}
    return fields


def _plain(field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A field's schema without null, which stands for leaving it out, and without references."""
    field = {name: value for name, value in field.items() if name != "title" and (name, value) != ("default", None)}
    for variant in field.pop("anyOf", ()):
        if variant.get("type") != "null":
            field = {**variant, **field}
    if "$ref" in field:
        name = field.pop("$ref").rpartition("/")[2]
        inner = definitions[name]
        properties = {key: _plain(value, definitions) for key, value in inner["properties"].items()}
        field = {**inner, **field, "properties": properties}
        field.pop("title", None)
    return field
