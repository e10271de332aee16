# SPDX-License-Identifier: Apache-2.0
"""`vllm-h3 bench step` in small: every column and figure is there, and what did not run says so."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tools.results import load_results, parse_result, set_ratio
from vllm_h3_plugin.checkpoint.configs import DitConfig
from vllm_h3_plugin.checkpoint.synthetic import tiny_dit
from vllm_h3_plugin.errors import ToolMissingError, UsageError
from vllm_h3_plugin.memory.operations import block_flops
from vllm_h3_plugin.memory.requests import RequestSize

ASKED = {
    "wall_over_floor_6016",
    "wall_over_floor_38k",
    "stock_fp8_over_plugin_6016",
    "stock_sdpa_over_plugin_6016",
    "dram_bytes_over_stock",
    "outside_blocks_ms",
    "lowbit_attention_speedup_38k",
    "lowbit_attention_cosine",
    "first_over_second_request",
}
SMALL = RequestSize(64, 64, 5, text_tokens=9)


@pytest.fixture(scope="module")
def bench(device: torch.device, one_thread: None) -> Any:
    """The modules under test, imported when there is a world for the host to find."""
    from vllm_h3_plugin.host.bench import floor as bench_floor
    from vllm_h3_plugin.host.bench import step as bench_step
    from vllm_h3_plugin.host.bench import step_cells as bench_step_cells
    from vllm_h3_plugin.host.bench import step_dram as bench_step_dram
    from vllm_h3_plugin.host.bench import step_lowbit as bench_step_lowbit
    from vllm_h3_plugin.host.bench import step_models as bench_step_models
    from vllm_h3_plugin.host.bench import step_profile as bench_step_profile
    from vllm_h3_plugin.host.bench import step_report as bench_step_report

    return SimpleNamespace(
        cells=bench_step_cells,
        device=device,
        dram=bench_step_dram,
        floor=bench_floor,
        lowbit=bench_step_lowbit,
        models=bench_step_models,
        profile=bench_step_profile,
        report=bench_step_report,
        step=bench_step,
    )


@pytest.fixture(scope="module")
def run(bench: Any) -> Any:
    """One whole run at tiny width, two sizes."""
    seen: list[int] = []
    options = bench.cells.Options(tiny_dit(), [SMALL, replace(SMALL, frames=22)], layers=2, rounds=1)
    subject = bench.step.Bench(options, bench.device, ends=lambda found: seen.append(len(found.cells)))
    return SimpleNamespace(found=subject.run(), seen=seen, bench=subject)


def test_every_column_was_measured_at_every_size(run: Any, bench: Any) -> None:
    columns = [column for column in bench.cells.COLUMNS if column != bench.cells.LOW_BIT]
    assert [cell.column for cell in run.found.cells] == columns * 2
    for cell in run.found.cells:
        assert cell.blocks_ms and cell.blocks_ms > 0, cell.note
        assert (cell.forward_ms is None) == (cell.outside_ms is None) == (cell.column == bench.cells.FLOOR)
    assert run.seen == [5, 10]


def test_a_time_is_that_of_a_device_that_has_been_at_it_for_a_while(bench: Any, monkeypatch: Any) -> None:
    from vllm_h3_plugin.host.bench import clock as bench_clock

    times = iter([90.0, 100.0, 110.0, 120.0, 130.0])
    monkeypatch.setattr(bench_clock, "wall_ms", lambda work, device: next(times))
    assert bench_clock.settled_ms(lambda: None, torch.device("cuda"), least_ms=400.0) == 115.0
    times = iter([500.0, 450.0])
    assert bench_clock.settled_ms(lambda: None, torch.device("cuda"), least_ms=400.0) == 450.0


def test_a_device_that_is_lost_ends_the_run_and_keeps_what_was_measured(run: Any, bench: Any, monkeypatch: Any) -> None:
    subject, seen = run.bench, []
    before = subject.found
    subject.found = type(before)(before.config)
    prepare = type(subject)._part

    def part(self: Any, cell: Any, size: Any) -> Any:
        if cell.column == bench.cells.STOCK_FP8:
            self.found.lost = "AcceleratorError: an illegal memory access was encountered"
            raise RuntimeError(self.found.lost)
        return prepare(self, cell, size)

    monkeypatch.setattr(type(subject), "_part", part)
    monkeypatch.setattr(type(subject), "_build", lambda self: None)
    monkeypatch.setattr(subject, "_ends", lambda found: seen.append(len(found.cells)))
    try:
        found = subject.run()
    finally:
        subject.found = before
    notes = {cell.column: cell.note for cell in found.cells}
    assert "illegal memory access" in notes[bench.cells.STOCK_FP8]
    assert notes[bench.cells.STOCK_BF16].startswith("not tried: AcceleratorError")
    assert seen == [5], "the second size is not begun"


def test_both_models_compute_the_same_step(run: Any, bench: Any) -> None:
    """Columns would not be comparable otherwise; the plugin's weights are the stock host's, in FP8."""
    rows = {}
    for name in (bench.cells.STOCK_BF16, bench.cells.STOCK_FP8, bench.cells.PLUGIN):
        with torch.inference_mode():
            rows[name] = bench.models.Request(run.bench.models[name], SMALL, bench.device).forward()[0]
    want = rows.pop(bench.cells.STOCK_BF16)
    for name, got in rows.items():
        assert ((got - want).norm() / want.norm()).item() < 0.1, name


def test_a_step_is_its_blocks_and_what_is_outside(run: Any, bench: Any) -> None:
    model = run.bench.models[bench.cells.PLUGIN]
    calls = dict.fromkeys(("block", "refiner"), 0)

    def count(name: str) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            calls[name] += 1

        return hook

    request = bench.models.Request(model, SMALL, bench.device)
    hooks = [block.register_forward_hook(count("block")) for block in model.dit.blocks]
    hooks.append(model.dit.token_refiner.register_forward_hook(count("refiner")))
    try:
        with torch.inference_mode():
            for work, blocks in ((request.forward, 2), (request.blocks, 2), (request.outside, 0)):
                before = calls["block"]
                work()
                assert calls["block"] - before == blocks, work
    finally:
        for hook in hooks:
            hook.remove()
    assert calls["refiner"] == 1, "the plugin refines a request's text once"


def test_depth_is_what_is_asked_for_and_comes_back(run: Any, bench: Any) -> None:
    model = run.bench.models[bench.cells.PLUGIN]
    for depth in (1, 2):
        model.set_depth(depth)
        assert len(model.dit.blocks) == depth
        assert not model.dit.blocks[-1]._next, "the last block must not begin one that does not run"
        assert bool(model.dit.blocks[0]._next) == (depth == 2)


def test_sdpa_stands_in_for_a_turn_and_goes_again(run: Any, bench: Any) -> None:
    dit = run.bench.models[bench.cells.STOCK_FP8].dit
    layer = dit.blocks[0].attn.attention
    before = layer.attn_backend, layer.attention
    with bench.models.attention_as(dit, lambda: bench.models.put_masked_sdpa(dit)):
        assert not layer.attn_backend.supports_prefix_kv_slicing
        assert layer.attention is not before[1]
    assert (layer.attn_backend, layer.attention) == before


def test_a_column_that_cannot_be_built_is_a_row_that_says_so(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted\nwith a trace")

    monkeypatch.setattr(bench.step, "build_plugin", broken)
    columns = (bench.cells.PLUGIN, bench.cells.FLOOR, bench.cells.LOW_BIT)
    options = bench.cells.Options(tiny_dit(), [SMALL], layers=1, rounds=1, columns=columns)
    found = bench.step.Bench(options, bench.device).run()
    plugin, floor = found.cells
    assert plugin.blocks_ms is None and plugin.note == "RuntimeError: planted"
    assert floor.blocks_ms is None and floor.note == "the floor has no operands: RuntimeError: planted"
    assert found.low_bit is None and found.low_bit_reason == "RuntimeError: planted"
    assert bench.report.failures(found).keys() == {"plugin, 64x64, 5 frames", "floor, 64x64, 5 frames"}


def test_the_floor_multiplies_every_layer_of_every_block(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_dit(layers=2, hidden=64, heads=2, head_dim=16, ffn=96)
    model = bench.models.build_plugin(bench.models.RandomWeights(config, bench.device))
    with torch.inference_mode():
        request = bench.models.Request(model, SMALL, bench.device)
        want = request.blocks()
        kept = bench.floor.operands(list(model.dit.blocks), request.blocks)
        assert torch.equal(request.blocks(), want), "no hook is left"
        backend = model.dit.blocks[0].mlp.fc1.quant_method.backend
        flops = 2 * block_flops(config, request.tokens, request.used)
        floor = bench.floor.floor(kept, backend, flops)
        seen: list[tuple[int, ...]] = []
        matmul = type(backend).matmul

        def spy(self: Any, x: Any, packed: Any, bias: Any) -> torch.Tensor:
            seen.append((*x.shape, packed.weight.shape[1]))
            return matmul(self, x, packed, bias)

        monkeypatch.setattr(type(backend), "matmul", spy)
        floor.replay()
    rows = request.tokens
    assert seen == [(rows, 64, 96), (rows, 32, 64), (rows, 64, 192), (rows, 96, 64)] * 2
    products = 2 * sum(m * k * n for m, k, n in seen)
    assert floor.flops == products + 2 * 4 * rows * request.used * 32
    assert [part.shape[1] for part in kept[0].attention] == [rows, request.used, request.used]


def test_flops_are_those_of_the_formula(bench: Any) -> None:
    """19.268 B parameters of the blocks' linears; 1.4336e6 S² of attention: two products, 50 blocks, 7168 wide."""
    flops = 50 * block_flops(DitConfig(), 6016, 6016)
    assert flops == pytest.approx(2 * 19.268e9 * 6016 + 1.4336e6 * 6016**2, rel=1e-3)


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("void cutlass::device_kernel<vllm::enable_sm90<cutlass::gemm::kernel::GemmUniversal<...>>>", "GEMM"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "GEMM"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<cutlass::gemm::X>>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_128x128x128", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::...)", "attention"),
        ("triton_red_fused__to_copy_add_index_mul_rsqrt_3", "norm, quantize"),
        ("void vllm::dynamic_per_token_scaled_fp8_quant_kernel_strided<c10::BFloat16>", "norm, quantize"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16, &silu_kernel>", "norm, quantize"),
        ("_fused_qk_norm_rope_kernel", "norm, quantize"),
        ("_indexed_gate_kernel", "norm, quantize"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, AddFunctor>", "other"),
    ],
)
def test_kernels_are_told_apart_by_name(bench: Any, kernel: str, group: str) -> None:
    assert bench.profile.group_of(kernel) == group


