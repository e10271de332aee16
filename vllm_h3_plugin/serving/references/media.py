# SPDX-License-Identifier: Apache-2.0
"""References as the host takes them: pictures in memory, films and sounds as files that somebody must remove."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_h3_plugin.serving.rules.accepted import Kind, ReferenceFacts

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Loaded:
    """One reference.

    Attributes:
        facts: what it is.
        image: an RGB picture, EXIF rotation applied; None for others.
        path: a temporary file with the right suffix; None for pictures.
    """

    facts: ReferenceFacts
    image: Image | None = None
    path: Path | None = None


@dataclass(frozen=True)
class Media:
    """The references of one request, in order. Whoever holds it calls :meth:`close` once the host is done."""

    items: tuple[Loaded, ...] = ()

    @property
    def facts(self) -> tuple[ReferenceFacts, ...]:
        """What they are."""
        return tuple(item.facts for item in self.items)

    @property
    def images(self) -> list[Image]:
        """Pictures."""
        return [item.image for item in self.items if item.image is not None]

    @property
    def videos(self) -> list[Path]:
        """Files of films."""
        return list(self._paths("video"))

    @property
    def audios(self) -> list[Path]:
        """Files of sounds."""
        return list(self._paths("audio"))

    def close(self) -> None:
        """Remove the files; again is allowed."""
        for item in self.items:
            if item.path is not None:
                item.path.unlink(missing_ok=True)

    def _paths(self, kind: Kind) -> Iterator[Path]:
        return (item.path for item in self.items if item.path is not None and item.facts.kind == kind)
