# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI description says what is really accepted: its names, its ends, and the shape of a refusal."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from vllm_h3_plugin.serving.rules.accepted import Accepted
from vllm_h3_plugin.serving.rules.check import check
from vllm_h3_plugin.serving.rules.fault import Fault, error_body
from vllm_h3_plugin.serving.rules.limits import Limits
from vllm_h3_plugin.serving.rules.openapi import error_response, request_body, schema
from vllm_h3_plugin.serving.rules.read import read

LIMITS = Limits(tasks=("t2va", "fl2va"), model="MiniMax-H3", outputs=3, longest_s=10)
PROPERTIES = schema(LIMITS, form=False)["properties"]


def _verdict(**fields: Any) -> Accepted | list[Fault]:
    ask, faults = read([("prompt", "a kite"), *fields.items()])
    return check(ask, LIMITS, found=faults)


def test_every_name_in_it_is_known_and_none_is_missing() -> None:
    _, faults = read([(name, "x") for name in PROPERTIES])
    assert [fault.field for fault in faults if fault.code == "unknown_parameter"] == []
    _, faults = read([("no_such_field_at_all", "x")])
    known = set(faults[0].allowed.split(", "))
    assert known and known <= PROPERTIES.keys()
    assert schema(LIMITS, form=False)["additionalProperties"] is False


@pytest.mark.parametrize("name", [name for name, field in PROPERTIES.items() if "minimum" in field])
def test_its_ranges_are_those_that_hold(name: str) -> None:
    field = PROPERTIES[name]
    step = 1 if field["type"] == "integer" else 0.1
    for value in (field["minimum"], field["maximum"]):
        verdict = _verdict(**{name: value, "size": "64x64"})
        # n clips take n seeds, so the largest seed is for one clip alone; that is what is asked here.
        assert isinstance(verdict, Accepted), [str(fault) for fault in verdict]
    for value in (field["minimum"] - step, field["maximum"] + step):
        verdict = _verdict(**{name: value, "size": "64x64"})
        assert isinstance(verdict, list) and verdict[0].field == name


@pytest.mark.parametrize("name", ["task", "aspect_ratio", "quality"])
def test_its_words_are_those_that_hold(name: str) -> None:
    for word in PROPERTIES[name]["enum"]:
        verdict = _verdict(**{name: word})
        # A picture is missing for fl2va; the word itself is taken.
        assert isinstance(verdict, Accepted) or "fl2va takes" in verdict[0].why
    assert isinstance(_verdict(**{name: "other"}), list)


@pytest.mark.parametrize("name", ["fps", "short_edge", "model"])
def test_its_constants_are_those_that_hold(name: str) -> None:
    assert isinstance(_verdict(**{name: PROPERTIES[name]["const"]}), Accepted)
    assert isinstance(_verdict(**{name: "25"}), list)


def test_fields_without_effect_and_other_names_are_marked() -> None:
    deprecated = {name for name, field in PROPERTIES.items() if field.get("deprecated")}
    assert {"negative_prompt", "guidance_scale", "num_outputs_per_prompt", "duration"} <= deprecated
    assert not deprecated & {"prompt", "size", "seconds", "num_inference_steps", "n", "input_reference"}


def test_a_form_takes_files_and_json_does_not() -> None:
    content = request_body(LIMITS)["content"]
    assert set(content) == {"multipart/form-data", "application/json"}
    as_form = json.dumps(content["multipart/form-data"]["schema"]["properties"]["input_reference"])
    as_json = json.dumps(content["application/json"]["schema"]["properties"]["input_reference"])
    assert "binary" in as_form and "binary" not in as_json
    assert content["multipart/form-data"]["encoding"].keys() <= PROPERTIES.keys()


def test_it_stands_alone_and_says_what_is_required() -> None:
    whole = schema(replace(LIMITS, extra=frozenset()), form=True)
    assert "$ref" not in json.dumps(whole) and whole["required"] == ["prompt"]
    assert all(field.get("description") for field in whole["properties"].values())
    assert whole["properties"]["num_inference_steps"]["default"] == LIMITS.steps


def test_a_refusal_has_the_described_shape() -> None:
    described = error_response()["content"]["application/json"]["schema"]["properties"]
    verdict = _verdict(fps=25)
    assert isinstance(verdict, list)
    body = error_body(verdict)
    assert body["error"].keys() == described["error"]["properties"].keys()
    assert body["faults"][0].keys() == described["faults"]["items"]["properties"].keys()
    assert body["faults"][0]["code"] in described["faults"]["items"]["properties"]["code"]["enum"]
