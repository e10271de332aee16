# SPDX-License-Identifier: Apache-2.0
"""`vllm-h3 bench load` in small: every figure is there, and a loader that does worse is seen in it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tools.results import parse_result
from vllm_h3_plugin.checkpoint import page_cache
from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.checkpoint.loader import LoadReport
from vllm_h3_plugin.conditioning.table import TableBuilder
from vllm_h3_plugin.errors import CheckpointError, UsageError

LOAD_KEYS = {
    "load_over_raw_read",
    "snapshot_restart_over_read",
    "table_build_over_read",
    "page_cache_share_after_load",
    "device_peak_over_resident_plus_layer",
}
MEMORY_KEYS = {"resident_gib_predicted", "prediction_error"}


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """The verb sets variables for its own process; here that is every later test's, and their servers'."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def bench(device: torch.device, one_thread: None) -> Any:
    """The modules under test, imported when there is a world for the host to find."""
    from vllm_h3_plugin.host.bench import checkpoint as bench_checkpoint
    from vllm_h3_plugin.host.bench import load as bench_load
    from vllm_h3_plugin.host.bench import pipeline as bench_pipeline
    from vllm_h3_plugin.host.bench import reads as bench_reads
    from vllm_h3_plugin.host.bench import report as bench_report
    from vllm_h3_plugin.host.bench import table as bench_table

    return SimpleNamespace(
        checkpoint=bench_checkpoint,
        load=bench_load,
        pipeline=bench_pipeline,
        reads=bench_reads,
        report=bench_report,
        table=bench_table,
        device=device,
    )


