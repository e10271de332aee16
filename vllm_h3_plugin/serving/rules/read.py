# SPDX-License-Identifier: Apache-2.0
"""Fields of a form or a JSON body into a :class:`~.ask.VideoAsk`; every name is known or named as unknown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

from pydantic import ValidationError

from vllm_h3_plugin.serving.rules.ask import VideoAsk
from vllm_h3_plugin.serving.rules.fault import Fault


@dataclass(frozen=True)
class Upload:
    """A file of a multipart form, as a field's value."""

    file: BinaryIO
    filename: str | None = None


def read(fields: Iterable[tuple[str, Any]]) -> tuple[VideoAsk, list[Fault]]:
    """What the fields ask for, and what is wrong with their names and types.

    Args:
        fields: names and values in the order of the request. A form's (``form.multi_items()``) are text, or
            :class:`Upload` for a file, and may repeat; a JSON body's are ``body.items()``.

    Returns:
        The request without the fields that are at fault, and those faults.
    """
    values = dict(fields)
    try:
        return VideoAsk.model_validate(values), []
    except ValidationError as exc:
        faults = [Fault(str(error["loc"][0]), error["input"], error["msg"]) for error in exc.errors()]
        good = {name: value for name, value in values.items() if name not in {fault.field for fault in faults}}
        return VideoAsk.model_validate(good), faults
