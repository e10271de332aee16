# SPDX-License-Identifier: Apache-2.0
"""What the fields of an HTTP request ask for, as far as memory follows from it. Nothing here refuses a request.

The host's order of precedence is followed (vLLM-Omni 0.30.0 entrypoints/openai/serving_video.py:386-400,
protocol/videos.py:309-327 and model_executor/models/minimax_h3/encoder_processing.py:150-204). Where a number depends
on a picture or a sound that would have to be decoded first, the largest one that the host would make of it is taken.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.memory.activations import predict_peak
from vllm_h3_plugin.memory.requests import LONGEST_S, PATCH_PIXELS, RequestSize, api_clip_lengths
from vllm_h3_plugin.memory.table import DEFAULT_STEPS, table_size
from vllm_h3_plugin.memory.weights import ModelShapes
from vllm_h3_plugin.quantization.footprint import GIB
from vllm_h3_plugin.settings import Settings
from vllm_h3_plugin.video.geometry import AUDIO_LATENT_RATE, FPS, frames_of_seconds, snap_frames, snap_size

LARGEST_CANVAS = (1344, 768)
"""Pixels of the largest canvas that the host chooses by itself (minimax_h3/preprocessing.py, OUTPUT_MAX_PIXELS)."""

DEFAULT_FRAMES = 209
"""Frames where no length is given: 124 with references and a Ref2VA partition, else 209; the larger one is taken."""

_REFERENCE_FIELDS = {"image_reference": "image", "video_reference": "video", "audio_reference": "audio"}
_PART_KINDS = {"image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio"}
_FILE_FIELDS = {
    "source_video": "video",
    "source_audio": "audio",
    "input_reference": "image",
    "control_reference": "video",
}
_RGB = 3
_LATENT_PIXELS = 16


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        size: the clip, with a picture for each image, and for each second of a reference video, that conditions it.
        videos: reference videos, each taken to be as large and as long as the clip.
        outputs: clips that are made of it, one after the other.
    """

    size: RequestSize
    videos: int = 0
    outputs: int = 1


@dataclass(frozen=True)
class TableRoom:
    """What AdaLN tables may take beside the default one, which is resident.

    Attributes:
        growth: bytes that the tables on the device may grow by, up to ``H3_ADALN_DEVICE_GIB``.
        build: bytes on the device while a table is built: one layer's weights.
        buffer: bytes of host memory that the weights are read into meanwhile.
    """

    growth: int
    build: int
    buffer: int


def table_room(shapes: ModelShapes, values: Settings) -> TableRoom:
    """The room for tables of a server with these settings."""
    default = table_size(shapes.dit, DEFAULT_STEPS).nbytes
    layer = shapes.dit.adaln_out_features * shapes.dit.time_embed_dim * 2
    return TableRoom(max(0, int(values.adaln_device_gib * GIB) - default), layer, values.read_buffer_mib << 20)


@dataclass(frozen=True)
class Model:
    """What a forecast needs to know of the server.

    Attributes:
        quantized: whether linears take FP8 inputs.
        streaming_decode: whether frames are decoded into uint8 as they come (0.30).
        unified: whether host memory counts too.
        tables: room for AdaLN tables of other schedules; None where AdaLN is resident.
        vision_fp32: whether the vision tower computes in FP32.
    """

    shapes: ModelShapes
    quantized: bool
    streaming_decode: bool
    unified: bool
    tables: TableRoom | None = None
    vision_fp32: bool = False

    def forecast(self, asked: Asked) -> dict[str, int]:
        """Phase -> bytes that the request takes beyond what is resident.

        Whether its schedule's table is at hand is not known here, so room for one is always counted.
        """
        phases = self._phases(asked.size)
        if self.tables is not None:
            phases = {name: nbytes + self.tables.growth for name, nbytes in phases.items()}
            host = self.tables.buffer if self.unified else 0
            phases["table"] = self.tables.growth + self.tables.build + host
        if asked.videos:
            longer = replace(asked.size, frames=snap_frames(asked.size.frames * (1 + asked.videos)))
            phases["denoise"] = self._phases(longer)["denoise"]
        if asked.outputs > 1:
            # The host keeps the frames of every clip and then copies them into one tensor.
            clip = _RGB * asked.size.pixels * (1 if self.streaming_decode else 4)
            for name in ("decode", "encode"):
                phases[name] += (2 * asked.outputs - 1) * clip
        return phases

    def what_fits(self, asked: Asked, room: int) -> str:
        """A smaller request that needs no more than ``room`` bytes, in words; empty if there is none."""
        sizes = [(asked.size.width, asked.size.height), *([(768, 448)] if asked.size.width * asked.size.height else [])]
        for width, height in dict.fromkeys(sizes):
            like = replace(asked.size, width=width, height=height)
            # By the very numbers that admission goes by, or the answer would be refused in its turn.
            fitting = [
                frames
                for frames in api_clip_lengths()
                if max(self.forecast(replace(asked, size=replace(like, frames=frames))).values()) <= room
            ]
            longest = fitting[-1] if fitting else 0
            if longest and (width, height, longest) != (asked.size.width, asked.size.height, asked.size.frames):
                longest = min(longest, asked.size.frames)
                return f"{width}x{height} with up to {longest} frames ({longest / FPS:.1f} s) fits"
        return ""

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "quantized": self.quantized,
            "streaming_decode": self.streaming_decode,
            "vision_fp32": self.vision_fp32,
        }

    def _phases(self, size: RequestSize) -> dict[str, int]:
        phases = predict_peak(self.shapes, size, **self._options).phases
        return {phase.name: phase.nbytes if self.unified else phase.device_bytes for phase in phases}


