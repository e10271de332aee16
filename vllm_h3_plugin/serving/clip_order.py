# SPDX-License-Identifier: Apache-2.0
"""A clip that is wanted, and the name it goes by: a free one, or that of an earlier run which can be picked up."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from vllm_h3_plugin.serving.client import VideoRequest
from vllm_h3_plugin.serving.clip_record import Record, file_digest, read_record
from vllm_h3_plugin.serving.reservation import Reservation, reserve


@dataclass(frozen=True)
class Order:
    """A clip that is wanted.

    Attributes:
        stem: its name; a number is added where the name is taken.
        request: what to ask.
        any_seed: a clip of another seed will do: the seed was drawn and not given.
        again: make another even if there is one.
    """

    stem: str
    request: VideoRequest
    any_seed: bool = False
    again: bool = False


def choose(url: str, order: Order, folder: Path, server: dict[str, Any]) -> tuple[Reservation, Record | None]:
    """The first name that is free, or that an earlier run of this order has left something under."""
    for number in count(1):
        reserved = reserve(folder, order.stem if number == 1 else f"{order.stem}-{number}")
        if reserved is None:
            continue
        try:
            record = read_record(reserved.record)
            if record is None:
                if not reserved.taken:
                    return reserved, None
            elif record.url == url and record.request.like(order.request, seed=not order.any_seed):
                if record.state == "finished":
                    wanted = not order.again and record.same_server(server)
                else:
                    wanted = True
                if wanted and _is_ours(reserved.clip, record):
                    return reserved, record
        except BaseException:
            reserved.release()
            raise
        reserved.release()
    raise AssertionError("numbers do not end")


def _is_ours(clip: Path, record: Record) -> bool:
    """Whether a file under the clip's name, or none, is what the record says is there."""
    if not os.path.lexists(clip):
        return record.state != "finished"
    return clip.is_file() and record.sha256 is not None and file_digest(clip) == record.sha256
