# SPDX-License-Identifier: Apache-2.0
"""What the guard reads out of a request, and the forecast it makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_h3_plugin.host.asked import (
    DEFAULT_FRAMES,
    LARGEST_CANVAS,
    Asked,
    Model,
    TableRoom,
    of_denoise,
    read,
    table_room,
)
from vllm_h3_plugin.memory.requests import RequestSize
from vllm_h3_plugin.memory.weights import ModelShapes
from vllm_h3_plugin.quantization.footprint import GIB
from vllm_h3_plugin.settings import Settings

MODEL = Model(ModelShapes(), quantized=True, streaming_decode=True, unified=True)


def size_of(fields: dict[str, Any], **files: list[str]) -> tuple[int, int, int]:
    asked = read(fields, files)
    assert asked is not None
    return asked.size.width, asked.size.height, asked.size.frames


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"size": "770x450", "num_frames": "96"}, (768, 448, 107)),
        ({"size": "768x448", "seconds": "5", "num_frames": "300"}, (768, 448, 124)),
        ({"width": 768, "height": 448, "num_frames": 124}, (768, 448, 124)),
        ({"width": "64", "size": "768x448", "num_frames": "124"}, (768, 448, 124)),
        ({"prompt": "x"}, (*LARGEST_CANVAS, DEFAULT_FRAMES)),
        ({"size": "768x448", "num_frames": "1"}, (768, 448, DEFAULT_FRAMES)),
        ({"size": "768x448", "extra_params": json.dumps({"duration": 5})}, (768, 448, 124)),
        ({"size": "768x448", "extra_params": {"target": {"duration_seconds": 5}}}, (768, 448, 124)),
        ({"extra_body": {"width": 768, "height": 448, "num_frames": 124}}, (768, 448, 124)),
    ],
)
def test_size_and_length_are_those_that_the_host_would_make(
    fields: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    assert size_of(fields) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"size": "abc"},
        {"size": "0x0"},
        {"size": "16x16"},
        {"seconds": "x"},
        {"seconds": "nan"},
        {"num_frames": "many"},
        {"extra_params": "{"},
        {"messages": ["no object"]},
    ],
)
def test_what_cannot_be_understood_is_left_to_the_host(fields: dict[str, Any]) -> None:
    assert read(fields, {}) is None


def test_references_are_counted_by_kind() -> None:
    fields = {"size": "768x448", "num_frames": "107", "image_reference": '[{"url": "a"}, {"url": "b"}]'}
    files = {"input_references": ["image/png", "video/mp4", "audio/wav"], "input_reference": [""]}
    asked = read(fields, files)
    # Two by address, one PNG, one file of no known type; a video counts a picture for each of its five seconds.
    assert asked == Asked(RequestSize(768, 448, 107, images=4 + 5, audio_seconds=15.0), videos=1)


def test_pictures_of_a_chat_message_are_counted() -> None:
    content = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "a"}}]
    asked = read({"messages": [{"role": "user", "content": content}], "size": "768x448"}, {})
    assert asked is not None and asked.size.images == 1


def test_longer_larger_and_more_need_more() -> None:
    base = read({"size": "768x448", "num_frames": "107"}, {})
    assert base is not None
    for fields, files in (
        ({"size": "768x448", "num_frames": "209"}, {}),
        ({"size": "1344x768", "num_frames": "107"}, {}),
        ({"size": "768x448", "num_frames": "107", "num_outputs_per_prompt": "4"}, {}),
        ({"size": "768x448", "num_frames": "107"}, {"input_references": ["video/mp4"]}),
    ):
        more = read(fields, files)
        assert more is not None
        assert max(MODEL.forecast(more).values()) > max(MODEL.forecast(base).values())


def test_host_memory_counts_only_where_it_is_the_devices() -> None:
    asked = read({"size": "1344x768", "num_frames": "362"}, {})
    assert asked is not None
    discrete = Model(ModelShapes(), quantized=True, streaming_decode=True, unified=False)
    assert discrete.forecast(asked)["encode"] < MODEL.forecast(asked)["encode"]


def test_what_fits_is_a_shorter_clip_of_the_size_or_a_smaller_one_or_nothing() -> None:
    asked = read({"size": "1344x768", "num_frames": "362"}, {})
    assert asked is not None
    shorter = Asked(RequestSize(1344, 768, 209))
    room = max(MODEL.forecast(shorter).values())
    assert MODEL.what_fits(asked, room).startswith("1344x768 with up to 209 frames (8.7 s)")
    small = max(MODEL.forecast(Asked(RequestSize(768, 448, 124))).values())
    assert MODEL.what_fits(asked, small).startswith("768x448 with up to ")
    assert MODEL.what_fits(asked, 0) == ""


@pytest.mark.parametrize("tables", [None, table_room(ModelShapes(), Settings())])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("share", [0.4, 0.5, 0.7, 0.9])
def test_what_fits_is_itself_admitted(tables: TableRoom | None, outputs: int, share: float) -> None:
    model = replace(MODEL, tables=tables)
    asked = read({"size": "1344x768", "num_frames": "362", "n": outputs}, {})
    assert asked is not None and asked.outputs == outputs
    room = round(max(model.forecast(asked).values()) * share)
    answer = model.what_fits(asked, room).split()
    smaller = read({"size": answer[0], "num_frames": int(answer[4]), "n": outputs}, {})
    assert smaller is not None and max(model.forecast(smaller).values()) <= room


def test_prepared_request_is_read_back_to_what_was_asked() -> None:
    inputs = {
        "latent_w": 48,
        "latent_h": 28,
        "num_frames": 124,
        "text_embeddings": SimpleNamespace(shape=(100 + 336, 5120)),
        "visual_condition_shape": (1, 28, 48),
        "visual_condition_shapes": None,
        "audio_condition_lengths": None,
        "ref_audio_t": 80,
    }
    assert of_denoise(inputs) == Asked(RequestSize(768, 448, 124, images=1, audio_seconds=2.0, text_tokens=100))


def test_room_for_the_table_of_another_schedule_is_counted_where_adaln_is_a_table() -> None:
    asked = read({"size": "768x448", "num_frames": "124"}, {})
    assert asked is not None
    room = table_room(ModelShapes(), Settings(adaln_device_gib=1.5, read_buffer_mib=512))
    assert room.growth == int(1.5 * GIB) - 99 * 9_698_304
    assert room.build == 96768 * 2688 * 2 and room.buffer == 512 << 20
    plain, with_tables = MODEL.forecast(asked), replace(MODEL, tables=room).forecast(asked)
    assert all(with_tables[name] == nbytes + room.growth for name, nbytes in plain.items())
    assert with_tables["table"] == room.growth + room.build + room.buffer
    discrete = replace(MODEL, unified=False, tables=room).forecast(asked)
    assert discrete["table"] == room.growth + room.build


def test_a_device_that_keeps_one_table_alone_needs_no_room_for_a_second() -> None:
    assert table_room(ModelShapes(), Settings(adaln_device_gib=0.5)).growth == 0
