# SPDX-License-Identifier: Apache-2.0
"""`vllm-h3 bench clip`: its cells, how they grow, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_h3_plugin.checkpoint.configs import DitConfig
from vllm_h3_plugin.cli.bench_clip_chart import draw, lines
from vllm_h3_plugin.cli.main import main
from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.memory.operations import StepFlops, step_flops
from vllm_h3_plugin.serving.clip_matrix import Cell, matrix, read_cells, rows

FLOPS = {"per_token": 1000, "per_pair": 1}


def cell(tokens: int, seconds: list[float], repeat: int = 1, recipe: str = "fp8", **more: Any) -> Cell:
    ledger = {
        "tokens": tokens,
        "steps_s": seconds,
        "phases": {"encoding text": 1.0, "denoising": sum(seconds), "decoding": 2.0, "decoding and encoding": 3.0},
    }
    given: dict[str, Any] = {"server": {}, "step_flops": FLOPS, "ledger": ledger, **more}
    return Cell(recipe=recipe, width=32, height=32, frames=tokens, steps=len(seconds), repeat=repeat, **given)


def test_the_real_models_step_has_the_operations_of_its_linears_and_its_attention() -> None:
    found = step_flops(DitConfig())
    linears = 50 * (2 * 5376 * (3 * 7168 + 7168) + 2 * 3 * 5376 * 14336)
    assert found == StepFlops(linears, 50 * 4 * 7168)
    # Two operations a parameter: the blocks hold 19.27 of the DiT's 33.12 billion, without AdaLN.
    assert found.per_token / 2 == pytest.approx(19.27e9, rel=0.001)


def test_growth_is_told_beside_what_flops_predict_by_recipe() -> None:
    found = rows(
        [
            cell(2000, [3.5, 3.5]),
            cell(1000, [1.0, 1.0]),
            cell(1000, [7.0], recipe="bf16"),
            cell(4000, [21.0], recipe="bf16"),
        ]
    )
    assert [(row.first.recipe, row.measured[0].tokens, row.growth, row.predicted) for row in found] == [
        ("bf16", 1000, 1.0, 1.0),
        ("bf16", 4000, 3.0, 10.0),
        ("fp8", 1000, 1.0, 1.0),
        ("fp8", 2000, 3.5, 3.0),
    ]


def test_the_first_of_several_warms_up_and_counts_only_alone() -> None:
    (row,) = rows([cell(100, [9.0], 1), cell(100, [1.0], 2), cell(100, [3.0], 3)])
    assert row.median("step") == 2.0 and len(row.measured) == 2
    (alone,) = rows([cell(100, [9.0], 1)])
    assert alone.median("step") == 9.0


def test_phases_are_summed_under_their_columns_and_unknown_ones_stay_open() -> None:
    one = cell(100, [1.0, 2.0])
    assert (one.seconds("text"), one.seconds("denoise"), one.seconds("decode")) == (1.0, 3.0, 5.0)
    assert one.seconds("encode") is None and one.seconds("table") is None
    bare = one.model_copy(update={"ledger": None})
    assert bare.step_s is None and bare.tokens is None and bare.flops is None
    (row,) = rows([bare])
    assert row.growth is None and row.predicted is None and row.median("step") is None


def test_a_cell_that_failed_is_a_row_and_no_figure() -> None:
    failed = cell(100, [1.0]).model_copy(update={"failed": "refused", "ledger": None})
    found = rows([failed, cell(50, [1.0])])
    assert [len(row.measured) for row in found] == [1, 0]
    assert found[1].median("step") is None


def test_cells_are_written_and_read_and_a_foreign_file_is_named(tmp_path: Path) -> None:
    one = cell(100, [1.0]).write(tmp_path)
    assert read_cells(tmp_path) == [one] and read_cells(tmp_path / "nowhere") == []
    (tmp_path / "x.cell.json").write_text("{}")
    with pytest.raises(UsageError, match=r"x\.cell\.json is no cell"):
        read_cells(tmp_path)


def test_the_cheapest_cell_comes_first_and_none_twice() -> None:
    info = {"workers": [{"recipe": "fp8", "step_flops": {"per_token": 5, "per_pair": "x"}}]}
    found = matrix(info, {}, [(64, 64), (32, 32), (32, 32)], [22], [8, 2], 1)
    assert [one.name for one in found] == [
        "fp8-32x32-22f-2s-1",
        "fp8-64x64-22f-2s-1",
        "fp8-32x32-22f-8s-1",
        "fp8-64x64-22f-8s-1",
    ]
    assert found[0].step_flops is None
    one, two = (made.order("kite", 7).request.seed for made in matrix(info, {}, [(32, 32)], [22], [8], 2))
    assert (one, two) == (7, 8)


def test_the_plot_has_a_line_a_recipe_and_one_by_flops(tmp_path: Path) -> None:
    found = rows([cell(1000, [1.0]), cell(2000, [4.0]), cell(1000, [2.0], recipe="bf16")])
    assert lines(found) == {
        "bf16": [(1000, 2.0)],
        "fp8": [(1000, 1.0), (2000, 4.0)],
        "by FLOPs": [(1000, 1.0), (2000, 3.0)],
    }
    draw(found, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="no cell has the time"):
        draw(rows([cell(10, [])]), tmp_path / "none.png")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--sizes", "100x"), "--sizes 100x why: it is not WxH"),
        (("--sizes", "100x100"), "multiples of 32"),
        (("--steps", "8,x"), "--steps 8,x why: it is no list of numbers"),
        (("--steps", "0"), "--steps 0 why: nothing would be made"),
        (("--frames", "124", "--seconds", "5"), "--seconds with --frames why: both are lengths"),
        (("--seconds", "nan"), "--seconds nan why: it is no list of numbers"),
        (("--plot", "x.jpg"), "the plot is a PNG"),
        (("--report",), "has no cells"),
        (("--url", "http://127.0.0.1:9", "--sizes", "64x64"), "127.0.0.1:9"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_asked(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "clip", "--out", str(tmp_path / "none"), *words])
    assert caught.value.code in (2, 7)
    told = " ".join(capsys.readouterr().err.split())
    assert said in told
    assert not (tmp_path / "none").exists()
