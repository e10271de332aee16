# SPDX-License-Identifier: Apache-2.0
"""A request's peak by phase, tokens against published sizes, and the longest clip that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_h3_plugin.checkpoint.synthetic import tiny_dit
from vllm_h3_plugin.checkpoint.synthetic.spec import tiny_text
from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.memory import requests
from vllm_h3_plugin.memory.activations import Peak, Phase, predict_peak, tiles_at_once
from vllm_h3_plugin.memory.coefficients import DEFAULT, UNMEASURED, Coefficients
from vllm_h3_plugin.memory.fit import free_for_requests, longest_clip
from vllm_h3_plugin.memory.requests import RequestSize, api_clip_lengths
from vllm_h3_plugin.memory.table import table_size
from vllm_h3_plugin.memory.weights import ModelShapes
from vllm_h3_plugin.video import geometry

TRUE = ModelShapes()
TINY = ModelShapes(tiny_dit(), tiny_text(), {"video_vae": 1, "audio_vae": 1})
GIB = 2**30


def phase(peak: Peak, name: str) -> Phase:
    return next(phase for phase in peak.phases if phase.name == name)


@pytest.mark.parametrize(
    ("size", "tokens"), [((768, 448, 56), 6016), ((768, 448, 124), 12_900), ((1344, 768, 124), 38_000)]
)
def test_tokens_are_the_published_ones(size: tuple[int, int, int], tokens: int) -> None:
    assert RequestSize(*size, text_tokens=100).tokens == pytest.approx(tokens, rel=0.01)


def test_tokens_by_hand_with_a_picture_and_sound() -> None:
    request = RequestSize(64, 96, 22, images=1, audio_seconds=2, text_tokens=10)
    assert request.latent_frames == 7
    assert request.text_rows == 10 + 6 and request.video_rows == 8 * 6
    assert request.audio_rows == 2 * (round(40 * 22 / 24) + 80)
    assert request.tokens == 320  # 16 + 48 + 234 = 298, up to 64
    assert request.roles == {"image", "audio"}


def test_lengths_agree_with_what_clips_really_have() -> None:
    """memory/ may not import video/, so the two spell the geometry out apart."""
    lengths = list(api_clip_lengths())
    asked = range(requests.SHORTEST_S * geometry.FPS, requests.LONGEST_S * geometry.FPS + 1)
    assert lengths == sorted({geometry.snap_frames(frames) for frames in asked})
    assert (requests.FPS, requests.PATCH_PIXELS) == (geometry.FPS, geometry.SIZE_MULTIPLE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 770}, r"770x448.*multiples of 32"),
        ({"height": 0}, r"768x0.*multiples of 32"),
        ({"frames": 120}, r"frames=120.*17 n \+ 5.*124"),
        ({"steps": 0}, r"steps=0.*at least one step"),
        ({"images": -1}, "images=-1"),
    ],
)
def test_a_size_that_no_request_has_is_refused(change: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        replace(RequestSize(768, 448, 124), **change)  # type: ignore[arg-type]


def test_the_widest_place_of_a_true_block_is_the_attention_projection() -> None:
    """Per row: 2 h held outside; input and output of the attention 2 h, qkv 3 d, rotated q and k 2 d, result d."""
    request = RequestSize(1344, 768, 124)
    terms = phase(predict_peak(TRUE, request, quantized=False), "denoise").device
    assert terms["rows held across blocks"] == request.tokens * 2 * 5376 * 2
    assert terms["widest place of a block"] == request.tokens * ((2 * 5376 + 6 * 7168) * 2 + 56 * 4)


def test_the_widest_place_of_a_quantized_block_is_the_activation_of_its_mlp() -> None:
    """Per row: residual h, FP8 input h, fc1's output 2 f, the activation f in FP8, and two scales."""
    request = RequestSize(1344, 768, 124)
    terms = phase(predict_peak(TRUE, request), "denoise").device
    assert terms["widest place of a block"] == request.tokens * (3 * 5376 + 5 * 14336 + 2 * 4)


def test_wide_heads_move_the_widest_place_to_the_attention() -> None:
    wide = replace(TRUE, dit=replace(TRUE.dit, num_attention_heads=4 * 56))
    request = RequestSize(768, 448, 124)
    terms = phase(predict_peak(wide, request), "denoise").device
    assert terms["widest place of a block"] == request.tokens * (5376 + 8 * 4 * 7168 + 4 * 56 * 4 + 4)


def test_a_wide_ffn_moves_the_widest_place_to_the_mlp() -> None:
    wide = replace(TRUE, dit=replace(TRUE.dit, ffn_hidden_size=4 * 14336))
    request = RequestSize(768, 448, 124)
    terms = phase(predict_peak(wide, request, quantized=False), "denoise").device
    assert terms["widest place of a block"] == request.tokens * (2 * 5376 + 3 * 4 * 14336) * 2


def test_denoise_grows_with_the_tokens_and_shrinks_with_ranks() -> None:
    small, large = RequestSize(768, 448, 124), RequestSize(1344, 768, 124)
    one, two = (phase(predict_peak(TRUE, size), "denoise").device_bytes for size in (small, large))
    assert 2.5 < two / one < large.tokens / small.tokens
    assert phase(predict_peak(TRUE, large, tp=2), "denoise").device_bytes < 0.7 * two


