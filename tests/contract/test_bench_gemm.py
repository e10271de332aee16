# SPDX-License-Identifier: Apache-2.0
"""`vllm-h3 bench gemm` in small: every shape and kernel has a row, and what is slow, wrong or missing says so."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tools.results import parse_result
from vllm_h3_plugin.checkpoint.configs import DitConfig, TextEncoderConfig
from vllm_h3_plugin.checkpoint.synthetic import tiny_dit
from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.quantization.reference import Reference


@pytest.fixture(scope="module")
def bench(device: torch.device, one_thread: None) -> Any:
    """The modules under test, imported when there is a world for the host to find."""
    from vllm_h3_plugin.host.bench import clock as bench_clock
    from vllm_h3_plugin.host.bench import gemm as bench_gemm
    from vllm_h3_plugin.host.bench import gemm_kernels as bench_gemm_kernels
    from vllm_h3_plugin.host.bench import gemm_report as bench_gemm_report

    return SimpleNamespace(
        clock=bench_clock, gemm=bench_gemm, kernels=bench_gemm_kernels, report=bench_gemm_report, device=device
    )


@pytest.fixture(scope="module")
def found(bench: Any) -> Any:
    """One whole run at tiny width."""
    return bench.gemm.measure(bench.gemm.shapes(tiny_dit(), [48], 7), bench.device, 1)


def test_shapes_are_those_of_the_real_model(bench: Any) -> None:
    wanted = {(s.layer, s.m, s.n, s.k) for s in bench.gemm.shapes(DitConfig(), [6016, 37824], 60, TextEncoderConfig())}
    for m in (6016, 37824):
        assert wanted >= {
            ("qkv_proj", m, 21504, 5376),
            ("out_proj", m, 5376, 7168),
            ("fc1", m, 28672, 5376),
            ("fc2", m, 5376, 14336),
        }
    assert wanted >= {("refiner fc1", 60, 28672, 5376), ("condition_proj", 60, 5376, 5120)}
    assert wanted >= {("text qkv_proj", 60, 10240, 5120), ("text down_proj", 60, 5120, 25600)}
    assert len(wanted) == 2 * 4 + 4 + 1 + 4


def test_every_shape_has_a_row_for_every_kernel(bench: Any, found: Any) -> None:
    names = set(bench.kernels.kernels(bench.device))
    assert names >= {
        bench.kernels.CUTLASS_CHANNEL,
        bench.kernels.CUTLASS_TENSOR,
        bench.kernels.SCALED_MM,
        bench.kernels.BF16,
    }
    shapes = {cell.shape for cell in found.cells}
    assert len(shapes) == 9
    assert {(cell.shape, cell.kernel) for cell in found.cells} == {(s, name) for s in shapes for name in names}


def test_what_needs_a_gpu_is_a_row_that_says_so(bench: Any, found: Any) -> None:
    for row in bench.report.rows(found):
        runs = row["Kernel"] in (bench.kernels.REFERENCE, bench.kernels.BF16)
        assert (row["ms"] is not None) == runs
        assert runs or "CUDA device" in row["What is wrong"]


def test_kernels_that_run_agree_with_plain_torch(bench: Any, found: Any) -> None:
    errors = [cell.error for cell in found.cells if cell.ms]
    assert errors and all(error is not None and error < bench.report.ERROR_BOUND for error in errors)


def test_a_kernel_that_computes_something_else_is_called_wrong(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Reference.matmul

    def forgets_the_last_channel(self: Any, *operands: Any) -> torch.Tensor:
        y = real(self, *operands)
        y[:, -1] = 0
        return y

    kernel = bench.kernels.kernels(bench.device)[bench.kernels.REFERENCE]

    def broken(operands: Any) -> Any:
        ready = kernel(operands)
        expected = ready.expected()
        monkeypatch.setattr(Reference, "matmul", forgets_the_last_channel)
        return replace(ready, expected=lambda: expected)

    monkeypatch.setattr(bench.gemm, "kernels", lambda device: {"broken": broken})
    (cell,) = bench.gemm._measure(bench.kernels.Shape("fc1", 8, 32, 16), bench.device, 1)
    assert bench.report.is_wrong(cell)
    assert bench.report.verdict(cell, None).startswith("WRONG: relative error")


def test_not_a_number_is_wrong_too(bench: Any) -> None:
    cell = bench.gemm.Cell(bench.kernels.Shape("fc1", 8, 32, 16), "any", 1.0, math.nan)
    assert bench.report.is_wrong(cell)


def test_a_kernel_that_fails_is_a_row_and_the_others_are_measured(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.kernels.kernels(bench.device)[bench.kernels.REFERENCE]

    def late(operands: Any) -> Any:
        calls = iter(range(2))

        def work() -> torch.Tensor:
            if next(calls, None) is None:
                raise RuntimeError("planted\nand a long trace")
            return real(operands).works[0]()

        return replace(real(operands), works=[work])

    monkeypatch.setattr(bench.gemm, "kernels", lambda device: {"late": late, "good": real})
    cells = {c.kernel: c for c in bench.gemm._measure(bench.kernels.Shape("fc1", 8, 32, 16), bench.device, 2)}
    assert cells["late"].ms is None and cells["late"].failed == "RuntimeError: planted"
    assert cells["good"].ms and not cells["good"].failed


def test_a_share_is_of_whichever_bound_is_larger(bench: Any) -> None:
    line = bench.gemm.Roofline({"fp8": 1000.0, "bf16": 500.0}, {}, 4000.0, {})
    large, thin = bench.kernels.Shape("fc1", 8192, 8192, 8192), bench.kernels.Shape("fc1", 16, 8192, 8192)
    name = bench.kernels.CUTLASS_CHANNEL
    assert line.share(bench.gemm.Cell(large, name, 2 * large.flops / 1e12)) == pytest.approx(0.5)
    moved = thin.nbytes(1) / 4e9
    assert line.share(bench.gemm.Cell(thin, name, 4 * moved)) == pytest.approx(0.25)
    assert line.share(bench.gemm.Cell(large, bench.kernels.BF16, 2 * large.flops / 1e12)) == pytest.approx(1.0)
    assert line.share(bench.gemm.Cell(large, name, None, failed="no")) is None


@pytest.fixture
def judged(bench: Any) -> Callable[..., str]:
    """The verdict of the first of some cells: (kernel, share of the roofline), on one shape."""

    def judge(*cells: tuple[str, float], m: int = 8192, n: int = 8192) -> str:
        line = bench.gemm.Roofline({"fp8": 1000.0, "bf16": 500.0}, {"fp8": "a", "bf16": "b"}, 4000.0, {})
        shape = bench.kernels.Shape("fc1", m, n, 8192)
        made = []
        for kernel, share in cells:
            bounds = line.bounds_ms(bench.gemm.Cell(shape, kernel))
            made.append(bench.gemm.Cell(shape, kernel, max(bounds) / share, 0.001))
        verdict: str = bench.report.verdict(made[0], bench.gemm.Found(line, 132, "SM121", made))
        return verdict

    return judge


def test_a_slow_kernel_is_told_from_a_slow_device(bench: Any, judged: Callable[..., str]) -> None:
    cutlass, scaled, bf16 = bench.kernels.CUTLASS_CHANNEL, bench.kernels.SCALED_MM, bench.kernels.BF16
    assert judged((cutlass, 0.6), (scaled, 0.9)) == ""
    assert judged((cutlass, 0.3), (scaled, 0.8)).startswith(f"the kernel: {scaled} takes")
    assert "none is tuned for SM121" in judged((cutlass, 0.3), (scaled, 0.31), (bf16, 0.9))


def test_a_shape_too_small_for_the_device_is_told(bench: Any, judged: Callable[..., str]) -> None:
    cutlass = bench.kernels.CUTLASS_CHANNEL
    assert "42 tiles of 128 x 128 leave some of 132 SMs idle" in judged((cutlass, 0.3), m=60, n=5376)
    assert "bound by memory, and 30%" in judged((cutlass, 0.3), m=60, n=28672)


def test_results_have_the_form_that_is_kept(bench: Any, found: Any) -> None:
    result = parse_result("gemm", bench.report.result(found, command="vllm-h3 bench gemm"))
    unmeasured = {name for name, value in result.ratios.items() if value is None}
    assert unmeasured == {"cutlass_least_share", "bf16_over_cutlass", "scaled_mm_over_cutlass"}
    assert all("CUDA device" in result.reasons[name] for name in unmeasured)
    assert (result.ratios["roofline_bf16_tflops"] or 0) > 0 and (result.ratios["roofline_copy_gb_s"] or 0) > 0


def test_ratios_are_of_shapes_that_both_kernels_computed(bench: Any, found: Any) -> None:
    cutlass, bf16, scaled = bench.kernels.CUTLASS_CHANNEL, bench.kernels.BF16, bench.kernels.SCALED_MM
    fc1, fc2 = bench.kernels.Shape("fc1", 8, 32, 16), bench.kernels.Shape("fc2", 8, 16, 32)
    cells = [(fc1, cutlass, 1.0), (fc2, cutlass, 3.0), (fc1, bf16, 2.0), (fc2, bf16, 5.0), (fc2, scaled, 6.0)]
    made = replace(found, cells=[bench.gemm.Cell(*cell, error=0.001) for cell in cells])
    values, _ = bench.report.ratios(made)
    assert values["bf16_over_cutlass"] == pytest.approx(7 / 4)
    assert values["scaled_mm_over_cutlass"] == pytest.approx(2)


def test_turns_are_interleaved_and_medians_taken(bench: Any) -> None:
    order: list[str] = []
    values = {"a": iter([100.0, 1.0, 9.0, 2.0]), "b": iter([100.0, 5.0, 6.0, 7.0])}

    def take(name: str) -> float:
        order.append(name)
        return next(values[name])

    medians, failed = bench.clock.in_turns({n: lambda n=n: take(n) for n in "ab"}, 3, warm=1)
    assert order == list("abababab")
    assert medians == {"a": 2.0, "b": 6.0} and failed == {}


def test_the_verb_keeps_its_results_and_ends_with_one_json_line(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm_h3_plugin.cli.bench import app

    output = tmp_path / "new" / "gemm.json"
    with mock.patch.dict(os.environ), pytest.raises(SystemExit) as ended:
        app(["gemm", "--m", "16", "--text-tokens", "4", "--repeat", "1", "--output", str(output), "--json"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    said = json.loads(lines[-1])
    assert said["ok"] and said["wrong"] == []
    assert sum(line.startswith("{") for line in lines) == 1
    assert any(line.startswith("Roofline, measured in this run: ") for line in lines)
    kept = parse_result("gemm", json.loads(output.read_text()))
    assert kept.command == "vllm-h3 bench gemm --m 16 --text-tokens 4 --repeat 1"
    assert len(kept.rows) == len(said["rows"]) == 9 * 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--m", "16", "--m", "0"], "--m = 0.*at least 1"),
        (["--repeat", "0"], "--repeat = 0.*at least 1"),
        (["--text-tokens", "0"], "--text-tokens = 0.*at least 1"),
    ],
)
def test_arguments_that_measure_nothing_are_refused(arguments: list[str], message: str) -> None:
    from vllm_h3_plugin.cli.bench import app

    with pytest.raises(UsageError, match=f"(?s){message}"):
        app(["gemm", *arguments], standalone_mode=False)


@pytest.mark.parametrize("verb", ["gemm", "step"])
def test_a_machine_without_an_accelerator_is_told_of_the_reference_platform(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_h3_plugin.cli.bench import app

    monkeypatch.delenv("H3_REFERENCE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"(?s)no accelerator.*H3_REFERENCE=1"):
        app([verb], standalone_mode=False)


def test_results_of_an_earlier_run_are_not_overwritten(tmp_path: Path) -> None:
    from vllm_h3_plugin.cli.bench import app

    earlier = tmp_path / "gemm.json"
    earlier.write_text("mine")
    with pytest.raises(UsageError, match=r"gemm\.json"):
        app(["gemm", "--output", str(earlier)], standalone_mode=False)
    assert earlier.read_text() == "mine"
