# SPDX-License-Identifier: Apache-2.0
"""What was asked of a clip, and what the checks found: plain values, no media library."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from vllm_h3_plugin.errors import ClipError, UsageError
from vllm_h3_plugin.video import geometry

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_h3_plugin.video.measure import PictureFacts, SoundFacts
    from vllm_h3_plugin.video.probe import ClipFacts

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Expectation:
    """What was asked of the model, in the words of the request; None: not asked.

    The clip is held to what H3 makes of it: frames snapped up to 17n + 5, sides floored to multiples of 32.

    Attributes:
        width, height: pixels; both or neither.
        frames: the request's ``num_frames``.
        seconds: the request's duration.
        fps: frames a second.
        audio_required: a missing sound stream is a failure, and silence is worth a warning.

    Raises:
        UsageError: values that cannot be asked for, or that contradict each other.
    """

    width: int | None = None
    height: int | None = None
    frames: int | None = None
    fps: Fraction | int = geometry.FPS
    seconds: float | None = None
    audio_required: bool = True

    def __post_init__(self) -> None:
        if (self.width is None) != (self.height is None):
            raise UsageError("size", why="width or height alone says nothing", fix="Give both, for example 768x448.")
        if self.fps <= 0:
            raise UsageError(f"fps={self.fps}", why="it is not positive", fix=f"H3 makes {geometry.FPS} fps.")
        _ = self.wanted_size
        if self.frames is not None and self.seconds is not None:
            by_frames, by_seconds = geometry.snap_frames(self.frames), geometry.frames_of_seconds(self.seconds)
            if by_frames != by_seconds:
                raise UsageError(
                    f"frames={self.frames} and seconds={self.seconds:g} contradict each other",
                    why=f"they make {by_frames} and {by_seconds} frames",
                    fix="Give one of them.",
                )
        _ = self.wanted_frames

    @property
    def wanted_frames(self) -> int | None:
        """Frames that H3 delivers for what was asked; None if no length was asked."""
        if self.frames is not None:
            return geometry.snap_frames(self.frames)
        return None if self.seconds is None else geometry.frames_of_seconds(self.seconds)

    @property
    def wanted_size(self) -> tuple[int, int] | None:
        """(width, height) that H3 delivers for what was asked; None if no size was asked."""
        if self.width is None or self.height is None:
            return None
        return geometry.snap_size(self.width, self.height)


@dataclass(frozen=True)
class Check:
    """One check: what was seen and wanted, and for a failure or warning why it matters and what to do."""

    name: str
    status: Status
    seen: str
    wanted: str = ""
    why: str = ""
    fix: str = ""

    def strictly(self) -> Check:
        """The same check with a warning made a failure."""
        return replace(self, status="fail") if self.status == "warn" else self


@dataclass(frozen=True)
class Verdict:
    """All checks of one clip. ``facts`` is None if the file could not even be opened as a clip."""

    path: Path
    checks: tuple[Check, ...]
    facts: ClipFacts | None = None
    picture: PictureFacts | None = None
    sound: SoundFacts | None = None
    fault: ClipError | None = None

    @property
    def ok(self) -> bool:
        """No check failed; warnings are allowed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Check, ...]:
        """Checks that failed."""
        return tuple(check for check in self.checks if check.status == "fail")

    @property
    def warnings(self) -> tuple[Check, ...]:
        """Checks that warn."""
        return tuple(check for check in self.checks if check.status == "warn")

    @property
    def sha256(self) -> str | None:
        """Hexadecimal digest of the file, if it could be read as a clip."""
        return self.facts.sha256 if self.facts else None

    def error(self) -> ClipError | None:
        """The first failure as an error that names the clip; None if the clip is good."""
        if self.fault is not None:
            return self.fault
        if not self.failures:
            return None
        first, *others = self.failures
        also = f" (also failed: {', '.join(check.name for check in others)})" if others else ""
        wanted = f", wanted {first.wanted}" if first.wanted else ""
        return ClipError(
            f"{self.path}: {first.name}: {first.seen}{wanted}{also}",
            why=first.why,
            fix=first.fix,
            fault=first.name.replace(" ", "_"),
            check=first.name,
        )

    def raise_if_failed(self) -> None:
        """Raise :meth:`error` if there is one.

        Raises:
            ClipError: a check failed.
        """
        error = self.error()
        if error is not None:
            raise error

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable form: the file, every check, facts and measurements."""
        error = self.error()
        return {
            "path": str(self.path),
            "ok": self.ok,
            "sha256": self.sha256,
            "checks": [vars(check) for check in self.checks],
            "facts": self.facts.as_dict() if self.facts else None,
            "picture": vars(self.picture) if self.picture else None,
            # JSON has no infinity: digital silence is null.
            "sound": {k: v if math.isfinite(v) else None for k, v in vars(self.sound).items()} if self.sound else None,
            "error": error.as_dict() if error else None,
        }
