# SPDX-License-Identifier: Apache-2.0
"""Measured choices of attention kernels in a small JSON file, so that a restarted server need not measure again.

A file holds what was measured on one kind of device with one set of versions: its name is a hash of both, and inside
they stand in words. A damaged file costs a measurement and a line in the log, never a start.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_h3_plugin.attention.choice import Bucket, Choice, Report
from vllm_h3_plugin.attention.preference import NAMES, DeviceFacts
from vllm_h3_plugin.checkpoint.atomic import replacing
from vllm_h3_plugin.errors import SnapshotError

FORMAT = 1


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    query_rows: int = Field(ge=1)
    key_rows: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    dtype: str
    kernel: str
    milliseconds: dict[str, float] = Field(min_length=1)
    refused: dict[str, str]
    heads: int = Field(ge=1)
    rows: int = Field(ge=1)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    format: int
    device: dict[str, str | int | None]
    choices: list[_Entry]


class ChoiceFile:
    """The file for one device and one set of versions.

    Args:
        folder: where it lies; made when something is kept.
        facts: device name, capability, versions of torch, cuDNN and the FlashAttention package.
        plugin: this package's version.
    """

    def __init__(self, folder: Path, facts: DeviceFacts, plugin: str) -> None:
        self._device = {**asdict(facts), "plugin": plugin}
        digest = hashlib.sha256(json.dumps([FORMAT, self._device], sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / f"attention-{digest}.json"

    def recall(self, bucket: Bucket, report: Report) -> Choice | None:
        """See ``choice.Memory``."""
        return self._read(report).get(bucket)

    def keep(self, choice: Choice, report: Report) -> None:
        """See ``choice.Memory``. Adds to what other processes kept meanwhile; of two at once one may be lost."""
        # Damage was reported when the bucket was looked up.
        choices = {**self._read(lambda _: None), choice.bucket: choice}
        content = {
            "format": FORMAT,
            "device": self._device,
            "choices": [_entry(choices[bucket]) for bucket in sorted(choices, key=lambda b: (b.dtype, b.key_rows))],
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as temporary:
                temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except (OSError, SnapshotError) as exc:
            report(f"{self.path} cannot be written ({exc}); the next start measures attention again")

    def _read(self, report: Report) -> dict[Bucket, Choice]:
        try:
            file = _File.model_validate_json(self.path.read_text(encoding="utf-8"))
            if file.format != FORMAT or file.device != self._device:
                raise ValueError("it is of another device or version")
            choices = [_choice(entry) for entry in file.choices]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as exc:
            report(f"{self.path} is damaged ({_reason(exc)}); attention is measured again")
            return {}
        return {choice.bucket: choice for choice in choices}


def _choice(entry: _Entry) -> Choice:
    unknown = {entry.kernel, *entry.milliseconds} - set(NAMES)
    if unknown or entry.kernel not in entry.milliseconds:
        raise ValueError(f"kernel {sorted(unknown)[0] if unknown else entry.kernel!r} was not measured")
    bucket = Bucket(entry.query_rows, entry.key_rows, entry.head_dim, entry.dtype)
    return Choice(
        bucket, entry.kernel, "remembered", entry.milliseconds, entry.refused, heads=entry.heads, rows=entry.rows
    )


def _entry(choice: Choice) -> dict[str, Any]:
    fields = asdict(replace(choice, milliseconds=dict(choice.milliseconds), refused=dict(choice.refused)))
    del fields["origin"]
    return {**fields.pop("bucket"), **fields}


def _reason(exc: Exception) -> str:
    if isinstance(exc, ValidationError):
        first = exc.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place}: {first['msg']}" if place else str(first["msg"])
    return str(exc)
