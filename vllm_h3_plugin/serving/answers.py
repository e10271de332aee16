# SPDX-License-Identifier: Apache-2.0
"""Short answers of a server, read within bounds, and what a refusal means."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import httpx

from vllm_h3_plugin.errors import BusyError, H3Error, ServerError
from vllm_h3_plugin.serving.limits import Deadline

_MAX_BYTES = 4 << 20
_SHOWN = 500
"""Characters of an error body that are shown."""


@dataclass(frozen=True)
class Answer:
    """One whole answer.

    Attributes:
        status: HTTP status.
        text: the body.
        location: where a redirect leads.
        retry_after: what ``Retry-After`` says.
    """

    status: int
    text: str
    location: str | None = None
    retry_after: str | None = None

    def json(self) -> dict[str, Any] | None:
        """The body if it is a JSON object. Texts in it can be printed and written, whatever was sent."""
        try:
            body = _printable(json.loads(self.text))
        except (ValueError, RecursionError):
            return None
        return body if isinstance(body, dict) else None

    @property
    def message(self) -> str:
        """What an error body says: an OpenAI-style ``error.message``, FastAPI's ``detail``, or its first words."""
        body = self.json()
        if body is None:
            return without_controls(self.text[:_SHOWN]).strip() or "the body is empty"
        error = body.get("error") or body.get("detail") or body
        return without_controls(str(error.get("message", error) if isinstance(error, dict) else error)[:_SHOWN])


def ask(http: httpx.Client, deadline: Deadline, method: str, path: str, **options: Any) -> Answer:
    """Send a request and read its answer, which is no clip: a few MiB at most, and within the deadline.

    Raises:
        httpx.RequestError: there was no whole answer.
        ServerError: the deadline is over, or the answer does not end.
    """
    with http.stream(method, path, **options) as answer:
        body = bytearray()
        for block in answer.iter_bytes():
            body += block
            deadline.check(f"the answer to {method} {path}")
            if len(body) > _MAX_BYTES:
                raise ServerError(
                    f"the answer to {method} {path} is larger than {_MAX_BYTES >> 20} MiB",
                    why="it is no answer of the video API",
                    fix="Check --url: something else may listen there.",
                )
        text = _without_key(_decoded(bytes(body), answer.encoding), http)
        return Answer(
            answer.status_code, text, answer.headers.get("location"), retry_after=answer.headers.get("retry-after")
        )


def _decoded(body: bytes, encoding: str | None) -> str:
    """A body as text. What calls itself an encoding may be none, or none of text."""
    try:
        return body.decode(encoding or "utf-8", errors="replace")
    except (LookupError, AttributeError, ValueError):
        return body.decode("utf-8", errors="replace")


def _without_key(text: str, http: httpx.Client) -> str:
    """A text in which the key that was sent does not stand, should the server have echoed it."""
    key = http.headers.get("authorization", "").removeprefix("Bearer ")
    return text.replace(key, "***") if key else text


def without_controls(text: str) -> str:
    """A text that a terminal prints and does not obey."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def _printable(value: Any) -> Any:
    """JSON values with half surrogate pairs replaced: no encoding can write them."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else value


def finite(value: object) -> float | None:
    """A number of an answer, if it is one that can be reckoned with."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def count(value: object) -> int | None:
    """A number of steps or the like, if it is one."""
    number = finite(value)
    return int(number) if number is not None and number >= 0 else None


def mapping(value: object) -> dict[str, Any]:
    """A JSON object, empty where there is something else."""
    return value if isinstance(value, dict) else {}


def refusal(answer: Answer, what: str) -> H3Error:
    """The error that an answer stands for.

    Args:
        what: what the server was asked to do, after "refused to".
    """
    heading = f"the server refused to {what}: HTTP {answer.status}"
    if answer.status in (401, 403):
        return ServerError(
            heading,
            why=answer.message,
            fix="Name the file with the server's key in H3_API_KEY_FILE, or give the key in VLLM_API_KEY.",
        )
    if 300 <= answer.status < 400:
        return ServerError(
            heading,
            why=f"it redirects to {answer.location or 'nowhere'}, and redirects are not followed",
            fix="Give the server's own address with --url.",
        )
    if answer.status in (429, 503):
        wait = f"Try again in {answer.retry_after} s." if answer.retry_after else "Try again later."
        return BusyError(heading, why=answer.message, fix=wait)
    return ServerError(heading, why=answer.message, fix="The server's log says more.")


def unreachable(http: httpx.Client, exc: httpx.RequestError) -> ServerError:
    """The error for a server that cannot be talked to."""
    return ServerError(
        f"{http.base_url}: no answer",
        why=describe(exc),
        fix="Start it with `vllm-h3 serve` or its container, or give its address with --url.",
    )


def describe(exc: httpx.RequestError) -> str:
    """A transport error in words; httpx leaves some without."""
    words = str(exc).strip()
    if isinstance(exc, httpx.TimeoutException):
        words = words if words and words != "timed out" else "nothing came in time"
    return words or type(exc).__name__
