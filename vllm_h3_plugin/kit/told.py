# SPDX-License-Identifier: Apache-2.0
"""What a server tells, taken apart so that every verb can rely on its shape: what is odd is left out and named.

A server of another version, a proxy's error page or something else at that address must not end a verb with a
traceback, and least of all may it pass for "nothing runs".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_h3_plugin.kit.words import plain

NO_ID = "(without id)"

# Every other status counts as running, known or not (vLLM-Omni 0.30.0 entrypoints/openai/protocol/videos.py:28).
_ENDED = ("completed", "failed")
_SECRET_LENGTH = 4
"""A shorter key is no secret, and masking it would only garble the text."""
_PROGRESS_NUMBERS = (
    "step",
    "steps",
    "time",
    "started_at",
    "busy_since",
    "seconds_per_step",
    "done_bytes",
    "total_bytes",
)


@dataclass(frozen=True)
class ToldInfo:
    """``/v1/h3/info``.

    Attributes:
        info: what of it is understood, each part in its own shape.
        odd: what is not.
        unsure: why it does not say whether a request runs; empty where it does.
    """

    info: dict[str, Any] = field(default_factory=dict)
    odd: tuple[str, ...] = ()
    unsure: str = ""


@dataclass(frozen=True)
class ToldJobs:
    """``/v1/videos``: the jobs that have not ended; ``odd`` and ``unsure`` as in :class:`ToldInfo`."""

    jobs: tuple[Mapping[str, Any], ...] = ()
    odd: tuple[str, ...] = ()
    unsure: str = ""


def tidy_text(text: str, key: str) -> str:
    """Text from outside as it may be shown: no escapes, and not the key."""
    text = plain(text)
    return text.replace(key, "***") if len(key) >= _SECRET_LENGTH else text


def parse(text: str, key: str) -> Any:
    """JSON with each string tidied.

    Raises:
        ValueError: it is none.
    """
    try:
        return _tidied(json.loads(text), key)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc


def read_info(raw: Any) -> ToldInfo:
    """Take ``/v1/h3/info`` apart."""
    if not isinstance(raw, dict) or not raw:
        what = "it is empty" if raw == {} else "it is no object"
        return ToldInfo(odd=(what,), unsure=what)
    odd: list[str] = []
    info: dict[str, Any] = {"plugin": raw["plugin"] if isinstance(raw.get("plugin"), str) else None}
    info["host"] = {name: value for name, value in _object(raw, "host", odd).items() if isinstance(value, str)}
    info["workers"] = _workers(raw.get("workers"), odd)
    info["server"] = _numbers(_object(raw, "server", odd), ("started_at", "uptime_s"), "server", odd)
    info["requests"] = _numbers(_object(raw, "requests", odd), ("in_flight",), "requests", odd)
    info["queue"] = _with_bytes(raw, "queue", ("length",), odd)
    info["guard"] = _with_bytes(raw, "guard", ("available_bytes", "floor_bytes"), odd)
    provenance = _object(raw, "provenance", odd)
    info["provenance"] = {**provenance, "image": _object(provenance, "image", odd) or None}
    progress = _object(raw, "progress", odd)
    unsure = "its requests are not understood" if "requests" in odd else ""
    if isinstance(progress.get("phase"), str) and progress["phase"]:
        info["progress"] = _progress(progress, odd)
    else:
        info["progress"] = {}
        unsure = "it does not say what it is at"
        odd += ["progress"] if progress and "progress" not in odd else []
    return ToldInfo(info, tuple(dict.fromkeys(odd)), unsure)


def read_jobs(raw: Any, queue: Mapping[str, Any] | None = None) -> ToldJobs:
    """Take ``/v1/videos`` apart, the newest jobs first.

    Args:
        queue: what ``/v1/h3/info`` says of the line; a list that goes on and has as many jobs that have not ended is
            whole.
    """
    listed = raw.get("data") if isinstance(raw, dict) else None
    if not isinstance(listed, list):
        return ToldJobs(odd=("jobs",), unsure="its list of jobs is not understood")
    unsure, jobs, odd = "", [], False
    for one in listed:
        if not isinstance(one, dict):
            odd, unsure = True, "its list of jobs is not understood"
        elif one.get("status") not in _ENDED:
            named = isinstance(one.get("id"), str) and one["id"]
            odd = odd or not named
            size = one.get("size")
            jobs.append({**one, "id": named or NO_ID, "size": size if isinstance(size, str) else None})
    known = None if not queue else int(queue["length"]) + (queue.get("running") is not None)
    if raw.get("has_more") and (not listed or known is None or len(jobs) < known):
        unsure = unsure or "its list of jobs is not whole"
    return ToldJobs(tuple(reversed(jobs)), ("jobs",) if odd else (), unsure)


def _tidied(value: Any, key: str) -> Any:
    if isinstance(value, str):
        return tidy_text(value, key)
    if isinstance(value, list):
        return [_tidied(one, key) for one in value]
    if isinstance(value, dict):
        return {tidy_text(name, key): _tidied(one, key) for name, one in value.items()}
    # NaN and infinity are no JSON, and a number of that size is none that this project counts.
    return None if isinstance(value, int | float) and not abs(value) < 2**63 else value


def _object(raw: Mapping[str, Any], name: str, odd: list[str]) -> dict[str, Any]:
    """The object of that name; empty where there is none."""
    found = raw.get(name)
    if found is None or isinstance(found, dict):
        return found or {}
    odd.append(name)
    return {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(raw: Mapping[str, Any], names: Sequence[str], where: str, odd: list[str]) -> dict[str, Any]:
    """The object with numbers, or nothing, under these names."""
    wrong = [name for name in names if raw.get(name) is not None and not _is_number(raw[name])]
    if wrong:
        odd.append(where)
    return {name: value for name, value in raw.items() if name not in wrong}


def _with_bytes(raw: Mapping[str, Any], name: str, needed: Sequence[str], odd: list[str]) -> dict[str, Any] | None:
    """The object of that name if it has all these numbers."""
    found = _object(raw, name, odd)
    if found and not all(_is_number(found.get(one)) for one in needed):
        odd.append(name)
        return None
    return found or None


def _workers(raw: Any, odd: list[str]) -> list[dict[str, Any]]:
    listed = raw if isinstance(raw, list) else []
    workers = [one for one in listed if isinstance(one, dict)]
    if len(workers) != len(listed) or not isinstance(raw, list | None):
        odd.append("workers")
    return [{**one, "memory": _with_bytes(one, "memory", ("resident_bytes", "peak_bytes"), odd)} for one in workers]


def _progress(raw: Mapping[str, Any], odd: list[str]) -> dict[str, Any]:
    """A phase, and numbers that belong together or not at all."""
    found = {"phase": raw["phase"]} | dict.fromkeys(_PROGRESS_NUMBERS)
    found |= {k: v for k, v in _numbers(raw, _PROGRESS_NUMBERS, "progress", odd).items() if k in found}
    for part, whole in (("step", "steps"), ("done_bytes", "total_bytes")):
        if found[part] is None:
            found[whole] = None
    return found