def made(bench: Any, **changes: Any) -> Any:
    """A run of the real width, as if it had been measured."""
    cells = bench.cells
    short, long = (RequestSize(w, h, frames, text_tokens=60) for w, h, frames in (cells.SHORT_CLIP, cells.LONG_CLIP))
    times = {
        (short, 8): {"stock-fp8": (60, 66, 5), "stock-sdpa": (110, 115, 5), "plugin": (50, 52, 1.5), "floor": (47,)},
        (long, 4): {"stock-fp8": (430, 436, 6), "plugin": (420, 422, 1.8), "floor": (415,)},
    }
    found = cells.Found(DitConfig(), **changes)
    for (size, layers), columns in times.items():
        for column, values in columns.items():
            named = dict(zip(("blocks_ms", "forward_ms", "outside_ms"), map(float, values), strict=False))
            found.cells.append(cells.Cell(size, layers, column, flops=10**12, activation_bytes=10**9, **named))
    return found


def test_figures_are_ratios_of_the_right_cells(bench: Any) -> None:
    long = RequestSize(1344, 768, 124, text_tokens=60)
    low = bench.cells.LowBit(long, "fp8", 400.0, 250.0, 0.9995, {"block 0": 0.05})
    found = made(bench, low_bit=low, dram={"plugin": 3e8, "stock-fp8": 1e9})
    values = {figure.name: figure.value for figure in bench.report.figures(found)}
    assert values.keys() >= ASKED
    assert values["wall_over_floor_6016"] == pytest.approx(50 / 47, abs=1e-4)
    assert values["wall_over_floor_38k"] == pytest.approx(420 / 415, abs=1e-4)
    assert values["stock_fp8_over_plugin_6016"] == pytest.approx(66 / 52, abs=1e-4)
    assert values["stock_sdpa_over_plugin_6016"] == pytest.approx(115 / 52, abs=1e-4)
    whole = (60 / 8 * 50 + 5) / (50 / 8 * 50 + 1.5)
    assert values["stock_fp8_over_plugin_6016_all_blocks"] == pytest.approx(whole, abs=1e-4)
    assert values["outside_blocks_ms"] == 1.5
    assert values["dram_bytes_over_stock"] == 0.3
    assert values["lowbit_attention_speedup_38k"] == 1.6 and values["lowbit_attention_cosine"] == 0.9995
    assert values["first_over_second_request"] is None
    found.low_bit = replace(low, size=SMALL)
    elsewhere = {figure.name: figure for figure in bench.report.figures(found)}["lowbit_attention_cosine"]
    assert elsewhere.value is None and elsewhere.reason == "measured at 64x64, 5 frames only"


