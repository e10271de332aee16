# SPDX-License-Identifier: Apache-2.0
"""Names and types of a request's fields: known ones, other names of them, typos, and what is no number."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from vllm_h3_plugin.serving.rules.check import check
from vllm_h3_plugin.serving.rules.fault import Fault, error_body
from vllm_h3_plugin.serving.rules.limits import Limits
from vllm_h3_plugin.serving.rules.read import Upload, read


def _faults(*pairs: tuple[str, Any], **fields: Any) -> list[Fault]:
    ask, faults = read([("prompt", "a kite"), *pairs, *fields.items()])
    verdict = check(ask, Limits(), found=faults)
    assert isinstance(verdict, list), verdict
    return verdict


def _one(*pairs: tuple[str, Any], **fields: Any) -> Fault:
    faults = _faults(*pairs, **fields)
    assert len(faults) == 1, [str(fault) for fault in faults]
    return faults[0]


def test_the_host_its_form_fields_and_openai_names_are_all_known() -> None:
    """Everything that vLLM-Omni 0.30.0's form takes; nothing of it may be called a typo."""
    form = """prompt model seconds size user width height num_frames fps aspect_ratio short_edge num_outputs_per_prompt
        start_time_seconds quality num_inference_steps guidance_scale guidance_scale_2 boundary_ratio flow_shift
        true_cfg_scale seed generate_sound sound_duration negative_prompt enable_frame_interpolation
        frame_interpolation_exp frame_interpolation_scale frame_interpolation_model_path lora extra_params
        return_stage_metrics source_video source_audio video_noise_mask audio_noise_mask image_reference video_reference
        audio_reference input_reference input_references control_reference control_type video_params n steps duration"""
    _, faults = read([(name, "x") for name in form.split()])
    assert [fault.field for fault in faults if fault.code == "unknown_parameter"] == []


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("promt", "prompt"),
        ("aspect_ration", "aspect_ratio"),
        ("num_frame", "num_frames"),
        ("num_inference_step", "num_inference_steps"),
        ("seeds", "seed"),
        ("Size", "size"),
        ("input_refrence", "input_reference"),
    ],
)
def test_a_typo_is_refused_with_the_name_that_was_meant(typo: str, meant: str) -> None:
    fault = _one((typo, "5"))
    assert (fault.field, fault.code, fault.nearest) == (typo, "unknown_parameter", meant)
    assert f"did you mean {meant}?" in str(fault)


def test_a_name_like_no_other_is_refused_with_the_names_there_are() -> None:
    fault = _one(colour="red")
    assert fault.nearest is None and "num_inference_steps" in fault.allowed


def test_an_unknown_name_in_extra_params_is_named_with_its_place() -> None:
    fault = _one(extra_params='{"audio_flow_shft": 3}')
    assert (fault.field, fault.nearest) == ("extra_params.audio_flow_shft", "extra_params.audio_flow_shift")
    assert _one(preencode_mp4="true").nearest == "extra_params.preencode_mp4"


@pytest.mark.parametrize(
    "fields",
    [
        {"seconds": "5", "num_inference_steps": "8", "n": "1"},
        {"duration": 5.0, "steps": 8, "num_outputs_per_prompt": 1},
        {"extra_params": {"duration_seconds": 5, "num_inference_steps": 8}},
        {"extra_params": '{"target": {"duration_seconds": 5}}', "steps": "8"},
        {"video_params": {"num_frames": 124}, "steps": 8, "user": "", "seed": None},
    ],
)
def test_every_way_of_writing_a_request_means_the_same(fields: dict[str, Any]) -> None:
    ask, faults = read([("prompt", "a kite"), *fields.items()])
    verdict = check(ask, Limits(), found=faults)
    assert not isinstance(verdict, list), verdict
    assert (verdict.frames, verdict.steps, verdict.outputs) == (124, 8, 1)


def test_a_field_that_is_given_twice_must_say_the_same() -> None:
    assert "seconds says '5'" in _one(seconds="5", extra_params={"duration": "6"}).why
    assert "given twice" in _one(("size", "64x64"), ("size", "128x128")).why
    ask, faults = read([("prompt", "a"), ("size", "64x64"), ("size", "64x64"), ("extra_params", {"size": "64x64"})])
    assert not faults and ask.size == "64x64"


