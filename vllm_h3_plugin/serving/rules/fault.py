# SPDX-License-Identifier: Apache-2.0
"""One thing that is wrong with a request, and the answer that lists all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Code = Literal["invalid_value", "unknown_parameter", "missing_parameter", "invalid_reference", "too_large_for_memory"]

HTTP_STATUS = 400
"""Of every refused request. OpenAI's clients raise ``BadRequestError`` for it, and do not try again."""

_SHOWN = 200


@dataclass(frozen=True)
class Fault:
    """One field that cannot be honoured.

    Attributes:
        field: the name as the client wrote it (``size``, ``extra_params.duration``, ``input_references[1]``).
        value: what was sent, as JSON; long text is cut. None where the field is missing.
        why: the reason, a clause without a full stop.
        allowed: what is allowed, in words (``1 to 200``); empty where nothing is.
        nearest: the nearest valid value, of the field's own type; None where there is none.
        code: kind of fault, for programs.
    """

    field: str
    value: Any
    why: str
    allowed: str = ""
    nearest: Any = None
    code: Code = "invalid_value"

    def __str__(self) -> str:
        """``size='16x16': each side is at least 32 pixels; allowed: …; nearest: 32x32``."""
        name = self.field if self.value is None else f"{self.field}={shown(self.value)!r}"
        parts = [f"{name}: {self.why}"]
        if self.allowed:
            parts.append(f"allowed: {self.allowed}")
        if self.nearest is not None:
            parts.append(f"nearest: {self.nearest}")
        return "; ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """The fault as a JSON object."""
        return {**asdict(self), "value": shown(self.value)}


def shown(value: Any) -> Any:
    """A value as an answer may repeat it: JSON, and not at any length."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float) and abs(value) < 1 << 64:  # neither NaN nor infinite
        return value
    text = value if isinstance(value, str) else str(value)
    # A lone surrogate, which JSON can carry, is no Unicode text: an answer with it could not be sent.
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def error_body(faults: Sequence[Fault]) -> dict[str, Any]:
    """The body of a 400: OpenAI's error object, whose ``param`` is the first fault's, and every fault beside it."""
    first = faults[0]
    return {
        "error": {
            "message": " | ".join(str(fault) for fault in faults),
            "type": "invalid_request_error",
            "param": first.field,
            "code": first.code,
        },
        "faults": [fault.as_dict() for fault in faults],
    }
