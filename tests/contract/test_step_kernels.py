# SPDX-License-Identifier: Apache-2.0
"""Which kernels a device's steps get: what compiled and is right there, the host's for the rest, with a log line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_h3_plugin.host import step_kernels
from vllm_h3_plugin.host.step_kernels import choose_kernels, composed
from vllm_h3_plugin.quantization import fused
from vllm_h3_plugin.quantization.fused_probe import Probe, probe
from vllm_h3_plugin.quantization.reference import Reference

CUDA = torch.device("cuda")
SM121 = "PassManager::run failed: cannot select fp8e4nv"


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def info(self, text: str, *words: object) -> None:
        self.lines.append(("info", text % words))

    def warning(self, text: str, *words: object) -> None:
        self.lines.append(("warning", text % words))


@pytest.fixture
def log(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Log:
    made = Log()
    monkeypatch.setattr(step_kernels, "logger", made)
    return made


def on_a_device(monkeypatch: pytest.MonkeyPatch, **faults: Callable[[], str | None]) -> None:
    """A CUDA device on which these kernels are tried so; all others are right."""

    def tried(device: torch.device) -> tuple[Probe, ...]:
        assert device == CUDA
        return tuple(probe(name, faults.get(name, lambda: None)) for name in fused.KERNELS)

    monkeypatch.setattr(step_kernels, "probe_kernels", tried)
    rotation = faults.get("qk_norm_rope", lambda: None)
    monkeypatch.setattr(step_kernels, "in_place_fault", lambda device: rotation())


def does_not_compile() -> Any:
    raise RuntimeError(SM121)


def test_all_kernels_of_a_device_are_taken_where_all_are_right(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_device(monkeypatch)
    kernels = choose_kernels(CUDA, Reference())
    assert set(kernels.fused.source.values()) == {"Triton"} and kernels.rotates_in_place
    assert [level for level, _ in log.lines] == ["info"] * 5


def test_one_that_does_not_compile_is_the_hosts_and_the_log_says_why(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_device(monkeypatch, silu_mul=does_not_compile)
    backend = Reference()
    kernels = choose_kernels(CUDA, backend)
    assert kernels.fused.source == {
        "norm_modulate": "Triton",
        "gate_norm_modulate": "Triton",
        "silu_mul": "the host's kernel, then quantization",
        "quantize": "Triton",
    }
    assert kernels.rotates_in_place
    (warning,) = (text for level, text in log.lines if level == "warning")
    assert "silu_mul" in warning and SM121 in warning and "the host's kernels stand in" in warning
    assert warning.removeprefix("H3 kernel ") in kernels.describe(), "the doctor says the same"
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    got, want = kernels.fused.silu_mul(x), composed(backend).silu_mul(x)
    assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))


def test_where_none_is_right_a_step_is_the_hosts(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dict.fromkeys((*fused.KERNELS, "qk_norm_rope"), lambda: "50.0% of values differ")
    on_a_device(monkeypatch, **wrong)
    kernels = choose_kernels(CUDA, Reference())
    assert set(kernels.fused.source.values()) == {"the host's kernel, then quantization"}
    assert not kernels.rotates_in_place
    assert [level for level, _ in log.lines] == ["warning"] * 5