@pytest.mark.parametrize(
    ("field", "value", "allowed", "nearest"),
    [
        ("seconds", "x", "a number", None),
        ("num_frames", "12.5", "a whole number", None),
        ("num_frames", True, "a whole number", None),
        ("steps", [8], "a whole number", None),
        ("fps", "nan", "a number", None),
        ("flow_shift", -1, "a number from 0.01 to 100", 0.01),
        ("flow_shift", "1e9", "a number from 0.01 to 100", 100),
        ("audio_flow_shift", "inf", "a number from 0.01 to 100", 100),
        ("seed", 2**63, f"a whole number from {-(2**63)} to {2**63 - 1}", 2**63 - 1),
        ("seed", "1.5", f"a whole number from {-(2**63)} to {2**63 - 1}", 2),
        ("task", "t2v", "t2va, fl2va, ref2va", "t2va"),
        ("quality", "hihg", "lossless, high", "high"),
        ("strict", "perhaps", "true or false", None),
        ("prompt", 7, "text of at most 20000 characters", None),
        ("size", 1344, "text", None),
        ("frame_indices", [1], "a list of 0 or -1", None),
        ("lora", "turbo", "a JSON object", None),
        ("start_time_seconds", -1, "a number from 0 to 15", 0),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_named_with_what_is_allowed(
    field: str, value: Any, allowed: str, nearest: Any
) -> None:
    ask, faults = read([(field, value)] if field == "prompt" else [("prompt", "a kite"), (field, value)])
    verdict = check(ask, Limits(tasks=("t2va",)), found=faults)
    assert isinstance(verdict, list)
    fault = verdict[0]
    assert (fault.field, fault.allowed, fault.nearest) == (field, allowed, nearest), str(fault)
    assert len(verdict) == 1


def test_a_field_inside_an_adapter_is_named_with_its_place() -> None:
    faults = {fault.field: fault for fault in _faults(lora={"name": "", "scale": 99, "weight": 1})}
    assert faults.keys() == {"lora.name", "lora.path", "lora.scale", "lora.weight"}
    assert faults["lora.path"].code == "missing_parameter"
    assert (faults["lora.scale"].allowed, faults["lora.scale"].nearest) == ("a number from -10 to 10", 10)


@pytest.mark.parametrize("text", ['{"a": ', "[" * 100_000, '{"a": 1} x'])
def test_broken_json_in_a_field_is_refused(text: str) -> None:
    fault = _one(extra_params=text)
    assert fault.why == "it is no valid JSON" and len(str(fault)) < 400


def test_objects_in_objects_end_somewhere() -> None:
    nested: Any = {"seconds": 5}
    for _ in range(500):
        nested = {"target": nested}
    assert _one(extra_params=nested).field == "extra_params.target.target"


def test_empty_fields_of_a_form_are_fields_that_were_left_out() -> None:
    ask, faults = read([("prompt", "a kite"), ("seed", ""), ("size", ""), ("lora", ""), ("input_reference", "")])
    assert not faults and ask.seed is None and ask.references == ()


@pytest.mark.parametrize("prompt", [None, "", "   ", "\n"])
def test_an_empty_prompt_is_refused(prompt: str | None) -> None:
    ask, faults = read([] if prompt is None else [("prompt", prompt)])
    verdict = check(ask, Limits(), found=faults)
    assert isinstance(verdict, list)
    assert [(fault.field, fault.code) for fault in verdict] == [("prompt", "missing_parameter")]


def test_text_that_is_no_unicode_can_be_answered() -> None:
    for faults in (_faults(("se\ud800ed", 1)), _faults(user="\ud800"), _faults(extra_params={"\ud800": "\ud800"})):
        assert faults
        json.dumps(error_body(faults), ensure_ascii=False).encode()


def test_long_values_are_cut_in_the_answer() -> None:
    assert len(json.dumps(error_body(_faults(("x" * 100_000, "y" * 100_000), seed="9" * 100_000)))) < 6000


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("negative_prompt", "rain", "no negative branch"),
        ("guidance_scale", "7.5", "no negative branch"),
        ("generate_sound", "false", "has sound"),
        ("frame_interpolation_exp", 2, "not interpolated"),
    ],
)
def test_what_h3_makes_nothing_of_is_told_and_refused_when_strict(name: str, value: Any, why: str) -> None:
    why = {"no negative branch": "without a negative branch"}.get(why, why)
    ask, faults = read([("prompt", "a kite"), (name, value)])
    verdict = check(ask, Limits(), found=faults)
    assert not isinstance(verdict, list)
    (snap,) = verdict.snaps
    assert (snap.field, snap.asked, snap.made) == (name, value, None) and why in snap.why
    fault = _one((name, value), strict=True)
    assert (fault.field, fault.allowed, fault.nearest) == (name, "leave it out", None)


