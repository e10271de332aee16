# SPDX-License-Identifier: Apache-2.0
"""Which H.264 encoder makes the clips: the card's, if it really has one, else x264 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from vllm_h3_plugin.errors import BackendError

SOFTWARE = "libx264"
HARDWARE = "h264_nvenc"

CRF = "18"
"""What the host encodes with (vllm_omni/diffusion/utils/media_utils.py, ``mux_video_audio_bytes``)."""

# Constant quality. P5 and this cq are NVIDIA's own advice for stored video; B-frames are left out, as by the host.
_HARDWARE_OPTIONS = {"preset": "p5", "tune": "hq", "rc": "vbr", "cq": "19", "b": "0", "bf": "0"}

_PROBE_SIDE = 256
"""NVENC refuses frames below some 150 pixels a side."""
_PROBE_FRAMES = 4


@dataclass(frozen=True)
class Encoder:
    """An encoder and how it is set.

    Attributes:
        codec: FFmpeg's name.
        options: its private options.
        reason: why this one.
    """

    codec: str
    options: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For ``/v1/h3/info``."""
        return {"codec": self.codec, "options": dict(self.options), "reason": self.reason}


def software(preset: str, reason: str = "") -> Encoder:
    """x264 with the host's own quality; ``ultrafast`` is the host's preset too."""
    return Encoder(SOFTWARE, {"preset": preset, "crf": CRF, "threads": "0"}, reason)


def hardware(reason: str = "") -> Encoder:
    """NVENC."""
    return Encoder(HARDWARE, dict(_HARDWARE_OPTIONS), reason)


def choose(wanted: str, preset: str, fault_of: Callable[[Encoder], str | None] | None = None) -> Encoder:
    """The encoder of this process.

    Args:
        wanted: ``auto``, ``software`` or ``nvenc``.
        preset: of x264.
        fault_of: tries an encoder and says why it does not work; None if it does. Unset: :func:`fault`.

    Raises:
        BackendError: NVENC was asked for and does not work.
    """
    if wanted == "software":
        return software(preset, "asked for")
    why = (fault_of or fault)(hardware())
    if why is None:
        return hardware("asked for" if wanted == "nvenc" else "it works here")
    if wanted == "nvenc":
        raise BackendError(
            "H3_ENCODER=nvenc: this machine does not encode with NVENC",
            why=why,
            fix="Set H3_ENCODER=auto, which uses x264 then, or repair the driver (libnvidia-encode).",
        )
    return software(preset, f"{HARDWARE} does not work here: {why}")


def fault(encoder: Encoder) -> str | None:
    """Encode a few frames with it; says why that fails, or None. A driver that names an encoder may not have one."""
    import av

    try:
        context: Any = av.CodecContext.create(encoder.codec, "w")
        context.width = context.height = _PROBE_SIDE
        context.pix_fmt = "yuv420p"
        context.time_base = Fraction(1, 24)
        context.options = dict(encoder.options)
        size = 0
        for number in range(_PROBE_FRAMES):
            frame = av.VideoFrame(_PROBE_SIDE, _PROBE_SIDE, "yuv420p")
            frame.pts = number
            size += sum(packet.size for packet in context.encode(frame))
        size += sum(packet.size for packet in context.encode())
    except (av.FFmpegError, OSError, ValueError) as exc:
        # Beyond the first quotation FFmpeg repeats the options.
        return " ".join(str(exc).partition(", {")[0].split()).strip("'\"")
    return None if size else "it encoded frames to nothing"
