# SPDX-License-Identifier: Apache-2.0
"""What will really be made of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_h3_plugin.memory.requests import RequestSize
from vllm_h3_plugin.video.geometry import FPS

Task = Literal["t2va", "fl2va", "ref2va"]
Kind = Literal["image", "video", "audio"]


@dataclass(frozen=True)
class Snap:
    """One value that was asked for and will be made otherwise. The client is told; with ``strict`` it is a fault.

    Attributes:
        field: the name as the client wrote it.
        asked: its value.
        made: the value that takes its place; None where the field has no effect.
        why: the reason, a clause without a full stop.
    """

    field: str
    asked: Any
    made: Any
    why: str

    def as_dict(self) -> dict[str, Any]:
        """The snap as a JSON object."""
        return {"field": self.field, "asked": self.asked, "made": self.made, "why": self.why}


@dataclass(frozen=True)
class ReferenceFacts:
    """What a reference turned out to be, from its bytes.

    Attributes:
        field: the name under which the client sent it.
        kind: picture, film or sound.
        nbytes: as sent.
        format: container or picture format, as sniffed (``png``, ``mov``, ``wav``).
        width, height: pixels, after EXIF rotation; 0 for a sound.
        seconds: length; 0 for a picture.
        notes: what was changed to make it fit (``CMYK converted to RGB``).
    """

    field: str
    kind: Kind
    nbytes: int
    format: str
    width: int = 0
    height: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lora:
    """An adapter for one request, in the host's terms.

    Attributes:
        identity: the host keeps an adapter under this number: one of a file that was replaced is another. None: the
            number that the host makes of the path.
    """

    name: str
    path: str
    scale: float | None = None
    identity: int | None = None


@dataclass(frozen=True)
class Accepted:
    """A request that can be queued.

    Attributes:
        prompt: verbatim.
        task: kind of clip.
        width, height: pixels, multiples of 32.
        frames: at 24 a second, 17 n + 5.
        steps: denoise evaluations.
        steps_pinned: they come with the checkpoint or an adapter that has a schedule of its own.
        seed: the client's or the server's; the i-th output is made with ``seed + i``.
        outputs: clips; every one of them is delivered.
        aspect_ratio: the host's name for it; with an explicit size it decides nothing.
        flow_shift, audio_flow_shift: None means the checkpoint's.
        frame_indices: of each picture of ``fl2va``: 0 the first frame, -1 the last.
        quality: the host's level; None means its default.
        lora: adapter; None: none, or one that is fused into the weights.
        adapter: file name of the adapter that takes effect, fused or not; None: the base model.
        model, user: as sent.
        start_time_seconds: where a single reference film begins.
        extra: what else goes to the host's model by name.
        references: facts of each reference, in the order of the request.
        seed_chosen: the server chose the seed.
        return_stage_metrics: the job is to carry the host's stage metrics.
        snaps: what differs from what was asked.
    """

    prompt: str
    task: Task
    width: int
    height: int
    frames: int
    steps: int
    seed: int
    outputs: int = 1
    aspect_ratio: str = "16:9"
    flow_shift: float | None = None
    audio_flow_shift: float | None = None
    frame_indices: tuple[int, ...] = ()
    quality: str | None = None
    lora: Lora | None = None
    adapter: str | None = None
    model: str | None = None
    user: str | None = None
    start_time_seconds: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    references: tuple[ReferenceFacts, ...] = ()
    seed_chosen: bool = False
    return_stage_metrics: bool = False
    steps_pinned: bool = False
    snaps: tuple[Snap, ...] = ()

    @property
    def seconds(self) -> float:
        """Length of the clip."""
        return self.frames / FPS

    @property
    def size(self) -> str:
        """``WxH``, as the API writes it."""
        return f"{self.width}x{self.height}"

    @property
    def request_size(self) -> RequestSize:
        """The quantities that memory and time follow from. A film counts a picture for each of its seconds."""
        films = [reference for reference in self.references if reference.kind == "video"]
        pictures = sum(reference.kind == "image" for reference in self.references)
        return RequestSize(
            self.width,
            self.height,
            self.frames,
            steps=self.steps,
            images=pictures + sum(-int(-film.seconds // 1) for film in films),
            audio_seconds=sum(ref.seconds for ref in self.references if ref.kind == "audio"),
        )

    def told(self) -> dict[str, Any]:
        """What the job's answer says of it."""
        return {
            "task": self.task,
            "size": self.size,
            "num_frames": self.frames,
            "seconds": f"{self.seconds:g}",
            "fps": FPS,
            "num_inference_steps": self.steps,
            "seed": self.seed,
            "seed_chosen": self.seed_chosen,
            "adapter": self.adapter,
            "n": self.outputs,
            "snapped": [snap.as_dict() for snap in self.snaps],
        }
