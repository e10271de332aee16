# SPDX-License-Identifier: Apache-2.0
"""What clip is made of a request: size, length, kind, seed; what is snapped, and what is refused with the way out."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_h3_plugin.serving.rules.accepted import Accepted, ReferenceFacts
from vllm_h3_plugin.serving.rules.canvas import canvas, nearest_size
from vllm_h3_plugin.serving.rules.check import check
from vllm_h3_plugin.serving.rules.fault import Fault
from vllm_h3_plugin.serving.rules.limits import Limits, Misfit
from vllm_h3_plugin.serving.rules.read import read

ALL = Limits(tasks=("t2va", "fl2va", "ref2va"))
IMAGE = ReferenceFacts("input_reference", "image", 1000, "png", 1920, 1080)
FILM = ReferenceFacts("video_reference", "video", 1000, "mp4", 1280, 720, 5.0)
SOUND = ReferenceFacts("audio_reference", "audio", 1000, "wav", seconds=5.0)


def _verdict(
    limits: Limits = ALL, references: tuple[ReferenceFacts, ...] = (), **fields: Any
) -> Accepted | list[Fault]:
    sent = [("input_references", "data:,") for _ in references]
    ask, faults = read([("prompt", "a kite"), *sent, *fields.items()])
    return check(ask, limits, references, faults)


def _accepted(limits: Limits = ALL, references: tuple[ReferenceFacts, ...] = (), **fields: Any) -> Accepted:
    verdict = _verdict(limits, references, **fields)
    assert isinstance(verdict, Accepted), [str(fault) for fault in verdict]
    return verdict


def _fault(limits: Limits = ALL, references: tuple[ReferenceFacts, ...] = (), **fields: Any) -> Fault:
    verdict = _verdict(limits, references, **fields)
    assert isinstance(verdict, list) and len(verdict) == 1, verdict
    return verdict[0]


def test_a_prompt_alone_makes_the_hosts_default_clip() -> None:
    made = _accepted()
    assert (made.task, made.size, made.frames, made.steps, made.outputs) == ("t2va", "1344x768", 209, 50, 1)
    assert made.aspect_ratio == "16:9" and made.snaps == ()


@pytest.mark.parametrize("size", ["1280x720", "720x1280", "1024x1792", "1792x1024"])
def test_every_size_of_openais_client_is_made(size: str) -> None:
    made = _accepted(size=size, seconds="4")
    assert (made.width % 32, made.height % 32, made.frames) == (0, 0, 107)
    if size == "1280x720":
        assert made.size == "1280x704"
        told = made.told()["snapped"]
        assert told[0] == {
            "field": "size",
            "asked": "1280x720",
            "made": "1280x704",
            "why": "sides are multiples of 32",
        }
        assert (told[1]["field"], told[1]["asked"], told[1]["made"]) == ("seconds", 4.0, 4.4583)


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ("0x0", "32x32"),
        ("16x16", "32x32"),
        ("512x64", "256x64"),
        ("64x512", "64x256"),
        ("100000x100000", "1440x1440"),
        ("2000x1200", "1856x1088"),
    ],
)
def test_sizes_out_of_range_are_refused_with_the_nearest(asked: str, nearest: str) -> None:
    fault = _fault(size=asked)
    assert (fault.field, fault.value, fault.nearest) == ("size", asked, nearest)
    assert _accepted(size=nearest).size == nearest


def test_width_and_height_are_named_as_they_were_sent() -> None:
    verdict = _verdict(width=5000, height=5000)
    assert isinstance(verdict, list)
    assert [(fault.field, fault.value, fault.nearest) for fault in verdict] == [
        ("width", 5000, 1440),
        ("height", 5000, 1440),
    ]
    made = _accepted(width=770, height=448)
    assert made.size == "768x448" and [(snap.field, snap.made) for snap in made.snaps] == [("width", 768)]


def test_one_side_alone_is_refused() -> None:
    fault = _fault(width=768)
    assert (fault.field, fault.code) == ("height", "missing_parameter")
    assert _fault(height=768).field == "width"


@pytest.mark.parametrize(("asked", "nearest"), [("96x56", "416x256"), ("64x64", "256x256"), ("270x500", None)])
def test_a_host_that_fits_pictures_to_the_clip_makes_no_small_ones_of_them(asked: str, nearest: str | None) -> None:
    limits = replace(ALL, least_with_pictures=256)
    if nearest is None:
        assert _accepted(limits, (IMAGE,), size=asked).size == "256x480"
    else:
        fault = _fault(limits, (IMAGE,), size=asked)
        assert (fault.field, fault.nearest) == ("size", nearest)
        assert "at least 256 pixels where pictures come with it" in fault.why and "sides of 256" in fault.allowed
        assert _accepted(limits, (IMAGE,), size=nearest).size == nearest
    assert _accepted(limits, (FILM,), size="64x64").size == _accepted(ALL, (IMAGE,), size="64x64").size == "64x64"


def test_two_sizes_that_disagree_are_refused() -> None:
    assert _fault(size="1344x768", width=1280, height=768).field == "width"
    assert _accepted(size="1344x768", width=1344, height=768).size == "1344x768"


@pytest.mark.parametrize("size", ["abc", "1344", "x", "1344x768x2", "-1x5"])
def test_what_is_no_size_is_refused_with_an_example(size: str) -> None:
    assert "1344x768" in _fault(size=size).allowed


def test_the_nearest_size_is_always_a_size_that_is_made() -> None:
    generator = random.Random(3)
    sides = [1, 31, 32, 33, 63, 64, 1000, 5000, 99_999, *(generator.randint(1, 9000) for _ in range(30))]
    for (width, height), most in itertools.product(itertools.product(sides, sides), (32 * 32, 768 * 448, 1920 * 1088)):
        made = nearest_size(width, height, most)
        assert min(made) >= 32 and made[0] % 32 == made[1] % 32 == 0, (width, height, made)
        assert max(made) <= 4 * min(made) and made[0] * made[1] <= most, (width, height, made)


@pytest.mark.parametrize(
    ("ratio", "size"),
    [("16:9", "1344x768"), ("9:16", "768x1344"), ("1:1", "768x768"), ("4:3", "1024x768"), ("21:9", "1536x672")],
)
def test_a_ratio_without_a_size_makes_the_hosts_canvas(ratio: str, size: str) -> None:
    made = _accepted(aspect_ratio=ratio)
    assert (made.size, made.aspect_ratio) == (size, ratio)


def test_a_missing_ratio_follows_from_the_size() -> None:
    assert _accepted(size="768x1344").aspect_ratio == "9:16"
    assert _accepted(size="512x512", aspect_ratio="auto").aspect_ratio == "1:1"
    assert _accepted(aspect_ratio="1.7777777").aspect_ratio == "16:9"


def test_a_ratio_that_the_size_contradicts_is_told() -> None:
    made = _accepted(size="512x512", aspect_ratio="16:9")
    assert [(snap.field, snap.asked, snap.made) for snap in made.snaps] == [("aspect_ratio", "16:9", "1:1")]


@pytest.mark.parametrize(
    ("ratio", "nearest"), [("2:1", "16:9"), ("3:2", "4:3"), ("0.5", "9:16"), ("wide", None), ("1:0", None)]
)
def test_a_ratio_that_h3_has_not_is_refused(ratio: str, nearest: str | None) -> None:
    fault = _fault(aspect_ratio=ratio)
    assert fault.nearest == nearest and "21:9, 16:9, 4:3, 1:1, 3:4, 9:16" in fault.allowed


@pytest.mark.parametrize("fps", [25, "30", 0, 23.976])
def test_other_frame_rates_are_refused_with_24(fps: Any) -> None:
    fault = _fault(fps=fps)
    assert (fault.field, fault.nearest) == ("fps", 24)
    assert _accepted(fps="24").frames == 209


@pytest.mark.parametrize(
    ("field", "asked", "frames"),
    [
        ("seconds", "4", 107),
        ("seconds", 8, 192),
        ("seconds", "12", 294),
        ("seconds", 15, 362),
        ("seconds", 362 / 24, 362),
        ("seconds", 15.05, 362),
        ("num_frames", 96, 107),
        ("num_frames", "124", 124),
        ("num_frames", 125, 141),
        ("num_frames", 360, 362),
        ("num_frames", 362, 362),
    ],
)
def test_lengths_are_made_as_17n_plus_5(field: str, asked: Any, frames: int) -> None:
    made = _accepted(**{field: asked})
    assert made.frames == frames and made.seconds == frames / 24
    snapped = [snap.field for snap in made.snaps]
    exact = frames == (round(float(asked) * 24) if field == "seconds" else int(asked))
    assert snapped == ([] if exact else [field])


@pytest.mark.parametrize(
    ("field", "asked", "allowed", "nearest"),
    [
        ("seconds", 2, "4 to 15 seconds", 4),
        ("seconds", 3.99, "4 to 15 seconds", 4),
        ("seconds", 20, "4 to 15 seconds", 15),
        ("seconds", -5, "4 to 15 seconds", 4),
        ("seconds", 1e300, "4 to 15 seconds", 15),
        ("num_frames", 90, "96 to 362", 96),
        ("num_frames", 363, "96 to 362", 362),
        ("num_frames", 0, "96 to 362", 96),
        ("num_frames", 2**62, "96 to 362", 362),
    ],
)
def test_lengths_out_of_range_are_refused_with_the_nearest(field: str, asked: Any, allowed: str, nearest: int) -> None:
    fault = _fault(**{field: asked})
    assert (fault.field, fault.allowed, fault.nearest) == (field, allowed, nearest)
    _accepted(**{field: nearest})


def test_two_lengths_must_make_the_same_clip() -> None:
    assert _accepted(seconds=5, num_frames=120).frames == 124
    fault = _fault(seconds=5, num_frames=209)
    assert fault.field == "num_frames" and fault.nearest == 124


def test_strict_refuses_what_would_be_snapped_and_takes_what_it_says() -> None:
    verdict = _verdict(size="1280x720", seconds=4, strict=True)
    assert isinstance(verdict, list)
    assert {fault.field: fault.nearest for fault in verdict} == {"size": "1280x704", "seconds": 4.4583}
    made = _accepted(size="1280x704", seconds=4.4583, strict=True)
    assert made.snaps == () and made.frames == 107


@pytest.mark.parametrize(("steps", "nearest"), [(0, 1), (-3, 1), (201, 200), (10_000, 200)])
def test_steps_out_of_range_are_refused_with_the_nearest(steps: int, nearest: int) -> None:
    fault = _fault(num_inference_steps=steps)
    assert (fault.field, fault.allowed, fault.nearest) == ("num_inference_steps", "1 to 200", nearest)
    assert _fault(steps=steps).field == "steps"


def test_a_host_may_make_fewer_steps() -> None:
    ask, found = read([("prompt", "a kite"), ("num_inference_steps", "200")])
    verdict = check(ask, Limits(most_steps=199), found=found)
    assert isinstance(verdict, list) and (verdict[0].allowed, verdict[0].nearest) == ("1 to 199", 199)


def test_a_distilled_checkpoint_makes_its_own_number_of_steps() -> None:
    distilled = replace(ALL, steps=4, steps_fixed=True)
    assert _accepted(distilled).steps == _accepted(distilled, steps=4).steps == 4
    assert _fault(distilled, steps=50).nearest == 4


def test_the_seed_is_the_clients_or_one_that_every_json_reader_keeps() -> None:
    assert _accepted(seed="-7").seed == -7 and not _accepted(seed=0).seed_chosen
    chosen = {_accepted().seed for _ in range(20)}
    assert len(chosen) == 20 and all(0 <= seed < 2**53 and seed == int(float(seed)) for seed in chosen)
    assert _accepted().seed_chosen and isinstance(_accepted().told()["seed"], int)


def test_as_many_clips_as_are_delivered_and_no_more() -> None:
    assert _fault(n=2).nearest == 1
    four = replace(ALL, outputs=4)
    assert _accepted(four, n=4).outputs == 4
    assert (_fault(four, n=5).allowed, _fault(four, num_outputs_per_prompt=0).field) == (
        "1 to 4",
        "num_outputs_per_prompt",
    )
    last = 2**63 - 1
    assert _accepted(four, n=1, seed=last).seed == last
    assert _fault(four, n=4, seed=last).nearest == last - 3


def test_another_model_is_refused_with_the_one_that_is_served() -> None:
    served = replace(ALL, model="MiniMax-H3")
    assert _fault(served, model="sora-2").nearest == "MiniMax-H3"
    assert _accepted(served, model="MiniMax-H3").model == "MiniMax-H3"
    assert _accepted(ALL, model="anything").model == "anything"


@pytest.mark.parametrize(
    ("references", "task"),
    [
        ((), "t2va"),
        ((IMAGE,), "fl2va"),
        ((IMAGE, IMAGE), "fl2va"),
        ((IMAGE, FILM), "ref2va"),
        ((IMAGE, SOUND), "ref2va"),
    ],
)
def test_the_kind_of_clip_follows_from_the_references(references: tuple[ReferenceFacts, ...], task: str) -> None:
    assert _accepted(references=references).task == task


def test_a_server_of_references_alone_takes_pictures_as_references() -> None:
    made = _accepted(Limits(tasks=("ref2va",)), (IMAGE,))
    assert (made.task, made.frames, made.size) == ("ref2va", 124, "1344x768")


@pytest.mark.parametrize(
    ("references", "said"),
    [
        ((IMAGE,) * 3, "fl2va takes 1 or 2 pictures"),
        ((SOUND,), "at least one picture or film"),
        ((FILM,) * 4, "3 films"),
    ],
)
def test_references_that_do_not_go_together_are_refused(references: tuple[ReferenceFacts, ...], said: str) -> None:
    verdict = _verdict(references=references)
    assert isinstance(verdict, list) and said in verdict[0].why
    assert verdict[0].code == "invalid_reference"


def test_a_kind_that_is_asked_for_must_fit_the_references() -> None:
    assert _fault(task="t2va", references=(IMAGE,)).field == "task"
    assert "1 or 2 pictures" in _fault(task="fl2va").allowed
    assert _fault(Limits(tasks=("t2va", "fl2va")), (FILM,)).field == "task"
    assert _fault(Limits(tasks=("t2va", "fl2va")), task="ref2va").allowed == "t2va, fl2va"


def test_a_reference_that_could_not_be_loaded_is_the_only_thing_said_about_references() -> None:
    ask, _ = read([("prompt", "a kite"), ("input_reference", "data:,")])
    broken = Fault("input_reference", "a.png", "it is empty (0 bytes)", code="invalid_reference")
    assert check(ask, ALL, (), [broken]) == [broken]
    assert check(ask, Limits(tasks=("ref2va",)), (), [broken]) == [broken]
    ask, _ = read([("prompt", "a kite"), ("input_reference", "data:,"), ("task", "fl2va")])
    assert check(ask, ALL, (), [broken]) == [broken]


def test_the_first_picture_decides_the_size_where_none_is_asked() -> None:
    assert _accepted(references=(IMAGE,)).size == "1344x768"
    assert _accepted(references=(replace(IMAGE, width=1080, height=1920),)).size == "768x1344"
    assert _accepted(references=(IMAGE,), size="512x512").size == "512x512"


@pytest.mark.parametrize(
    ("count", "asked", "made"),
    [(1, None, (0,)), (2, None, (0, -1)), (1, [-1], (-1,)), (1, -1, (-1,)), (1, "-1", (-1,)), (2, "[0, -1]", (0, -1))],
)
def test_pictures_stand_at_the_first_or_last_frame(count: int, asked: Any, made: tuple[int, ...]) -> None:
    fields = {} if asked is None else {"frame_indices": asked}
    assert _accepted(references=(IMAGE,) * count, **fields).frame_indices == made


@pytest.mark.parametrize(("count", "asked", "nearest"), [(1, [0, -1], [0]), (2, [0], [0, -1]), (2, [-1, 0], [0, -1])])
def test_places_that_do_not_match_the_pictures_are_refused(count: int, asked: list[int], nearest: list[int]) -> None:
    fault = _fault(references=(IMAGE,) * count, extra_params={"frame_indices": asked})
    assert (fault.field, fault.nearest) == ("extra_params.frame_indices", nearest)


def test_films_and_sounds_have_a_length_in_all() -> None:
    long = replace(FILM, seconds=9.0)
    assert "18.00 s in all" in _fault(references=(long, long)).why
    assert (
        "sounds last 16.00 s"
        in _fault(references=(IMAGE, replace(SOUND, seconds=8.0), replace(SOUND, seconds=8.0))).why
    )


def test_a_film_must_go_on_for_two_seconds_after_its_start() -> None:
    assert _accepted(references=(FILM,), start_time_seconds=3).start_time_seconds == 3
    fault = _fault(references=(FILM,), start_time_seconds=3.5)
    assert fault.nearest == 3.0
    assert _accepted(start_time_seconds=1).snaps[0].made is None


def test_a_sound_can_be_the_clips_own() -> None:
    made = _accepted(references=(SOUND,), extra_params={"audio_mode": "lock_source"})
    assert made.task == "t2va" and made.extra == {"audio_mode": "lock_source"}
    assert _fault(extra_params={"audio_mode": "lock_source"}).allowed == "exactly one sound"


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"audio_mode": "loud"}, "extra_params.audio_mode"),
        ({"preencode_mp4": "yes"}, "extra_params.preencode_mp4"),
        ({"pad_seq_len": 100}, "extra_params.pad_seq_len"),
        ({"preencode_batch_frames": 0}, "extra_params.preencode_batch_frames"),
        ({"force_refresh_step_hint": 1.5}, "extra_params.force_refresh_step_hint"),
        ({"force_refresh_step_policy": "once"}, "extra_params.force_refresh_step_policy"),
    ],
)
def test_what_the_model_reads_itself_has_types_too(extra: dict[str, Any], field: str) -> None:
    assert _fault(extra_params=extra).field == field


def test_what_this_host_does_not_read_is_refused() -> None:
    fault = _fault(replace(ALL, extra=frozenset()), extra_params={"preencode_mp4": True})
    assert "no such field" in fault.why


def test_an_adapter_must_be_there_and_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "loras").mkdir()
    (tmp_path / "loras" / "turbo").mkdir()
    (tmp_path / "other").mkdir()
    served = replace(ALL, lora_dir=tmp_path / "loras")
    made = _accepted(served, lora={"name": "t", "path": "turbo", "scale": 0.5})
    assert made.lora is not None and made.lora.path == str(tmp_path / "loras" / "turbo") and made.lora.scale == 0.5
    assert _accepted(served, lora={"name": "t", "path": str(tmp_path / "loras" / "turbo")}).lora is not None
    for path in ("a\0b", "a\ud800", "../other", str(tmp_path / "other"), "/etc/passwd"):
        assert _fault(served, lora={"name": "t", "path": path}).field == "lora.path"
    assert _fault(served, lora='{"name": "t", "path": "turbi"}').nearest == "turbo"
    assert _fault(ALL, lora={"name": "t", "path": str(tmp_path / "gone")}).field == "lora.path"


def test_the_memory_budget_has_the_last_word() -> None:
    def budget(made: Accepted) -> Misfit | None:
        if made.width * made.height > 768 * 448:
            return Misfit("90.0 GiB are needed, and 60.0 GiB are there", "768x448 with up to 362 frames fits")
        return Misfit("70.0 GiB are needed", frames=124) if made.frames > 124 else None

    limits = replace(ALL, misfit=budget)
    assert _accepted(limits, size="768x448", seconds=5).frames == 124
    fault = _fault(limits, size="768x448", seconds=10)
    assert (fault.field, fault.nearest, fault.code) == ("seconds", 5.1667, "too_large_for_memory")
    _accepted(limits, size="768x448", seconds=5.1667)
    fault = _fault(limits, size="1344x768", num_frames=124)
    assert (fault.field, fault.nearest) == ("size", None) and "768x448" in fault.allowed
    assert _fault(limits).field == "size"


def test_all_faults_are_told_at_once() -> None:
    verdict = _verdict(
        size="16x16", fps=25, seconds=2, steps=0, flow_shift=-1, task="x", aspect_ratio="2:1", n=9, seeed=1, seed="y"
    )
    assert isinstance(verdict, list)
    assert sorted(fault.field for fault in verdict) == sorted(
        ["size", "fps", "seconds", "steps", "flow_shift", "task", "aspect_ratio", "n", "seeed", "seed"]
    )


def test_a_request_is_as_large_as_its_references_make_it() -> None:
    size = _accepted(references=(IMAGE, FILM, SOUND), size="768x448", num_frames=124).request_size
    assert (size.images, size.audio_seconds, size.frames, size.steps) == (6, 5.0, 124, 50)


def test_no_request_ends_in_an_exception() -> None:
    """Anything in any field is a clip or a fault."""
    generator = random.Random(5)
    names = ["prompt", "size", "width", "height", "seconds", "num_frames", "fps", "steps", "seed", "n", "task", "lora"]
    names += ["aspect_ratio", "extra_params", "frame_indices", "strict", "input_reference", "video_params", "quality"]
    values: list[Any] = [0, -1, 1, 24, 64, 10**30, 1.5, math.nan, math.inf, "", "x", "64x64", "1e400", "9" * 5000, True]
    values += [
        None,
        [],
        {},
        [[]],
        {"seconds": {}},
        {"target": 5},
        "{",
        "[1]",
        "\ud800",
        "\0",
        [None],
        {"image_url": None},
    ]
    for _ in range(3000):
        fields = {name: generator.choice(values) for name in generator.sample(names, 4)}
        verdict = _verdict(**fields) if "prompt" not in fields else check(*_read(fields))
        assert verdict, fields


def _read(fields: dict[str, Any]) -> Any:
    ask, faults = read(fields.items())
    return ask, ALL, (), faults


def test_canvas_has_no_ratio_that_it_cannot_make() -> None:
    for ratio in (0.25, 0.4, 1, 1.5, 2.5, 4):
        width, height = canvas(ratio)
        assert width % 32 == height % 32 == 0 and width * height <= 1344 * 768 * 1.05