def test_decode_holds_uint8_frames_twice_or_fp32_frames_twice() -> None:
    request = RequestSize(768, 448, 124)
    values = 768 * 448 * 124 * 3
    assert phase(predict_peak(TRUE, request), "decode").device["frames"] == 2 * values
    assert phase(predict_peak(TRUE, request, streaming_decode=False), "decode").device["frames"] == 8 * values
    assert phase(predict_peak(TRUE, request), "encode").host["frames as arrays"] == 3 * values


def test_each_further_tile_of_a_batch_takes_its_share() -> None:
    request = RequestSize(1344, 768, 124)
    one, seven = (phase(predict_peak(TRUE, request, decode_batch=batch), "decode") for batch in (1, 7))
    assert "further tiles of a batch" not in one.device
    assert seven.device["further tiles of a batch"] == 6 * DEFAULT.decode_more_tile_bytes
    # A tile of the released VAE is 1797 tokens; the widest place of a block takes 78 KB of each.
    assert DEFAULT.decode_more_tile_bytes == pytest.approx(1797 * 77_824)


def test_as_many_tiles_are_decoded_at_once_as_the_prediction_lets_in() -> None:
    request = RequestSize(1344, 768, 124)

    def taken(batch: int) -> int:
        return phase(predict_peak(TRUE, request, decode_batch=batch), "decode").device_bytes

    for batch in (1, 2, 9, 28):
        assert tiles_at_once(request, taken(batch), tiles=28) == batch
        assert tiles_at_once(request, taken(batch) - 1, tiles=28) == max(1, batch - 1)
    assert tiles_at_once(request, taken(40), tiles=28) == 28
    assert tiles_at_once(request, -5 * GIB, tiles=28) == tiles_at_once(request, 0, tiles=28) == 1
    # 0.28 keeps whole frames in FP32 beside the tiles.
    assert tiles_at_once(request, taken(9), tiles=28, streaming=False) < 9


def test_pictures_add_a_phase_and_text_rows() -> None:
    plain, with_picture = (RequestSize(768, 448, 124, images=count) for count in (0, 1))
    peak = predict_peak(TRUE, with_picture)
    assert [phase.name for phase in peak.phases] == ["references", "text", "denoise", "decode", "encode"]
    assert "vision tower" in phase(peak, "text").device
    assert phase(peak, "denoise").nbytes > phase(predict_peak(TRUE, plain), "denoise").nbytes
    wide = phase(predict_peak(TRUE, with_picture, vision_fp32=True), "text")
    assert wide.device["vision tower"] == 2 * phase(peak, "text").device["vision tower"]


def test_a_new_schedules_table_is_there_in_every_phase() -> None:
    request, table = RequestSize(768, 448, 124, steps=30), table_size(TRUE.dit, 30)
    without, with_table = (predict_peak(TRUE, request, new_table=new) for new in (None, table))
    grown = round(DEFAULT.allocator_factor * table.nbytes)
    for before, after in zip(without.phases, with_table.phases, strict=True):
        assert after.device_bytes - before.device_bytes == pytest.approx(grown, abs=2)


def test_unified_memory_adds_host_and_device_of_one_phase() -> None:
    peak = predict_peak(TRUE, RequestSize(1344, 768, 362))
    assert peak.unified_bytes == max(p.device_bytes + p.host_bytes for p in peak.phases)
    assert peak.device_bytes <= peak.unified_bytes and peak.widest.nbytes == peak.unified_bytes


def test_a_tiny_model_is_predicted_too() -> None:
    request = RequestSize(64, 64, 107, steps=2, text_tokens=20)
    tiny, true = (phase(predict_peak(shapes, request), "denoise") for shapes in (TINY, TRUE))
    assert 0 < tiny.device["widest place of a block"] < true.device["widest place of a block"] / 50


def test_every_coefficient_names_its_source() -> None:
    sources = Coefficients.sources()
    assert set(sources) == set(vars(DEFAULT)) and all(sources.values())
    assert UNMEASURED in sources.values()


def test_the_longest_clip_fits_and_the_next_one_does_not() -> None:
    like, lengths = RequestSize(1344, 768, 107), list(api_clip_lengths())
    free = 8 * GIB
    fit = longest_clip(lambda request: predict_peak(TRUE, request), like, free)
    assert fit.longest is not None and fit.longest.unified_bytes <= free and fit.missing_bytes == 0
    following = lengths[lengths.index(fit.longest.request.frames) + 1]
    assert predict_peak(TRUE, replace(like, frames=following)).unified_bytes > free
    assert fit.seconds == fit.longest.request.frames / 24


def test_where_nothing_fits_the_shortest_clip_says_what_is_missing() -> None:
    fit = longest_clip(lambda request: predict_peak(TRUE, request), RequestSize(1344, 768, 124), GIB)
    assert fit.longest is None and fit.seconds == 0
    assert fit.shortest.request.frames == 107
    assert fit.missing_bytes == fit.shortest.unified_bytes - GIB


def test_room_for_requests_is_memory_less_model_floor_and_processes() -> None:
    assert free_for_requests(64, 50 * GIB, 6) == 8 * GIB - DEFAULT.process_bytes
