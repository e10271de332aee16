# SPDX-License-Identifier: Apache-2.0
"""`vllm-h3 doctor`: a check that fails, however it fails, is a line; Ascend's operators are asked of the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.unit.quantization.npu_emulation import EmulatedNpu
from vllm_h3_plugin.cli import doctor
from vllm_h3_plugin.host import contracts, standalone
from vllm_h3_plugin.quantization.npu_int8 import NpuInt8
from vllm_h3_plugin.quantization.npu_operators import OPERATORS, loaded_schema


@contextmanager
def declared(schemas: dict[str, str]) -> Iterator[None]:
    """Operators of the ``npu`` namespace as torch_npu leaves them in the dispatcher when it is imported."""
    library = torch.library.Library("npu", "DEF")
    try:
        for schema in schemas.values():
            library.define(schema)
        yield
    finally:
        library._destroy()


@pytest.fixture
def ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    """``npu`` is no device type where torch_npu is not."""
    monkeypatch.setattr(standalone, "platform_device", lambda: SimpleNamespace(type="npu"))


def operators() -> doctor.Finding:
    return doctor._find("operators", doctor._CHECKS["operators"])


def test_elsewhere_ascends_operators_are_not_asked_for(device: torch.device) -> None:
    found = operators()
    assert found.ok and found.detail.startswith("not applicable") and "npu_quant_matmul" in found.detail


def test_on_ascend_the_loaded_operators_are_held_against_the_table(ascend: None) -> None:
    with declared(OPERATORS):
        found = operators()
        assert str(loaded_schema("npu_quant_matmul")).startswith("npu::npu_quant_matmul(Tensor x1, Tensor x2")
    assert found.ok and "are declared as in torch_npu 2.10.0.post4" in found.detail


def test_an_operator_that_is_declared_otherwise_is_a_failure_that_shows_both(ascend: None) -> None:
    other = OPERATORS["npu_quant_matmul"].replace("Tensor? pertoken_scale=None, ", "")
    with declared({**OPERATORS, "npu_quant_matmul": other}):
        found = operators()
    assert not found.ok and "npu_quant_matmul is npu::" in found.detail and "wanted npu::" in found.detail
    assert "pinned Ascend image" in found.fix


def test_operators_that_are_not_loaded_are_named(ascend: None) -> None:
    found = operators()
    assert not found.ok
    assert all(f"{name} is missing" in found.detail for name in OPERATORS)


def broken(*_: object) -> str:
    raise RuntimeError("aclrtSetDevice failed: 507033\nand a long trace")


def test_a_check_that_dies_is_a_line_and_not_the_end() -> None:
    found = doctor._find("step", broken)
    assert (found.ok, found.detail) == (False, "RuntimeError: aclrtSetDevice failed: 507033")


def test_a_contract_that_dies_is_a_line_and_the_others_are_checked(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: tuple[Callable[[torch.device], str], ...] = (broken, contracts.qkv_layout)
    monkeypatch.setattr(contracts, "CONTRACTS", checked)
    monkeypatch.setattr(contracts, "single_rank", lambda: nullcontext(device))  # this process is one already
    died, held = contracts.run_contracts()
    assert (died.ok, died.detail) == (False, "RuntimeError: aclrtSetDevice failed: 507033")
    assert (held.name, held.ok) == ("qkv_layout", True)


@pytest.mark.parametrize("contract", contracts.CONTRACTS, ids=lambda contract: contract.__name__)
def test_the_contracts_hold_as_ascend_checks_them(
    device: torch.device, contract: Callable[[torch.device], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In INT8 and by the backend of the card, with its operators emulated."""
    assert contracts.quantizing_recipe(SimpleNamespace(type="npu")) == "int8"  # type: ignore[arg-type]
    ops = EmulatedNpu()
    monkeypatch.setattr(contracts, "quantizing_recipe", lambda device: "int8")
    monkeypatch.setattr(contracts, "choose_backend", lambda *_: (NpuInt8(ops=ops), "emulated"))
    said = contract(device)
    assert contract is not contracts.fp8_quantizer or ("INT8 per channel" in said and ops.calls)