def test_a_figure_that_was_not_measured_names_what_is_missing(bench: Any) -> None:
    found = made(bench)
    found.cells = [
        replace(cell, blocks_ms=None, note="out of memory") if cell.column == "floor" else cell
        for cell in found.cells
        if cell.column != "stock-sdpa"
    ]
    result = parse_result("step", bench.report.result(found, command="c"))
    assert "floor: out of memory" in result.reasons["wall_over_floor_6016"]
    assert "stock-sdpa of 768x448x56 was not measured" in result.reasons["stock_sdpa_over_plugin_6016"]
    assert "--dram" in result.reasons["dram_bytes_over_stock"]
    assert "make test-gpu" in result.reasons["first_over_second_request"]
    assert result.reasons["lowbit_attention_cosine"]


def test_tiny_widths_give_no_figures(bench: Any, run: Any) -> None:
    result = parse_result("step", bench.report.result(run.found, command="c"))
    assert set(result.ratios.values()) == {None} and result.ratios.keys() >= ASKED
    assert all("not the real width" in reason for reason in result.reasons.values())


def test_missed_bounds_are_named_in_the_notes(bench: Any) -> None:
    notes = bench.report.result(made(bench), command="c")["notes"]
    assert "`wall_over_floor_38k`" not in notes
    found = made(bench)
    found.cells = [replace(c, blocks_ms=430.0) if c.blocks_ms == 420 else c for c in found.cells]
    assert "Missed: `wall_over_floor_38k` (1.0361, asked <= 1.02)" in bench.report.result(found, command="c")["notes"]


