# SPDX-License-Identifier: Apache-2.0
"""What a client may send: every field, its type and its range. The OpenAPI description is made from this model.

Ranges that depend on the server are in :class:`~vllm_h3_plugin.serving.rules.limits.Limits`, and are held by
:mod:`.check` with what depends on several fields. Names are OpenAI's and the host's (vLLM-Omni 0.30.0
entrypoints/openai/protocol/videos.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from vllm_h3_plugin.memory.table import DEFAULT_STEPS
from vllm_h3_plugin.serving.rules.accepted import Kind, Task

MAX_STEPS = 200
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
CHOSEN_SEED_BITS = 53
"""Of a seed that the server chooses: the most that every JSON reader returns unchanged (IEEE 754 doubles)."""

MAX_PROMPT_CHARACTERS = 20_000


def _no_truth(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("it is a number, and no truth value")
    return value


def _whole(value: object) -> object:
    """A form's text as the number that it is."""
    return int(value) if isinstance(value, str) and value.strip() in ("0", "-1") else value


def _lower(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


def _readable(value: str) -> str:
    """JSON can carry what no encoder, no tokenizer and no file system takes."""
    if any("\ud800" <= character <= "\udfff" or character == "\0" for character in value):
        raise ValueError("it is no valid Unicode text")
    return value


Text = Annotated[str, AfterValidator(_readable)]
# Ranges stand before the validator: after it they would be missing in the JSON schema.
Whole = Annotated[int, BeforeValidator(_no_truth)]
Seed = Annotated[int, Field(ge=SEED_MIN, le=SEED_MAX), BeforeValidator(_no_truth)]
Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_no_truth)]
Shift = Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False), BeforeValidator(_no_truth)]
Scale = Annotated[float, Field(ge=-10, le=10, allow_inf_nan=False), BeforeValidator(_no_truth)]
Start = Annotated[float, Field(ge=0, le=15, allow_inf_nan=False), BeforeValidator(_no_truth)]

SIZE_PATTERN = r"^[1-9]\d{0,5}x[1-9]\d{0,5}$"


@dataclass(frozen=True)
class Reference:
    """One reference, not looked at yet.

    Attributes:
        field: the name under which the client sent it, with its place in a list.
        kind: what the field is for; None where it may be anything, and the bytes tell.
        file: an upload, readable from its beginning.
        url: ``data:`` or a URL, where it is no upload.
        filename: as sent; only for messages.
    """

    field: str
    kind: Kind | None = None
    file: BinaryIO | None = None
    url: str | None = None
    filename: str | None = None


class LoraAsk(BaseModel):
    """An adapter for this request alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Text = Field(min_length=1, description="A name for it.")
    path: Text = Field(min_length=1, description="Folder or file on the server.")
    scale: Scale | None = Field(default=None, description="Strength; 1 if left out.")


class VideoFields(BaseModel):
    """Every field that has a type of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    prompt: Text = Field(default="", max_length=MAX_PROMPT_CHARACTERS, description="What to show. Required.")
    model: Text | None = Field(default=None, description="Name of the served model; left out, it is not checked.")
    task: Annotated[Task, BeforeValidator(_lower)] | None = Field(
        default=None,
        description="Kind of clip; left out, it follows from the references: none `t2va`, pictures `fl2va`, films or "
        "sounds `ref2va`.",
    )
    size: Annotated[Text, BeforeValidator(_lower)] | None = Field(
        default=None,
        json_schema_extra={"pattern": SIZE_PATTERN, "examples": ["1344x768"]},
        description="`WIDTHxHEIGHT` in pixels; each side is floored to a multiple of 32.",
    )
    width: Whole | None = Field(default=None, description="Pixels; with `height`, in place of `size`.")
    height: Whole | None = Field(default=None, description="Pixels; with `width`, in place of `size`.")
    aspect_ratio: Annotated[Text, BeforeValidator(_lower)] | None = Field(
        default=None,
        description="`21:9`, `16:9`, `4:3`, `1:1`, `3:4`, `9:16` or `auto`. Left out, it follows from `size`, else "
        "from the first picture, else it is 16:9.",
    )
    short_edge: Whole | None = Field(default=None, description="768, the only one that H3 has.")
    seconds: Number | None = Field(
        default=None, description="Length in seconds; made longer, up to the next 17n+5 frames."
    )
    num_frames: Whole | None = Field(
        default=None, description="Length in frames at 24 a second; snapped up to the next 17n+5."
    )
    fps: Number | None = Field(default=None, description="24, the only rate that H3 has.")
    num_inference_steps: Whole | None = Field(default=None, description=f"Denoise steps; {DEFAULT_STEPS} if left out.")
    flow_shift: Shift | None = Field(default=None, description="Schedule shift of the picture.")
    audio_flow_shift: Shift | None = Field(default=None, description="Schedule shift of the sound.")
    seed: Seed | None = Field(default=None, description="Left out, the server chooses one and returns it.")
    n: Whole = Field(default=1, description="Clips; all are delivered, made with seed, seed+1, …")
    quality: Literal["lossless", "high"] | None = Field(
        default=None, description="`high` may skip work between steps, where the host can."
    )
    frame_indices: tuple[Annotated[Literal[0, -1], BeforeValidator(_whole)], ...] | None = Field(
        default=None, description="Where each picture of `fl2va` stands: 0 first frame, -1 last frame."
    )
    start_time_seconds: Start | None = Field(default=None, description="Where a single reference film is taken from.")
    lora: LoraAsk | None = Field(default=None, description="An adapter for this request alone.")
    user: Text | None = Field(default=None, description="Kept beside the job.")
    strict: bool = Field(default=False, description="Refuse what would be snapped or has no effect.")
    return_stage_metrics: bool = Field(default=False, description="The host's stage metrics in the job.")


class VideoAsk(VideoFields):
    """One request for clips, as it was understood.

    Attributes:
        extra_params: for the host's model by name; what has a field stands there.
        references: in the order of the request.
        unused: fields that the host has and H3 makes nothing of: name as written, value.
        written: field -> the name that the client used for it, where that is another.
    """

    extra_params: dict[str, Any] = Field(default_factory=dict)
    references: tuple[Reference, ...] = ()
    unused: tuple[tuple[str, Any], ...] = ()
    written: dict[str, str] = Field(default_factory=dict)