@pytest.mark.parametrize(
    "fields",
    [
        {"negative_prompt": ""},
        {"generate_sound": "true"},
        {"guidance_scale": "1"},
        {"enable_frame_interpolation": "false"},
    ],
)
def test_values_that_ask_for_what_h3_does_anyway_are_no_matter(fields: dict[str, Any]) -> None:
    ask, faults = read([("prompt", "a kite"), ("strict", True), ("num_frames", 124), *fields.items()])
    assert not isinstance(check(ask, Limits(), found=faults), list)


@pytest.mark.parametrize(
    ("name", "value"),
    [("enable_frame_interpolation", "true"), ("extra_params", {"long_video": True}), ("control_type", "pose")],
)
def test_what_would_change_the_clip_and_is_not_offered_is_refused(name: str, value: Any) -> None:
    fault = _one((name, value))
    assert fault.field.endswith(("enable_frame_interpolation", "long_video", "control_type"))
    assert fault.allowed == "leave it out" and len(fault.why) > 20


def test_a_file_in_a_field_that_takes_none_is_refused() -> None:
    fault = _one(("prompt_file", Upload(io.BytesIO(b"x"), "prompt.txt")))
    assert "input_reference" in fault.allowed
    assert "not offered" in _one(("source_video", Upload(io.BytesIO(b"x"), "a.mp4"))).why


URL = "data:image/png;base64,AA=="


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([("input_reference", URL)], [("input_reference", None)]),
        ([("input_reference[image_url]", URL)], [("input_reference.image_url", None)]),
        ([("input_reference", {"image_url": URL})], [("input_reference.image_url", None)]),
        ([("image_reference", json.dumps({"image_url": URL}))], [("image_reference.image_url", "image")]),
        (
            [("image_reference", [{"image_url": URL}, URL])],
            [("image_reference[0].image_url", "image"), ("image_reference[1]", "image")],
        ),
        ([("audio_reference", {"audio_url": URL})], [("audio_reference.audio_url", "audio")]),
        (
            [("input_references", URL), ("input_references", URL)],
            [("input_references[0]", None), ("input_references[1]", None)],
        ),
        (
            [("input_references[]", URL), ("input_references[]", URL)],
            [("input_references[0]", None), ("input_references[1]", None)],
        ),
    ],
)
def test_references_are_found_wherever_they_are(pairs: list[tuple[str, Any]], expected: list[tuple[str, Any]]) -> None:
    ask, faults = read([("prompt", "a kite"), *pairs])
    assert not faults
    assert [(reference.field, reference.kind) for reference in ask.references] == expected
    assert {reference.url for reference in ask.references} == {URL}


def test_uploads_are_references_in_the_order_of_the_form() -> None:
    files = [Upload(io.BytesIO(bytes([n])), f"{n}.png") for n in range(3)]
    ask, faults = read([("prompt", "x"), *(("input_references", file) for file in files)])
    assert not faults
    assert [reference.filename for reference in ask.references] == ["0.png", "1.png", "2.png"]
    assert ask.references[1].file is files[1].file


def test_lists_and_objects_may_be_written_as_openais_client_writes_them_in_forms() -> None:
    pairs = [("frame_indices[]", "0"), ("frame_indices[]", "-1"), ("lora[name]", "a"), ("lora[path]", "/"), ("n", "1")]
    ask, faults = read([("prompt", "a kite"), *pairs])
    assert not faults and ask.frame_indices == (0, -1)
    assert ask.lora is not None and (ask.lora.name, ask.lora.path) == ("a", "/")


@pytest.mark.parametrize("value", [{"file_id": "file-123"}, {"url": 5}, 5, {}, {"image_url": URL, "detail": "high"}])
def test_a_reference_that_is_none_is_refused(value: Any) -> None:
    fault = _one(image_reference=value)
    assert fault.field.startswith("image_reference")
    assert "file" in fault.why


def test_the_answer_has_openais_shape_and_every_fault() -> None:
    faults = _faults(fps="25", size="16x16", seed="x", num_frames=10)
    body = error_body(faults)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error" and body["error"]["param"] == faults[0].field
    assert {fault["field"] for fault in body["faults"]} == {"fps", "size", "seed", "num_frames"}
    for fault in body["faults"]:
        assert set(fault) == {"field", "value", "why", "allowed", "nearest", "code"}
        assert fault["field"] in body["error"]["message"] and fault["why"] in body["error"]["message"]
