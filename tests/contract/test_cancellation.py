# SPDX-License-Identifier: Apache-2.0
"""The worker's look between two steps: one file, named job, memory given back; and the ledger of a request."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from vllm_h3_plugin.attention.low_bit import check_tokens
from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.host import cancel, run_state
from vllm_h3_plugin.host.cancel import Cancellation, RequestCancelledError
from vllm_h3_plugin.host.job_worker import JobWorker
from vllm_h3_plugin.host.progress import Progress
from vllm_h3_plugin.quantization.recipe import AttentionPrecision


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("H3_RUN_DIR", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path


def stop(job_id: str) -> JobWorker:
    worker = JobWorker()
    assert worker.stop(job_id)
    return worker


def test_only_named_jobs_stop() -> None:
    cancellation, dit = Cancellation(), torch.nn.Identity()
    cancellation.install(dit)
    worker = stop("video_gen_1")
    with cancellation.request("video_gen_2-abc"):
        dit(torch.zeros(1))
    assert worker.stop("video_gen_3")
    for stopped in ("video_gen_1-abc", "video_gen_3-abc"):
        with pytest.raises(RequestCancelledError), cancellation.request(stopped):
            dit(torch.zeros(1))
    dit(torch.zeros(1))


def test_a_rank_that_looks_late_stops_too_whatever_was_stopped_meanwhile() -> None:
    """Replicas come to their next look at different times, and the host tells of the end that the first one made."""
    late = Cancellation(agree=lambda mine: mine)
    with pytest.raises(RequestCancelledError), late.request("video_gen_1-abc"):
        late.check()
        for job in ("video_gen_1", "video_gen_2", "video_gen_1", *(f"video_gen_{n}" for n in range(10, 70))):
            stop(job)
        late.check()


def test_the_file_does_not_grow_without_end() -> None:
    for number in range(cancel.KEPT + 5):
        stop(f"video_gen_{number}x")
    path = cancel.flag()
    assert path is not None and len(path.read_text().split()) == cancel.KEPT


def test_a_vae_s_decoder_is_stopped_between_two_tiles() -> None:
    cancellation, decoder = Cancellation(), torch.nn.Identity()
    cancellation.install_local(decoder)
    cancellation.install_local(None)
    with pytest.raises(RequestCancelledError), cancellation.request("video_gen_1-abc"):
        decoder(torch.zeros(1))
        stop("video_gen_1")
        decoder(torch.zeros(1))


def test_ranks_stop_together_whichever_saw_the_file() -> None:
    votes: list[bool] = []

    def agree(mine: bool) -> bool:
        votes.append(mine)
        return len(votes) == 2

    cancellation = Cancellation(agree=agree)
    with pytest.raises(RequestCancelledError), cancellation.request("video_gen_1-abc"):
        cancellation.check()
        cancellation.check()
    assert votes == [False, False]


def test_a_stopped_request_holds_no_tensor_any_more() -> None:
    cancellation = Cancellation()
    stop("video_gen_1")
    held: list[weakref.ref[torch.Tensor]] = []

    def forward() -> None:
        latent = torch.zeros(1000)
        held.append(weakref.ref(latent))
        cancellation.check()

    try:
        with cancellation.request("video_gen_1-abc"):
            forward()
    except RequestCancelledError:
        gc.collect()
        assert held[0]() is None
    else:
        raise AssertionError("it was not stopped")


def test_nothing_is_asked_of_the_ranks_without_a_run_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("H3_RUN_DIR")

    def agree(mine: bool) -> bool:
        raise AssertionError("asked")

    assert cancel.flag() is None
    assert not JobWorker().stop("video_gen_1")
    cancellation = Cancellation(agree=agree)
    with cancellation.request("video_gen_1-abc"):
        cancellation.check()


def test_the_ledger_tells_seconds_by_phase_and_step_of_its_own_request_alone() -> None:
    now = [100.0]
    progress = Progress(lambda: now[0])
    progress.begin("video_gen_1-abc")
    for phase, seconds in (("encoding text", 2.0), ("denoising", 0.0)):
        progress.phase(phase)
        now[0] += seconds
    progress.tokens(64)
    for _ in range(3):
        now[0] += 5.0
        progress.step_done()
    progress.phase("decoding")
    now[0] += 1.0
    progress.end(peak_memory_bytes=7)
    told = JobWorker().ledger("video_gen_1")
    assert told["phases"] == {"encoding text": 2.0, "denoising": 15.0, "decoding": 1.0}
    assert (told["steps_s"], told["tokens"], told["peak_memory_bytes"]) == ([5.0, 5.0, 5.0], 64, 7)
    assert told["ended_at"] == 118.0
    assert JobWorker().ledger("video_gen_2") == {}
    state = run_state.read(run_state.PROGRESS)
    assert state is not None
    assert (state["phase"], state["request"]) == ("idle", "video_gen_1-abc")


def test_a_dead_worker_is_told_by_its_error_on_both_hosts() -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    for error in (EngineDeadError(), RuntimeError("Executor shut down")):
        failure = JobWorker().explain(error)
        assert (failure.code, failure.http_status) == ("engine_dead", 503)
    assert JobWorker().explain(RuntimeError("no")).code == "generation_failed"


def test_a_request_that_a_worker_finds_too_long_for_its_attention_is_the_callers_fault() -> None:
    """The executor hands on a worker's error as text, without its status."""
    with pytest.raises(UsageError) as caught:
        check_tokens(AttentionPrecision.INT8, 40_000)
    failure = JobWorker().explain(RuntimeError(f"Error in worker: {caught.value}"))
    assert (failure.code, failure.http_status) == ("invalid_request", 400) and "40000" in failure.message
