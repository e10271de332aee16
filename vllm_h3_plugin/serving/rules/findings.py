# SPDX-License-Identifier: Apache-2.0
"""What the rules find while they go through a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_h3_plugin.serving.rules.accepted import Snap
from vllm_h3_plugin.serving.rules.ask import VideoAsk
from vllm_h3_plugin.serving.rules.fault import Code, Fault, shown


@dataclass
class Findings:
    """Faults and snaps of one request, under the names that the client used."""

    ask: VideoAsk
    faults: list[Fault] = field(default_factory=list)
    snaps: list[Snap] = field(default_factory=list)

    def name(self, canonical: str) -> str:
        """A field as the client wrote it."""
        return self.ask.written.get(canonical, canonical)

    def fault(
        self,
        canonical: str,
        value: Any,
        why: str,
        allowed: str = "",
        nearest: Any = None,
        code: Code = "invalid_value",
    ) -> None:
        """Something that cannot be honoured."""
        self.faults.append(Fault(self.name(canonical), shown(value), why, allowed, nearest, code))

    def snap(self, canonical: str, asked: Any, made: Any, why: str) -> None:
        """Something that is made otherwise than asked."""
        self.snaps.append(Snap(self.name(canonical), shown(asked), made, why))

    def within(self, canonical: str, value: float, low: float, high: float, unit: str = "") -> bool:
        """Whether a number is in a range; a fault with the nearer end if it is not."""
        if low <= value <= high:
            return True
        allowed = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        self.fault(canonical, value, "it is out of range", f"{allowed}{unit}", low if value < low else high)
        return False


def strict_faults(snaps: Sequence[Snap]) -> list[Fault]:
    """What ``strict`` makes of snaps."""
    return [
        Fault(
            snap.field,
            snap.asked,
            f"{snap.why}, and `strict` is set",
            "leave it out" if snap.made is None else f"{snap.made}",
            snap.made,
        )
        for snap in snaps
    ]