def test_a_place_is_kept_for_what_a_real_server_measures(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text(json.dumps(bench.report.result(made(bench), command="c")))
    set_ratio(tmp_path, "step", "first_over_second_request", 1.5)
    kept = load_results(tmp_path)["step"]
    assert kept.ratios["first_over_second_request"] == 1.5 and "first_over_second_request" not in kept.reasons
    with pytest.raises(UsageError, match=r"step\.json: no ratio 'other' to set"):
        set_ratio(tmp_path, "step", "other", 1.5)


def test_attention_in_few_bits_is_compared_layer_by_layer(
    run: Any, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU both kernels are stand-ins: an exact one, and one that is off by a known factor."""
    model = run.bench.models[bench.cells.PLUGIN]
    model.set_depth(2)

    def coarse(dit: Any, precision: Any) -> None:
        for block in dit.blocks:
            layer = block.attn.attention
            exact = layer.attention
            layer.attention = SimpleNamespace(forward=lambda *args, exact=exact: 1.25 * exact.forward(*args))

    monkeypatch.setattr(bench.lowbit, "install", coarse)
    monkeypatch.setattr(bench.lowbit, "put_cudnn", lambda dit: None)
    precision = bench.cells.AttentionPrecision.FP8
    with torch.inference_mode():
        low = bench.lowbit.measure(model, SMALL, bench.device, 1, precision)
    assert list(low.layer_errors) == ["block 0", "block 1"]
    assert all(error == pytest.approx(0.25, abs=0.01) for error in low.layer_errors.values())
    assert 0.9 < low.cosine < 1 and low.exact_ms > 0 and low.low_bit_ms > 0
    rows = bench.report.rows(bench.cells.Found(tiny_dit(), low_bit=low))
    assert "cosine of the step" in rows[1]["Note"] and "block 1 0.25" in rows[1]["Note"]


def test_what_ncu_counts_is_read_and_summed_by_group(bench: Any) -> None:
    text = """==PROF== Connected
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","triton_red_fused","dram__bytes_read.sum","byte","1,000,000"
"0","1","triton_red_fused","dram__bytes_write.sum","byte","500000"
"1","1","cutlass_gemm","dram__bytes_read.sum","byte","7"
"1","1","cutlass_gemm","sm__cycles.sum","cycle","9"
"""
    groups = bench.profile.by_group(bench.dram.parse(text.splitlines()))
    assert groups["norm, quantize"] == 1.5e6 and groups["GEMM"] == 7 and groups["other"] == 0


def test_a_machine_without_ncu_says_so(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.dram.shutil, "which", lambda *args, **kwargs: None)
    found = made(bench)
    bench.dram.measure_dram(found, SMALL)
    assert "ncu was not found" in found.dram_reason and not found.dram


def test_an_ncu_that_may_not_count_is_quoted(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = tmp_path / "ncu"
    refuses.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM - no permission'\nexit 1\n")
    refuses.chmod(0o755)
    monkeypatch.setattr(bench.dram, "find_ncu", lambda: str(refuses))
    with pytest.raises(ToolMissingError, match=r"counted nothing for plugin.*ERR_NVGPUCTRPERM"):
        bench.dram.bytes_a_block("plugin", (64, 64, 5), 9)


def test_the_plot_has_a_panel_a_size_and_every_line(bench: Any, tmp_path: Path) -> None:
    from PIL import Image

    from vllm_h3_plugin.cli.bench_step_chart import draw, lines
    from vllm_h3_plugin.cli.line_chart import check_target

    found = made(bench)
    drawn = lines(found)
    assert drawn["1344x768"].keys() == {"stock-fp8", "plugin", "floor"}
    assert drawn["768x448"]["plugin"] == [(56, 50 / 8 * 50 + 1.5)]
    assert drawn["768x448"]["floor"] == [(56, 47 / 8 * 50)]
    path = tmp_path / "step.png"
    check_target(path)
    draw(found, path)
    with Image.open(path) as image:
        assert image.size == (1280, 560)
        colours = {colour for _, colour in image.getcolors(1 << 20) or ()}
    assert {(0, 114, 178), (213, 94, 0), (85, 85, 85)} <= colours
    with pytest.raises(UsageError, match="no column gave a time"):
        draw(bench.cells.Found(tiny_dit()), tmp_path / "none.png")


def test_the_verb_prints_keeps_and_ends_with_one_json_line(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from contextlib import nullcontext

    from vllm_h3_plugin.cli.bench import app
    from vllm_h3_plugin.host import standalone

    monkeypatch.setattr(standalone, "single_rank", lambda: nullcontext(bench.device))  # this process is one already
    output, plot = tmp_path / "new" / "step.json", tmp_path / "step.png"
    asked = ["--sizes", "64x64x5", "--only", "floor,plugin", "--layers", "1", "--repeat", "1", "--text-tokens", "9"]
    with mock.patch.dict(os.environ), pytest.raises(SystemExit) as ended:
        app(["step", *asked, "--output", str(output), "--plot", str(plot), "--json"])
    out = capsys.readouterr().out
    assert ended.value.code == 0, out
    said = json.loads(out.splitlines()[-1])
    assert said["ok"] and said["errors"] == {}
    assert sum(line.startswith("{") for line in out.splitlines()) == 1
    assert "64x64, 5 frames: 64 tokens, 1 blocks" in out
    kept = parse_result("step", json.loads(output.read_text()))
    assert kept.command == f"vllm-h3 bench step {' '.join(asked[:4])} --layers 1 --text-tokens 9 --repeat 1"
    assert [row["Column"] for row in kept.rows] == ["plugin", "floor"]
    assert plot.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "768x448"], "--sizes 768x448.*768x448x56"),
        (["--sizes", "768x448x57"], "frames=57.*17 n"),
        (["--only", "plugin,stock"], "--only stock.*stock-fp8"),
        (["--layers", "0"], "--layers = 0.*at least 1"),
        (["--repeat", "0"], "--repeat = 0.*at least 1"),
        (["--attention", "fp4"], "--attention fp4.*fp8 or int8"),
        (["--plot", "step.jpg"], r"--plot step\.jpg.*\.png"),
        (["--plot", "nowhere/step.png"], "no folder nowhere"),
    ],
)
def test_arguments_that_cannot_be_right_are_refused(arguments: list[str], message: str) -> None:
    from vllm_h3_plugin.cli.bench import app

    with pytest.raises(UsageError, match=f"(?s){message}"):
        app(["step", *arguments], standalone_mode=False)


def test_columns_are_called_alike_in_the_verb_and_below_it(bench: Any) -> None:
    from vllm_h3_plugin.cli import bench_step

    assert bench_step._COLUMNS == bench.cells.COLUMNS