@pytest.fixture(scope="module")
def checkpoint(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = bench.checkpoint.spec_of(true_width=False, layers=2, text_layers=1)
    written: list[int] = []
    root: Path = bench.checkpoint.write(tmp_path_factory.mktemp("bench"), spec, written.append)
    assert sum(written) == bench.checkpoint.planned_bytes(spec)
    return root


@pytest.fixture(scope="module")
def run(bench: Any, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One whole run, what it said as it went, and its results."""
    said: list[tuple[str, str]] = []
    work = tmp_path_factory.mktemp("work")
    options = bench.load.Options(checkpoint, work, repeat=1, threads=2)
    subject = bench.load.Bench(options, bench.device, ends=lambda step, words, measured: said.append((step, words)))
    found = subject.run()
    results = bench.report.results(found, command="vllm-h3 bench load", subject="tiny")
    return SimpleNamespace(found=found, said=said, work=work, **results)


def test_every_step_ran_and_said_so(run: Any, bench: Any) -> None:
    assert run.found.errors == {}
    steps = bench.load
    assert [step for step, _ in run.said] == [
        steps.RAW,
        steps.LOAD,
        steps.LOAD_AND_WRITE,
        steps.SNAPSHOT_RAW,
        steps.RESTART,
        steps.ADALN_RAW,
        steps.TABLE,
    ]
    assert all("GiB/s" in words or "rows" in words for _, words in run.said)


def test_the_steps_are_what_their_names_say(run: Any, bench: Any, checkpoint: Path) -> None:
    loads, raw = run.found.loads, run.found.raw
    (load,), (written,), (restart,) = (
        loads[n] for n in (bench.load.LOAD, bench.load.LOAD_AND_WRITE, bench.load.RESTART)
    )
    assert (load.origin, load.detail) == ("checkpoint", "no snapshot written")
    assert written.origin == "checkpoint" and written.detail.startswith("snapshot ")
    assert restart.origin == "snapshot" and restart.detail in written.detail
    assert raw[bench.load.RAW][0].nbytes == sum(path.stat().st_size for path in checkpoint.rglob("*.safetensors"))
    assert restart.nbytes < raw[bench.load.SNAPSHOT_RAW][0].nbytes
    assert raw[bench.load.ADALN_RAW][0].nbytes == run.found.tables[0].nbytes
    assert {vae["part"] for vae in load.vaes} == {"video_vae", "audio_vae"}
    assert restart.parts == load.parts


def test_results_have_the_form_and_the_keys_that_are_kept(run: Any) -> None:
    load, memory = parse_result("load", run.load), parse_result("memory", run.memory)
    assert load.ratios.keys() >= LOAD_KEYS and memory.ratios.keys() >= MEMORY_KEYS
    unmeasured = {name for name, value in load.ratios.items() if value is None}
    assert unmeasured == {"device_peak_over_resident_plus_layer"}
    assert "CPU" in load.reasons["device_peak_over_resident_plus_layer"]
    assert load.versions.keys() >= {"python", "torch", "vllm", "vllm-omni", "vllm-h3-plugin"}


def test_figures_are_sane(run: Any) -> None:
    load, memory = run.load["ratios"], run.memory["ratios"]
    assert 0 < load["load_over_raw_read"] < 1.5
    assert load["snapshot_restart_over_read"] > 0.5 and load["table_build_over_read"] > 0.5
    assert load["table_kept_over_read"] >= load["table_build_over_read"]
    assert load["table_equals_host"] == 1
    assert load["page_cache_share_after_load"] <= 0.02
    assert load["host_peak_beyond_buffers_gib"] < 0.5
    assert 50 < memory["resident_gib_predicted"] <= 55.5
    assert memory["prediction_error"] <= 0.01


def test_every_read_began_cold(run: Any) -> None:
    runs = [item for group in (run.found.raw, run.found.loads) for found in group.values() for item in found]
    assert all(item.cold.share <= 0.02 and not item.cold.reason for item in (*runs, *run.found.tables))


def test_nothing_is_left_in_the_work_folder(run: Any) -> None:
    assert list(run.work.iterdir()) == []


@pytest.fixture
def loaded(bench: Any, checkpoint: Path, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Loads a pipeline once, under whatever a test has broken by then."""
    inventory = take_inventory(checkpoint, None).require_clean()
    files = bench.pipeline.weight_files(inventory)

    def load() -> Any:
        settings = {"snapshot": "off", "cache_dir": tmp_path, "recipe": "fp8", "read_threads": 2}
        pipeline, result = bench.pipeline.load(inventory, bench.device, files, **settings)
        return SimpleNamespace(pipeline=pipeline, run=result, inventory=inventory)

    with bench.pipeline.omni_world():
        yield load


def measured(bench: Any, run: Any, **changes: Any) -> Any:
    found = dataclasses.replace(run.found, **changes)
    return bench.report.results(found, command="c", subject="s")["load"]["ratios"]


def test_a_loader_that_leaves_pages_cached_is_seen(
    bench: Any, run: Any, loaded: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(paths: Any) -> None:
        for path in paths:
            Path(path).read_bytes()

    monkeypatch.setattr(page_cache, "drop", leave)
    result = loaded().run
    assert result.cold.share <= 0.02
    assert measured(bench, run, loads={bench.load.LOAD: [result]})["page_cache_share_after_load"] > 0.5


def test_a_loader_that_wants_twice_the_memory_is_seen(
    bench: Any, run: Any, loaded: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_h3_plugin.host.loading import PartLoader

    hoard = 512 << 20
    fill = PartLoader.from_checkpoint

    def wasteful(self: PartLoader, *args: Any, **kwargs: Any) -> LoadReport:
        torch.ones(hoard, dtype=torch.uint8)
        return fill(self, *args, **kwargs)

    monkeypatch.setattr(PartLoader, "from_checkpoint", wasteful)
    result = loaded().run
    if result.host_growth_bytes is None:
        pytest.fail(f"the peak cannot be measured here: {result.host_reason}")
    excess = measured(bench, run, loads={bench.load.LOAD: [result]})["host_peak_beyond_buffers_gib"]
    assert excess * 2**30 > hoard / 2


def test_a_table_with_a_wrong_value_is_seen(
    bench: Any, run: Any, loaded: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = loaded()
    add = TableBuilder.add

    def wrong(self: TableBuilder, layer: int, project: Any) -> None:
        add(self, layer, project)
        self._values[-1, self._shape.columns(layer).stop - 1] += 1

    monkeypatch.setattr(TableBuilder, "add", wrong)
    table = bench.table.build(subject.pipeline, subject.inventory, 0)
    assert not table.equal
    assert measured(bench, run, tables=[table])["table_equals_host"] == 0


def test_a_step_that_fails_stays_in_the_table_and_the_others_run(
    bench: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise CheckpointError("planted", why="a test")

    monkeypatch.setattr(bench.table, "build", broken)
    monkeypatch.setattr(bench.load.Bench, "_from_checkpoint", broken)
    options = bench.load.Options(checkpoint, tmp_path, repeat=1, threads=2)
    found = bench.load.Bench(options, bench.device).run()
    assert found.errors.keys() == {bench.load.LOAD, bench.load.TABLE}
    results = bench.report.results(found, command="c", subject="s")["load"]
    assert results["ratios"]["load_over_raw_read"] is None and results["ratios"]["table_build_over_read"] is None
    assert "planted" in results["reasons"]["load_over_raw_read"]
    assert results["ratios"]["snapshot_restart_over_read"] > 0
    assert next(row for row in results["rows"] if row["Step"] == bench.load.LOAD)["Note"] == "planted: a test"


def test_files_that_cannot_be_made_cold_are_said_to_be_warm(
    bench: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted((checkpoint / "transformer").glob("*.safetensors"))
    for path in files:
        path.read_bytes()
    monkeypatch.setattr(bench.reads, "drop", lambda paths: None)
    monkeypatch.setattr(bench.reads, "_PAUSE_S", 0)
    read = bench.reads.read_raw(bench.reads.whole(files), threads=2, block_bytes=1 << 20)
    assert read.cold.share > 0.9 and "stayed in the page cache" in read.cold.reason


def test_a_raw_read_reads_every_byte_once_and_notices_a_short_file(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(300_001))
    ranges = [bench.reads.Range(path, 0, 100_000), bench.reads.Range(path, 100_000, 300_001)]
    assert bench.reads.joined(ranges) == bench.reads.whole([path])
    for direct in (True, False):
        how = {"threads": 3, "block_bytes": 1 << 16, "direct": direct}
        assert bench.reads.read_raw(ranges, **how).nbytes == 300_001
        with pytest.raises(CheckpointError, match="ends at byte 300001"):
            bench.reads.read_raw([bench.reads.Range(path, 0, 300_002)], **how)


def test_loads_are_held_against_the_faster_of_two_ways_to_read(run: Any, bench: Any) -> None:
    (faster,), (slower,) = run.found.raw[bench.load.RAW], run.found.raw[bench.load.RAW_OTHER]
    assert faster.rate >= slower.rate and faster.nbytes == slower.nbytes
    assert all(read.direct == faster.direct for step in (bench.load.SNAPSHOT_RAW,) for read in run.found.raw[step])


def test_a_file_system_without_direct_reads_is_read_through_the_cache(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(5000))
    real = os.open

    def refuse(name: Any, flags: int, *args: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument", str(name))
        return real(name, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    read = bench.reads.read_raw(bench.reads.whole([path]), threads=1, block_bytes=1 << 16, direct=True)
    assert (read.nbytes, read.direct) == (5000, False)


def test_no_room_is_said_before_anything_is_written(bench: Any, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)GiB and .* are free.*--work-dir.*--layers"):
        bench.checkpoint.require_room(tmp_path, 1 << 60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeat", "0"], "--repeat = 0.*at least 1"),
        (["--layers", "0"], "--layers = 0.*at least 1"),
        (["somewhere", "--layers", "3"], "beside somewhere.*leave the checkpoint out"),
        (["--keep"], "--keep without --work-dir.*Name a folder"),
    ],
)
def test_arguments_that_measure_nothing_are_refused(arguments: list[str], message: str) -> None:
    from vllm_h3_plugin.cli.bench import app

    with pytest.raises(UsageError, match=f"(?s){message}"):
        app(["load", *arguments], standalone_mode=False)


def test_a_machine_without_an_accelerator_is_told_of_the_reference_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_h3_plugin.cli.bench import app

    monkeypatch.delenv("H3_REFERENCE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"(?s)no accelerator.*H3_REFERENCE=1"):
        app(["load"], standalone_mode=False)


def test_results_of_an_earlier_run_are_not_overwritten(tmp_path: Path) -> None:
    from vllm_h3_plugin.cli import bench

    earlier = tmp_path / "load.json"
    earlier.write_text("mine")
    with pytest.raises(UsageError, match=r"load\.json"):
        bench.load(output=earlier)
    assert earlier.read_text() == "mine"