def read(fields: Mapping[str, Any], files: Mapping[str, list[str]]) -> Asked | None:
    """What is asked; None for a request that the host will not understand either.

    Args:
        fields: form fields or the JSON body; values are text or JSON.
        files: field name -> content type of each file in it.
    """
    try:
        flat = _flatten(fields)
        media = _media(flat, files)
        width, height = _size(flat)
        frames = _frames(flat)
        outputs = max(1, int(_number(flat.get("num_outputs_per_prompt", flat.get("n"))) or 1))
        seconds = math.ceil(frames / FPS)
        size = RequestSize(
            width,
            height,
            frames,
            images=media["image"] + media["video"] * seconds,
            audio_seconds=float(LONGEST_S * media["audio"]),
        )
    except (UsageError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return Asked(size, media["video"], outputs)


def of_denoise(inputs: Mapping[str, Any]) -> Asked | None:
    """What a request asks for once the host has prepared it: exact sizes, from the arguments of ``diffuse``.

    Args:
        inputs: ``_MINIMAX_H3_DENOISE_INPUT_KEYS`` of the host's pipeline (pipeline_minimax_h3.py:251). Latents are 16
            pixels a side; a condition's shape is (latent frames, height, width).
    """
    width, height = (_LATENT_PIXELS * int(inputs[name]) for name in ("latent_w", "latent_h"))
    one = inputs.get("visual_condition_shape")
    shapes = inputs.get("visual_condition_shapes") or ([one] if one else [])
    latents = sum(math.prod(shape) for shape in shapes)
    images = math.ceil(latents * _LATENT_PIXELS**2 / (width * height))
    sounds = inputs.get("audio_condition_lengths") or [inputs.get("ref_audio_t") or 0]
    text = int(inputs["text_embeddings"].shape[0]) - images * (width * height) // PATCH_PIXELS**2
    try:
        size = RequestSize(
            width,
            height,
            int(inputs["num_frames"]),
            images=images,
            audio_seconds=sum(sounds) / AUDIO_LATENT_RATE,
            text_tokens=max(1, text),
        )
    except UsageError:
        return None
    return Asked(size)


def _flatten(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with what the nested objects of the video and the chat API say put beside them."""
    flat = dict(fields)
    for name in ("extra_params", "extra_body", "extra_args", "video_params"):
        nested = _json(flat.pop(name, None))
        if isinstance(nested, dict):
            flat = {**flat, **{key: value for key, value in nested.items() if flat.get(key) is None}}
    target = _json(flat.get("target"))
    return {**flat, **target} if isinstance(target, dict) else flat


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") else value


def _size(flat: Mapping[str, Any]) -> tuple[int, int]:
    size = flat.get("size")
    if size:
        width, height = str(size).lower().split("x")
        return snap_size(int(width), int(height))
    sides = _number(flat.get("width")), _number(flat.get("height"))
    if sides[0] is not None and sides[1] is not None:
        return snap_size(int(sides[0]), int(sides[1]))
    return LARGEST_CANVAS


def _frames(flat: Mapping[str, Any]) -> int:
    for name in ("duration_seconds", "duration", "seconds"):
        seconds = _number(flat.get(name))
        if seconds is not None:
            return frames_of_seconds(seconds)
    frames = _number(flat.get("num_frames"))
    return snap_frames(int(frames)) if frames is not None and frames > 1 else DEFAULT_FRAMES


def _media(flat: Mapping[str, Any], files: Mapping[str, list[str]]) -> dict[str, int]:
    """Kind -> number of references."""
    count = {"image": 0, "video": 0, "audio": 0}
    for name, types in files.items():
        for content_type in types:
            kind = content_type.partition("/")[0]
            count[kind if kind in count else _FILE_FIELDS.get(name, "image")] += 1
    for name, kind in _REFERENCE_FIELDS.items():
        value = _json(flat.get(name))
        count[kind] += len(value) if isinstance(value, list) else int(bool(value))
    for message in flat.get("messages") or []:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if part.get("type") in _PART_KINDS:
                count[_PART_KINDS[part["type"]]] += 1
    return count


def _number(value: Any) -> float | None:
    if value is None or value == "":
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is no number")
    return number
