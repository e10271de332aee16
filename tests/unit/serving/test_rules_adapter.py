# SPDX-License-Identifier: Apache-2.0
"""What an adapter asks of a request, and what a server can take: refused before there is a job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_h3_plugin.checkpoint.adapter import Adapter
from vllm_h3_plugin.checkpoint.adapter_layout import turbo_file
from vllm_h3_plugin.checkpoint.synthetic import tiny_dit
from vllm_h3_plugin.checkpoint.synthetic.adapters import AdapterSpec, write_adapter
from vllm_h3_plugin.errors import AdapterError
from vllm_h3_plugin.serving.adapters import AdapterRules
from vllm_h3_plugin.serving.offered import offered
from vllm_h3_plugin.serving.rules.accepted import Accepted
from vllm_h3_plugin.serving.rules.check import check
from vllm_h3_plugin.serving.rules.fault import Fault
from vllm_h3_plugin.serving.rules.limits import Limits
from vllm_h3_plugin.serving.rules.read import read

DIT = tiny_dit()
RULES = AdapterRules(DIT, "fl2va", tables=True)
BOTH = ("t2va", "fl2va")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    kinds = {kind: write_adapter(folder / kind, AdapterSpec(kind, DIT)) for kind in ("turbo", "flashgen", "fasth3")}
    kinds["peft"] = write_adapter(folder, AdapterSpec("peft", DIT))
    kinds["ref2v"] = write_adapter(folder / "ref2v", AdapterSpec("turbo", DIT, task="ref2v"))
    kinds["bare"] = write_adapter(folder / "bare", AdapterSpec("turbo", DIT, alpha=None))
    return kinds


def serving(own: Path | None = None, scale: float = 1.0, **change: object) -> Limits:
    rules = replace(RULES, **change)  # type: ignore[arg-type]
    loaded: Adapter | None = None if own is None else rules.check(own, at_start=True)
    return Limits(tasks=BOTH, adapters=replace(rules, own=loaded, scale=scale))


def asked(
    limits: Limits, lora: Path | None = None, scale: float | None = None, **fields: str
) -> Accepted | list[Fault]:
    pairs = {"prompt": "a red kite", "size": "64x64", **fields}
    if lora is not None:
        pairs["lora"] = json.dumps({"name": "mine", "path": str(lora), **({} if scale is None else {"scale": scale})})
    ask, found = read(list(pairs.items()))
    return check(ask, limits, found=found)


def accepted(*args: object, **fields: object) -> Accepted:
    found = asked(*args, **fields)  # type: ignore[arg-type]
    assert isinstance(found, Accepted), found
    return found


def faults(*args: object, **fields: object) -> dict[str, Fault]:
    found = asked(*args, **fields)  # type: ignore[arg-type]
    assert isinstance(found, list)
    return {fault.field: fault for fault in found}


def test_a_turbo_request_has_the_files_steps_and_shifts(adapters: dict[str, Path]) -> None:
    made = accepted(serving(), adapters["turbo"])
    assert (made.steps, made.flow_shift, made.audio_flow_shift, made.steps_pinned) == (8, 6.0, 3.0, False)
    assert made.adapter == turbo_file(8) == made.told()["adapter"]
    assert made.lora is not None and (made.lora.name, made.lora.path) == ("mine", str(adapters["turbo"]))
    assert made.lora.identity is not None and 0 < made.lora.identity < 2**63


@pytest.mark.parametrize(
    ("field", "value", "nearest"),
    [("num_inference_steps", "50", 8), ("flow_shift", "12", 6.0), ("audio_flow_shift", "4", 3.0)],
)
def test_what_the_file_was_not_distilled_to_is_refused(
    field: str, value: str, nearest: float, adapters: dict[str, Path]
) -> None:
    fault = faults(serving(), adapters["turbo"], **{field: value})[field]
    assert fault.nearest == nearest and "distilled" in fault.why
    accepted(serving(), adapters["turbo"], **{field: str(nearest)})


def test_scale_0_is_no_adapter_and_asks_nothing(adapters: dict[str, Path]) -> None:
    made = accepted(serving(), adapters["turbo"], 0.0, num_inference_steps="20")
    assert (made.steps, made.flow_shift, made.adapter) == (20, None, None)
    made = accepted(serving(adapters["turbo"]), adapters["turbo"], 0.0)
    assert (made.steps, made.adapter) == (50, None)


def test_the_servers_adapter_is_on_every_request_that_names_none(adapters: dict[str, Path]) -> None:
    limits = serving(adapters["turbo"], 0.75)
    made = accepted(limits)
    assert made.lora is not None and (made.lora.path, made.lora.scale) == (str(adapters["turbo"]), 0.75)
    assert (made.steps, made.flow_shift, made.adapter) == (8, 6.0, turbo_file(8))
    assert made.lora.identity is None, "the host keeps its own under a number made of the path"
    again = accepted(limits, adapters["turbo"], 0.5)
    assert again.lora is not None and again.lora.identity is None and again.lora.scale == 0.5
    other = accepted(limits, adapters["peft"], num_inference_steps="20")
    assert other.lora is not None and other.lora.identity is not None and other.steps == 20
    assert offered(limits)["num_inference_steps"] == {"min": 1, "max": 200, "default": 8}


def test_fasth3_is_for_every_request_and_nothing_goes_on_top(adapters: dict[str, Path]) -> None:
    limits = serving(adapters["fasth3"])
    made = accepted(limits)
    assert made.lora is None and (made.steps, made.steps_pinned, made.adapter) == (4, True, "adapter_model.safetensors")
    assert "fused into this server's weights" in faults(limits, adapters["turbo"])["lora.path"].why
    assert {"num_inference_steps", "flow_shift"} <= faults(limits, num_inference_steps="8", flow_shift="6").keys()
    assert faults(limits, task="fl2va")["task"].nearest == "t2va"
    assert offered(limits)["num_inference_steps"] == {"min": 4, "max": 4, "default": 4}


@pytest.mark.parametrize(
    ("kind", "change", "why", "fix"),
    [
        ("fasth3", {}, "cannot be had for one request", "--lora"),
        ("flashgen", {}, "AdaLN is kept as a table", '"adaln": "resident"'),
        ("turbo", {"partition": "ref2va"}, "made for t2va and fl2va", "FL2VA"),
        ("ref2v", {}, "made for ref2va", "Ref2VA folder by itself"),
        ("ref2v", {"partition": "combined"}, "made for ref2va", "Ref2VA folder by itself"),
        ("ref2v", {"partition": "ref2va", "whole_family": False}, "no adapter on Ref2VA", "0.30"),
        ("bare", {"whole_family": False}, "no alpha", "newer file"),
    ],
)
def test_what_a_server_cannot_use_is_refused_with_the_way_out(
    kind: str, change: dict[str, object], why: str, fix: str, adapters: dict[str, Path]
) -> None:
    fault = faults(serving(**change), adapters[kind])["lora.path"]
    assert why in fault.why and fix in fault.why


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("flashgen", {"tables": False}),
        ("ref2v", {"partition": "ref2va"}),
        ("turbo", {"partition": "combined"}),
        ("bare", {}),
        ("turbo", {"whole_family": False}),
        ("peft", {"whole_family": False}),
    ],
)
def test_what_it_can_use_is_not(kind: str, change: dict[str, object], adapters: dict[str, Path]) -> None:
    replace(RULES, **change).check(adapters[kind])  # type: ignore[arg-type]


def test_a_broken_file_is_a_fault_of_the_request_and_its_path_is_said_once(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, AdapterSpec("turbo", DIT, broken="nan"))
    fault = faults(serving(), path)["lora.path"]
    assert "NaN" in fault.why and "lora_B" in fault.why and str(path) not in fault.why
    with pytest.raises(AdapterError):
        RULES.check(path)


def test_rules_survive_json(adapters: dict[str, Path]) -> None:
    rules = replace(RULES, own=RULES.check(adapters["turbo"]), scale=0.5)
    assert AdapterRules.from_dict(json.loads(json.dumps(rules.as_dict()))) == rules
    assert AdapterRules.from_dict(json.loads(json.dumps(RULES.as_dict()))) == RULES


def test_flashgen_pins_its_schedule(adapters: dict[str, Path]) -> None:
    made = accepted(serving(tables=False), adapters["flashgen"])
    assert (made.steps, made.steps_pinned, made.flow_shift) == (4, True, None)
