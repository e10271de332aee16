# SPDX-License-Identifier: Apache-2.0
"""What the routes of jobs answer, for the OpenAPI description. What they take is in ``serving/rules/openapi.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_h3_plugin.serving.jobs.job import Job, Status, wire
from vllm_h3_plugin.serving.jobs.progress import Progress
from vllm_h3_plugin.serving.rules.openapi import error_response

Responses = dict[int | str, dict[str, Any]]

_TEXT: Mapping[str, Any] = {"type": "string"}
_OBJECT: Mapping[str, Any] = {"type": "object"}
_STATES = [status.value for status in (Status.QUEUED, Status.IN_PROGRESS, Status.COMPLETED, Status.FAILED)]

# Fields of a job that clients build on; the rest are in the schema by name and explained in docs/API.md.
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "id": _TEXT,
    "object": {"const": "video"},
    "status": {**_TEXT, "enum": _STATES, "description": "A cancelled job is `failed`, with that as its error's code."},
    "progress": {"type": "integer", "minimum": 0, "maximum": 100, "description": "Percent; it never falls."},
    "phase": {**_TEXT, "description": "What is being done: `queued`, `denoising`, `encoding video`, …"},
    "seconds_left": {"type": ["number", "null"], "description": "Null until a step of it has been measured."},
    "queue_position": {"type": ["integer", "null"], "description": "1: it is next."},
    "seed": {"type": "integer", "description": "The one it is made with."},
    "snapped": {"type": "array", "items": _OBJECT, "description": "What is made otherwise than asked: field, asked, "
                "made, why."},
    "error": {
        "type": ["object", "null"],
        "required": ["code", "message"],
        "properties": {"code": _TEXT, "message": _TEXT},
    },
}  # fmt: skip


def job_schema() -> dict[str, Any]:
    """A job as its GET shows it."""
    names = wire(Job("", "", "", 0, "", 0), Progress("").as_fields())
    known = {name: dict(_FIELDS.get(name, {})) for name in [*names, *_FIELDS]}
    return {"type": "object", "required": ["id", "object", "status", "progress", "phase", "error"], "properties": known}


def job_response() -> dict[str, Any]:
    """Of a route that answers with a job."""
    return _json("The job", job_schema())


def list_response() -> dict[str, Any]:
    """Of a list of jobs."""
    page = {
        "type": "object",
        "required": ["object", "data", "has_more"],
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": job_schema()},
            "has_more": {"type": "boolean"},
            "first_id": {"type": ["string", "null"]},
            "last_id": {"type": ["string", "null"]},
        },
    }
    return _json("Jobs", page)


def deleted_response() -> dict[str, Any]:
    """Of a DELETE."""
    fields = {"id": _TEXT, "object": {"const": "video.deleted"}, "deleted": {"const": True}}
    return _json("It is gone", {"type": "object", "required": list(fields), "properties": fields})


def clip_response(description: str = "The clip") -> dict[str, Any]:
    """Of a route that answers with a clip."""
    return {"description": description, "content": {"video/mp4": {"schema": {**_TEXT, "format": "binary"}}}}


def events_response() -> dict[str, Any]:
    """Of the stream of a job."""
    return {
        "description": "`progress` events, and `end`; the data of each is the job as JSON",
        "content": {"text/event-stream": {"schema": {**_OBJECT, "properties": {"event": _TEXT, "data": _TEXT}}}},
    }


def errors(*statuses: int) -> Responses:
    """Of a route that refuses with these statuses, and of every other error.

    Args:
        statuses: 400 stands for a request whose fields are at fault.
    """
    words = {
        404: "There is no such job, or its clip is not there yet",
        409: "The job was cancelled meanwhile, or is another server's",
        422: "The job has failed, or the key was used for another request",
        429: "As many clips wait as may; Retry-After says when to ask again",
        503: "It has not the memory or the disk for this now; Retry-After says when to ask again",
    }
    found: Responses = {status: _json(words[status], _error()) for status in statuses if status != 400}
    if 400 in statuses:
        found[400] = error_response()
    # Also keeps FastAPI from describing a 422 of its own, which this server does not give.
    return {**found, "default": _json("Another error; 401 where a key is wanted", _OBJECT)}


def header(name: str, description: str, **limits: Any) -> dict[str, Any]:
    """A request's header as a parameter."""
    schema = {**_TEXT, **limits}
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


def _error() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "code"],
                "properties": {"message": _TEXT, "type": _TEXT, "code": {"type": ["string", "integer", "null"]}},
            }
        },
    }


def _json(description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": dict(schema)}}}
