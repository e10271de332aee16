# SPDX-License-Identifier: Apache-2.0
"""`vllm-h3 bench decode` in small: both sides run, what differs is counted, no figure is kept of a narrow network."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tools.measure_decode import keep
from tools.results import Result, parse_result, write_result
from vllm_h3_plugin.checkpoint.synthetic import tiny_vit
from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.memory.requests import RequestSize


@pytest.fixture(scope="module")
def bench(device: torch.device, one_thread: None) -> Any:
    """The modules under test, imported when there is a world for the host to find."""
    from vllm_h3_plugin.host.bench import apart, checkpoint, decode, decode_report

    return SimpleNamespace(apart=apart, checkpoint=checkpoint, decode=decode, report=decode_report, device=device)


@pytest.fixture(scope="module")
def found(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One whole run of a narrow network."""
    folder = tmp_path_factory.mktemp("bench") / "video_vae"
    bench.checkpoint.write_video_vae(folder, tiny_vit(tile=64, overlap=16))
    options = bench.decode.Options(folder, RequestSize(160, 96, 22), (None, 1, 4), rounds=1)
    return bench.decode.measure(options, bench.device)


def column(bench: Any, name: str, **values: Any) -> Any:
    return bench.decode.Column(name, **{"decode_ms": 1.0, "bytes_ms": 1.0, **values})


def test_every_column_is_timed_and_compared(bench: Any, found: Any) -> None:
    assert [one.name for one in found.columns] == ["stock", "batch auto", "batch 1", "batch 4"]
    stock, auto, single, four = found.columns
    assert all(one.decode_ms > 0 and one.bytes_ms > 0 and not one.note for one in found.columns)
    assert (auto.decoded["batch"], four.decoded["batch"], found.tiles) == (6, 4, 6)
    for one in (auto, four):
        assert one.apart.worst <= 1 and one.apart.share < 0.01
    assert single.decoded is None and single.apart.worst == 0, "one tile at a time is the stock host's way"
    assert [row["At once"] for row in bench.report.rows(found)] == [1, 6, 1, 4]
    assert stock.apart is None and stock.decoded is None


def test_a_narrow_network_gives_no_figure(bench: Any, found: Any) -> None:
    assert not found.true_width
    figures = {figure.name: figure for figure in bench.report.figures(found)}
    assert figures["vae_decode_speedup"].value is None
    assert "not the real width" in figures["vae_decode_speedup"].reason
    result = parse_result("x.json", bench.report.result(found, command="c", subject="s"))
    assert result.ratios["vae_decode_batch"] == 6.0 and result.ratios["vae_decode_psnr_db"] is None


def test_figures_of_the_real_width_are_ratios_of_times(bench: Any) -> None:
    decode = bench.decode
    apart = bench.apart.Apart(1, 0.1, 58.0, 0.1, 0.1)
    wide = decode.Found(RequestSize(1344, 768, 124), parameters=2_423_000_000, tiles=28)
    wide.columns = [
        column(bench, "stock", decode_ms=3000.0, bytes_ms=3600.0),
        column(bench, "batch auto", decode_ms=2000.0, bytes_ms=2400.0, decoded={"batch": 28}, apart=apart),
    ]
    values = {figure.name: (figure.value, figure.met) for figure in bench.report.figures(wide)}
    assert values == {
        "vae_decode_speedup": (1.5, True),
        "vae_decode_latent_speedup": (1.5, None),
        "vae_decode_psnr_db": (58.0, True),
        "vae_decode_batch": (28.0, None),
    }
    wide.columns[1] = replace(wide.columns[1], bytes_ms=None, note="OutOfMemoryError: …")
    figure = bench.report.figures(wide)[0]
    assert figure.value is None and figure.reason == "OutOfMemoryError: …"
    assert bench.report.failures(wide) == {"batch auto": "OutOfMemoryError: …"}
    other = replace(wide, size=RequestSize(768, 448, 124))
    assert "asked of 1344x768" in bench.report.figures(other)[0].reason


def test_differences_are_counted_on_seams_and_off_them(bench: Any) -> None:
    one = torch.zeros(3, 2, 4, 4, dtype=torch.uint8)
    seams = torch.zeros(4, 4, dtype=torch.bool)
    seams[:, 2] = True
    other = one.clone()
    other[0, 1, 3, 2] = 6
    apart = bench.apart.compare(one, other, seams)
    assert (apart.worst, apart.share, apart.elsewhere) == (6, 1 / 96, 0.0)
    assert apart.seams == pytest.approx(6 / 24) and apart.psnr == pytest.approx(52.39, abs=0.01)
    assert bench.apart.compare(one, one, seams).psnr is None


def test_a_column_that_fails_leaves_the_others(bench: Any, tmp_path: Path) -> None:
    folder = tmp_path / "video_vae"
    bench.checkpoint.write_video_vae(folder, tiny_vit(tile=64, overlap=16))
    options = bench.decode.Options(folder, RequestSize(160, 96, 22), (None,), rounds=1)
    with mock.patch.object(bench.decode.TileBatches, "_run", side_effect=RuntimeError("broken")):
        found = bench.decode.measure(options, bench.device)
    assert found.columns[0].bytes_ms and "broken" in found.columns[1].note
    assert list(bench.report.failures(found)) == ["batch auto"]


def run(words: list[str]) -> int:
    """The verb in this process; the variables that it sets are taken back."""
    from vllm_h3_plugin.cli.main import main

    with mock.patch.dict(os.environ), pytest.raises(SystemExit) as ended:
        main(["bench", "decode", *words])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batches", "7,none"], "'none' is no number of tiles"),
        (["--batches", "0"], "'0' is no number of tiles"),
        (["--size", "1344x768"], "a size is three numbers"),
        (["--repeat", "0"], "nothing would be measured"),
        (["/nowhere"], "has no video_vae/config.json"),
    ],
)
def test_mistakes_are_named_before_anything_is_built(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    assert said in capsys.readouterr().err


def outcome(speedup: float | None) -> dict[str, Any]:
    ratios = {"vae_decode_speedup": speedup, "vae_decode_batch": 28.0}
    common = {"title": "t", "command": "c", "date": "2026-11-30", "hardware": "h", "versions": {}, "rows": [{"a": 1}]}
    return {**common, "ratios": ratios, "reasons": {} if speedup else {"vae_decode_speedup": "on a CPU"}}


def test_the_figure_goes_into_the_file_of_workloads_and_its_others_stay(tmp_path: Path) -> None:
    results, made = tmp_path / "results", tmp_path / "decode.json"
    others: dict[str, float | None] = {"lora_overhead": 0.02, "vae_decode_speedup": None}
    kept = Result("w", "c", "2026-11-30", "h", {}, [{"a": 1}], others, {"vae_decode_speedup": "not yet"})
    made.write_text(json.dumps(outcome(1.52)))
    with pytest.raises(UsageError, match=r"workloads\.json"):
        keep(made, results)
    write_result(results, "workloads", kept)
    assert [path.name for path in keep(made, results)] == ["workloads.json", "decode.json"]
    found = json.loads((results / "workloads.json").read_text())
    assert found["ratios"] == {"lora_overhead": 0.02, "vae_decode_speedup": 1.52} and found["reasons"] == {}
    made.write_text(json.dumps(outcome(None)))
    (results / "decode.json").unlink()
    assert keep(made, results) == [] and not (results / "decode.json").exists()
