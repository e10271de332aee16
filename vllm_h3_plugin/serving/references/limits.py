# SPDX-License-Identifier: Apache-2.0
"""What H3 takes as a reference.

Sources, vLLM-Omni 0.30.0: ``entrypoints/openai/video/generation/helpers.py`` (bytes),
``model_executor/models/minimax_h3/preprocessing.py`` (pictures) and ``reference_video.py`` (films and sounds).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_h3_plugin.serving.rules.accepted import Kind
from vllm_h3_plugin.serving.rules.conditions import MAX_TOTAL_S, SHORTEST_REFERENCE_S

_MIB = 1 << 20


@dataclass(frozen=True)
class ReferenceLimits:
    """Ranges of one reference; both ends are allowed.

    Attributes:
        nbytes: most bytes by kind.
        shortest_side, longest_side: pixels of a picture or film. They bound what decoding can take: a picture of
            5760x5760 is 100 MB as RGB.
        flattest: width over height, and its inverse, at most.
        shortest_s, longest_s: seconds of a film or sound.
        slowest_fps, fastest_fps: frames a second of a film.
        tolerance_s: seconds that a container may miss the length by.
        streams: most streams of a film or sound file, of any kind.
        channels: most channels of sound.
    """

    nbytes: dict[Kind, int] = field(
        default_factory=lambda: {"image": 30 * _MIB, "video": 50 * _MIB, "audio": 15 * _MIB}
    )
    shortest_side: int = 256
    longest_side: int = 5760
    flattest: float = 2.5
    shortest_s: float = SHORTEST_REFERENCE_S
    longest_s: float = MAX_TOTAL_S
    slowest_fps: float = 23.976
    fastest_fps: float = 60.0
    tolerance_s: float = 1e-2
    streams: int = 8
    channels: int = 8

    @property
    def most_bytes(self) -> int:
        """Of any kind."""
        return max(self.nbytes.values())

    def size_fault(self, width: int, height: int) -> tuple[str, str] | None:
        """(why, allowed) of a size that is out of range; None for one that is not."""
        sides = f"sides of {self.shortest_side} to {self.longest_side} pixels"
        if min(width, height) < self.shortest_side or max(width, height) > self.longest_side:
            return f"it is {width}x{height} pixels", sides
        if max(width, height) > self.flattest * min(width, height):
            return f"it is {width}x{height} pixels, {width / height:.3g} to 1", (
                f"width over height from {1 / self.flattest:g} to {self.flattest:g}"
            )
        return None
