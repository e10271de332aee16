# SPDX-License-Identifier: Apache-2.0
"""The choice among exact attention kernels, through the functions that a server calls, with a fake clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_h3_plugin.attention import choice as choice_module
from vllm_h3_plugin.attention.choice import MAX_CHOICES, Bucket, Choice, Chooser
from vllm_h3_plugin.attention.exact import AttentionShape, Kernel, pinned_sdpa
from vllm_h3_plugin.attention.preference import DeviceFacts
from vllm_h3_plugin.attention.remembered import ChoiceFile
from vllm_h3_plugin.errors import BackendError
from vllm_h3_plugin.quantization.contract import Support

YES = Support(True, "there")
FACTS = DeviceFacts("cuda", "Some GPU", 90, "2.11.0", 91002, "fa3 (fa3_fwd 0.0.3)")
SCALE = 16**-0.5


class Bench:
    """Kernels that compute rightly, a clock that says how long each took, and what was reported."""

    def __init__(self, **milliseconds: float) -> None:
        self.milliseconds = milliseconds
        self.said: list[str] = []
        self.ran: list[str] = []
        self.heads: list[int] = []
        self.kernels = {name: Kernel(name, YES, self.runner(name)) for name in milliseconds}

    def runner(self, name: str) -> Callable[..., torch.Tensor]:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
            self.ran.append(name)
            self.heads.append(q.shape[2])
            return pinned_sdpa("flash")(q, k, v, scale)

        return run

    def replace(self, name: str, run: Callable[..., Any], available: Support = YES) -> None:
        self.kernels[name] = Kernel(name, available, run)

    def timer(self, run: Callable[[], object], times: int) -> float:
        spent = 0.0
        for _ in range(times):
            run()
            spent += self.milliseconds[self.ran[-1]]
        return spent

    def chooser(self, **more: Any) -> Chooser:
        return Chooser(list(self.kernels.values()), timer=self.timer, report=self.said.append, **more)


def tensors(rows: int, keys: int | None = None, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(1, rows, heads, 16, generator=generator).bfloat16() for _ in range(3))
    keys = rows if keys is None else keys
    return q, k[:, :keys], v[:, :keys]


def chosen(bench: Bench, rows: int = 1100, chooser: Chooser | None = None) -> str:
    return (chooser or bench.chooser()).kernel(*tensors(rows), SCALE).name


def test_a_clearly_faster_kernel_beats_the_order():
    assert chosen(Bench(fa3=10.0, cudnn=9.6)) == "cudnn"


@pytest.mark.parametrize("second", [10.0, 9.75])
def test_a_tie_or_a_slight_lead_leaves_the_order(second):
    assert chosen(Bench(fa3=10.0, cudnn=second)) == "fa3"


def test_among_several_faster_ones_the_order_decides_again():
    assert chosen(Bench(fa3=10.0, cudnn=8.1, flash=8.0)) == "cudnn"


def test_one_sentence_tells_choice_times_and_what_was_not_taken():
    bench = Bench(fa3=8.1, cudnn=9.0, flash=20.0)
    bench.replace("fa4", pinned_sdpa("flash"), Support(False, "no package with fa4 is installed"))
    chooser = bench.chooser()
    for _ in range(3):
        chosen(bench, chooser=chooser)
    (sentence,) = bench.said
    assert "up to 2048 rows of bfloat16: fa3 (measured on 2 heads at 1100 rows: " in sentence
    assert "fa3 8.10 ms, cudnn 9.00 ms, flash 20.00 ms" in sentence
    assert "not fa4 (no package with fa4 is installed)" in sentence


def test_a_hopelessly_slow_kernel_is_not_timed_again():
    bench = Bench(fa3=8.0, cudnn=9.0, memory_efficient=900.0)
    chosen(bench)
    assert bench.ran.count("memory_efficient") == 2 < bench.ran.count("fa3")


def test_a_kernel_that_fails_is_not_available_and_says_why():
    bench = Bench(fa3=1.0, cudnn=5.0)

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("no kernel image is available\nCUDA kernel errors might be")

    bench.replace("fa3", broken)
    assert chosen(bench) == "cudnn"
    assert "not fa3 (it failed: RuntimeError: no kernel image is available)" in bench.said[0]


def test_a_kernel_that_is_wrong_is_not_taken_however_fast():
    bench = Bench(fa3=1.0, cudnn=5.0)
    right = bench.runner("fa3")
    bench.replace("fa3", lambda q, k, v, scale: right(q, k, v, scale) * 1.05)
    assert chosen(bench) == "cudnn"
    assert "not fa3 (its result is wrong by 5" in bench.said[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_input_that_judges_nobody_refuses_nobody(value):
    bench = Bench(fa3=1.0)
    q, k, v = tensors(1100)
    assert bench.chooser().kernel(q, k, torch.full_like(v, value), SCALE).name == "fa3"


def test_no_kernel_at_all_is_an_error_that_names_each_and_the_way_out():
    bench = Bench(fa3=1.0, cudnn=1.0)
    for name in ("fa3", "cudnn"):
        bench.replace(name, pinned_sdpa("flash"), Support(False, f"{name} is missing"))
    with pytest.raises(BackendError) as caught:
        chosen(bench)
    message = str(caught.value)
    assert "up to 2048 rows" in message and "fa3: fa3 is missing; cudnn: cudnn is missing" in message
    assert "--diffusion-attention-backend" in message


def test_small_sizes_follow_the_order_without_being_timed():
    bench = Bench(fa3=100.0, cudnn=1.0)
    assert chosen(bench, rows=300) == "fa3"
    assert bench.ran == ["fa3"] and "too small" in bench.said[0]


def test_small_sizes_pass_over_what_fails():
    bench = Bench(fa3=1.0, cudnn=1.0)
    bench.replace("fa3", pinned_sdpa("flash"), Support(False, "no"))
    assert chosen(bench, rows=7) == "cudnn"


def test_sizes_of_one_bucket_share_a_measurement_and_others_do_not():
    bench = Bench(fa3=1.0)
    chooser = bench.chooser()
    for rows in (1025, 2048, 1500, 2049):
        chosen(bench, rows, chooser)
    assert [str(choice.bucket) for choice in chooser.choices] == [
        "up to 2048 rows of bfloat16",
        "up to 4096 rows of bfloat16",
    ]


def test_choices_are_bounded(monkeypatch):
    monkeypatch.setattr(choice_module, "MAX_CHOICES", 3)
    bench = Bench(fa3=1.0)
    chooser = bench.chooser()
    for rows in (1, 2, 4, 8, 16):
        chosen(bench, rows, chooser)
    assert [choice.bucket.key_rows for choice in chooser.choices] == [4, 8, 16]
    assert MAX_CHOICES >= 42, "buckets of both row counts up to 2^20"


def test_queries_with_pad_rows_and_their_fewer_keys_are_one_size():
    bench = Bench(fa3=1.0)
    q, k, v = tensors(1100, keys=1030)
    out = bench.chooser().attend(q, k, v, SCALE)
    assert out.shape == q.shape and out.isfinite().all()


def test_large_sizes_are_measured_on_few_heads(monkeypatch):
    from vllm_h3_plugin.attention import trial

    monkeypatch.setattr(trial, "_BUDGET_FLOP", 1.0)
    bench = Bench(fa3=1.0)
    bench.chooser().kernel(*tensors(1100, heads=9), SCALE)
    assert set(bench.heads) == {4}


def test_nothing_is_measured_while_a_graph_is_recorded():
    bench = Bench(fa3=1.0, cudnn=0.1)
    capturing = [True]
    chooser = bench.chooser(capturing=lambda: capturing[0])
    assert chosen(bench, chooser=chooser) == "fa3" and not bench.ran and "recorded" in bench.said[0]
    capturing[0] = False
    assert chosen(bench, chooser=chooser) == "cudnn", "it was not kept"


def test_problems_tells_of_every_kernel_whether_it_runs():
    bench = Bench(fa3=1.0, cudnn=1.0)
    bench.replace("fa3", pinned_sdpa("flash"), Support(False, "no"))
    assert bench.chooser().problems(*tensors(64), SCALE) == {"fa3": "no", "cudnn": None}


def file(folder: Path, facts: DeviceFacts = FACTS, plugin: str = "1.0") -> ChoiceFile:
    return ChoiceFile(folder / "attention", facts, plugin)


def measured(folder: Path) -> None:
    """A process in which cuDNN is measured to be the faster one."""
    bench = Bench(fa3=10.0, cudnn=5.0)
    assert chosen(bench, chooser=bench.chooser(memory=file(folder))) == "cudnn"


def test_a_measurement_is_remembered_by_the_next_process(tmp_path):
    measured(tmp_path)
    # Now the order would win; what was measured counts.
    second = Bench(fa3=1.0, cudnn=1.0)
    assert chosen(second, chooser=second.chooser(memory=file(tmp_path))) == "cudnn"
    assert second.ran == ["cudnn"], "run once to see that it still runs"
    assert "remembered from a measurement" in second.said[0] and "cudnn 5.00 ms" in second.said[0]


@pytest.mark.parametrize(
    "other",
    [
        {"facts": DeviceFacts("cuda", "Other GPU", 90, "2.11.0", 91002, FACTS.flash)},
        {"facts": DeviceFacts("cuda", "Some GPU", 121, "2.11.0", 91002, FACTS.flash)},
        {"facts": DeviceFacts("cuda", "Some GPU", 90, "2.13.0", 91002, FACTS.flash)},
        {"facts": DeviceFacts("cuda", "Some GPU", 90, "2.11.0", 91500, FACTS.flash)},
        {"facts": DeviceFacts("cuda", "Some GPU", 90, "2.11.0", 91002, None)},
        {"plugin": "1.1"},
    ],
)
def test_another_device_or_version_remembers_nothing(tmp_path, other):
    measured(tmp_path)
    second = Bench(fa3=1.0, cudnn=1.0)
    assert chosen(second, chooser=second.chooser(memory=file(tmp_path, **other))) == "fa3"


def test_sizes_are_added_to_the_file_by_different_processes(tmp_path):
    for rows in (1100, 2100):
        bench = Bench(fa3=10.0, cudnn=5.0)
        chosen(bench, rows, bench.chooser(memory=file(tmp_path)))
    bench = Bench(fa3=1.0, cudnn=1.0)
    chooser = bench.chooser(memory=file(tmp_path))
    assert [chosen(bench, rows, chooser) for rows in (1100, 2100)] == ["cudnn", "cudnn"]
    assert [path.name for path in (tmp_path / "attention").iterdir()] == [file(tmp_path).path.name]


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda text: text[: len(text) // 2], "JSON"),
        (lambda text: text.replace('"heads": 2', '"heads": 0'), "choices.0.heads"),
        (lambda text: text.replace('"kernel": "cudnn"', '"kernel": "gone"'), "'gone' was not measured"),
        (lambda text: text.replace("Some GPU", "That GPU"), "another device"),
        (lambda text: "", "JSON"),
        (lambda text: "[" * 100_000, "JSON"),
    ],
)
def test_a_damaged_file_is_named_and_measured_again_and_mended(tmp_path, damage, word):
    measured(tmp_path)
    path = file(tmp_path).path
    path.write_text(damage(path.read_text()))
    second = Bench(fa3=1.0, cudnn=1.0)
    assert chosen(second, chooser=second.chooser(memory=file(tmp_path))) == "fa3"
    assert str(path) in second.said[0] and "damaged" in second.said[0] and word in second.said[0]
    third = Bench(fa3=1.0, cudnn=1.0)
    assert chosen(third, chooser=third.chooser(memory=file(tmp_path))) == "fa3"
    assert len(third.said) == 1 and "remembered" in third.said[0]


def test_a_remembered_kernel_that_no_longer_runs_is_measured_again(tmp_path):
    measured(tmp_path)
    second = Bench(fa3=1.0, cudnn=1.0)
    second.replace("cudnn", pinned_sdpa("flash"), Support(False, "it went away"))
    assert chosen(second, chooser=second.chooser(memory=file(tmp_path))) == "fa3"
    assert "cudnn was remembered but it went away; measuring again" in second.said[0]


def test_a_folder_that_cannot_be_written_costs_a_line_and_no_request(tmp_path):
    (tmp_path / "attention").write_text("a file where the folder should be")
    bench = Bench(fa3=1.0)
    assert chosen(bench, chooser=bench.chooser(memory=file(tmp_path))) == "fa3"
    assert any("cannot be written" in line for line in bench.said)


def test_a_choice_made_for_want_of_memory_is_not_remembered(tmp_path):
    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    bench = Bench(fa3=1.0, cudnn=1.0)
    bench.replace("fa3", full)
    assert chosen(bench, chooser=bench.chooser(memory=file(tmp_path))) == "cudnn"
    assert not file(tmp_path).path.exists()


def test_small_sizes_are_not_written(tmp_path):
    bench = Bench(fa3=1.0)
    chosen(bench, 100, bench.chooser(memory=file(tmp_path)))
    assert not file(tmp_path).path.exists()


def test_a_choice_written_and_read_is_the_same_but_for_its_origin(tmp_path):
    bucket = Bucket.of(AttentionShape(38_016, 37_990, 56, 128, torch.bfloat16))
    choice = Choice(bucket, "fa3", "measured", {"fa3": 8.1, "cudnn": 9.0}, {"fa4": "no"}, 9, 37_990)
    file(tmp_path).keep(choice, pytest.fail)
    read = file(tmp_path).recall(bucket, pytest.fail)
    assert read is not None and read.origin == "remembered"
    assert (read.bucket, read.kernel, read.milliseconds, read.refused, read.heads, read.rows) == (
        choice.bucket,
        choice.kernel,
        choice.milliseconds,
        choice.refused,
        choice.heads,
        choice.rows,
    )
