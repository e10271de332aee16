# SPDX-License-Identifier: Apache-2.0
"""From the fields of a request to what can be queued, references loaded; or everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_h3_plugin.serving.references.load import ReferencePolicy, load
from vllm_h3_plugin.serving.references.media import Media
from vllm_h3_plugin.serving.rules.accepted import Accepted
from vllm_h3_plugin.serving.rules.check import check
from vllm_h3_plugin.serving.rules.fault import Fault
from vllm_h3_plugin.serving.rules.limits import Limits
from vllm_h3_plugin.serving.rules.read import read


@dataclass(frozen=True)
class Admitted:
    """A request that can be queued, and its references. Whoever holds it closes ``media`` in the end."""

    accepted: Accepted
    media: Media


def accept(
    fields: Iterable[tuple[str, Any]], limits: Limits, policy: ReferencePolicy | None = None
) -> Admitted | list[Fault]:
    """Read, load and check. It decodes pictures and may fetch URLs: call it in a thread.

    Args:
        fields: as for :func:`vllm_h3_plugin.serving.rules.read.read`.
        limits: this server's.
        policy: how references are taken; None: the default, which fetches no URL.
    """
    ask, faults = read(fields)
    media, unfit = load(ask.references, policy or ReferencePolicy())
    verdict: Accepted | list[Fault] = []
    try:
        verdict = check(ask, limits, media.facts, [*faults, *unfit])
    finally:
        if not isinstance(verdict, Accepted):
            media.close()
    return Admitted(verdict, media) if isinstance(verdict, Accepted) else verdict
