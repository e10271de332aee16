# SPDX-License-Identifier: Apache-2.0
"""What becomes of jobs: one after the other, stopped, joined, refused, kept over a kill."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.jobs.job_service import CLIP, FakeOrder, FakeWorker, Told, asked, finished, serving
from vllm_h3_plugin.errors import QueueFullError, ServerError, SettingsError, UsageError
from vllm_h3_plugin.serving.jobs.clips import Clips
from vllm_h3_plugin.serving.jobs.job import Status, new_id
from vllm_h3_plugin.serving.jobs.retention import Retention
from vllm_h3_plugin.serving.jobs.service import JobService, Rules
from vllm_h3_plugin.settings import load


def test_jobs_run_one_after_the_other_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (service, worker):
            orders = [FakeOrder(worker) for _ in range(3)]
            jobs = [(await service.submit(asked(), order))[0] for order in orders]
            await orders[0].began.wait()
            assert [service.view.progress(job).position for job in jobs[1:]] == [1, 2]
            assert not orders[1].began.is_set()
            for job, order in zip(jobs, orders, strict=True):
                await order.began.wait()
                order.end.set()
                ended = await service.wait(job.id)
                assert ended is not None and ended.status is Status.COMPLETED
                assert service.kept.clips.path(job.id).read_bytes() == CLIP
            assert all(order.closed for order in orders)

    asyncio.run(run())


def test_a_failed_job_is_shown_with_its_reason_and_the_line_goes_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (service, worker):
            job, _ = await service.submit(asked(), FakeOrder(worker, RuntimeError("no such thing"), at_once=True))
            ended = await service.wait(job.id)
            assert ended is not None
            shown = service.view.shown(ended)
            assert (shown["status"], shown["error"]) == (
                "failed",
                {"code": "generation_failed", "message": "no such thing"},
            )
            assert (await finished(service, worker)).status is Status.COMPLETED

    asyncio.run(run())


def test_a_waiting_and_a_running_job_can_be_cancelled_and_the_next_one_runs(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (service, worker):
            orders = [FakeOrder(worker) for _ in range(2)]
            running, waiting = [(await service.submit(asked(), order))[0] for order in orders]
            await orders[0].began.wait()
            assert await service.cancel(waiting.id)
            assert orders[1].closed and not orders[1].began.is_set()
            assert await service.cancel(running.id)
            for job in (running, waiting):
                ended = await service.wait(job.id)
                assert ended is not None and ended.failure is not None
                assert (ended.status, ended.failure.code) == (Status.CANCELLED, "cancelled")
                assert service.view.shown(ended)["status"] == "failed"
            assert worker.stopped == [running.id]
            assert (await finished(service, worker)).status is Status.COMPLETED

    asyncio.run(run())


def test_a_worker_that_cannot_be_told_has_its_order_cancelled(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (service, worker):
            worker.deaf = True
            order = FakeOrder(worker)
            job, _ = await service.submit(asked(), order)
            await order.began.wait()
            assert await service.cancel(job.id)
            ended = await service.wait(job.id)
            assert ended is not None and ended.status is Status.CANCELLED
            assert (await finished(service, worker)).status is Status.COMPLETED

    asyncio.run(run())


def test_a_deleted_job_leaves_neither_record_nor_file(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (service, worker):
            order = FakeOrder(worker)
            job, _ = await service.submit(asked(), order)
            await order.began.wait()
            assert await service.delete(job.id)
            assert await service.get(job.id) is None
            done = await finished(service, worker)
            assert await service.get(job.id) is None
            assert await service.delete(done.id) and not await service.delete(done.id)
            assert list(service.kept.clips.folder.iterdir()) == []

    asyncio.run(run())


def test_a_job_that_takes_too_long_is_stopped_and_says_which_setting_decides(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, Rules(deadline_s=0.05)) as (service, worker):
            job, _ = await service.submit(asked(), FakeOrder(worker))
            ended = await service.wait(job.id)
            assert ended is not None and ended.failure is not None
            assert (ended.failure.code, ended.failure.http_status) == ("deadline_exceeded", 504)
            assert "H3_JOB_TIMEOUT_S" in ended.failure.message

    asyncio.run(run())


def test_a_long_job_that_moves_as_its_steps_predict_is_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("_PREDICT_S", 0.01), ("AFTER_LAST_STEP_S", 0.0)):
        monkeypatch.setattr(f"vllm_h3_plugin.serving.jobs.run.{name}", seconds)

    async def run(rules: Rules, each: float) -> str:
        async with serving(tmp_path, rules) as (service, worker):
            order = FakeOrder(worker)
            job, _ = await service.submit(asked(), order)
            worker.state = {
                "request": f"{job.id}-1", "phase": "denoising", "step": 2, "steps": 4, "seconds_per_step": each,
                "time": time.time() + 60, "busy_since": 0.0,
            }  # fmt: skip
            await order.began.wait()
            await asyncio.sleep(0.3)
            order.end.set()
            ended = await service.wait(job.id)
            assert ended is not None
            return ended.failure.code if ended.failure else "made"

    assert asyncio.run(run(Rules(deadline_s=0.1), 10.0)) == "made"
    assert asyncio.run(run(Rules(deadline_s=0.1), 0.0001)) == "deadline_exceeded"
    assert asyncio.run(run(Rules(deadline_s=0.1, fixed=True), 10.0)) == "deadline_exceeded"


def test_the_line_refuses_what_would_wait_behind_too_many(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, Rules(max_queue=1)) as (service, worker):
            orders = [FakeOrder(worker) for _ in range(3)]
            await service.submit(asked(), orders[0])
            await orders[0].began.wait()
            assert service.accepting
            await service.submit(asked(), orders[1])
            assert not service.accepting
            with pytest.raises(QueueFullError, match=r"1 clips wait already.*H3_MAX_QUEUE is 1.*Ask again in") as full:
                await service.submit(asked(), orders[2])
            assert full.value.http_status == 429
            assert full.value.details["retry_after_s"] >= 1
            assert orders[2].closed

    asyncio.run(run())


def test_a_caller_may_wait_behind_fewer_than_the_line_takes_and_never_behind_more(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, Rules(max_queue=2)) as (service, worker):
            first = FakeOrder(worker)
            # Nothing runs and nobody waits: it does not wait at all.
            await service.submit(replace(asked(), most_waiting=0), first)
            await first.began.wait()
            with pytest.raises(QueueFullError, match=r"0 clips wait already.*this request asks for at most 0"):
                await service.submit(replace(asked(), most_waiting=0), FakeOrder(worker))
            await service.submit(replace(asked(), most_waiting=1), FakeOrder(worker))
            with pytest.raises(QueueFullError, match=r"1 clips wait already.*at most 1"):
                await service.submit(replace(asked(), most_waiting=1), FakeOrder(worker))
            await service.submit(asked(), FakeOrder(worker))
            with pytest.raises(QueueFullError, match="H3_MAX_QUEUE is 2"):
                await service.submit(replace(asked(), most_waiting=9), FakeOrder(worker))

    asyncio.run(run())


def test_an_id_carries_the_servers_name_and_its_clip_is_found_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, Rules(replica="b2")) as (service, worker):
            job = await finished(service, worker)
            assert re.fullmatch(r"video_gen_b2_[0-9a-f]{32}", job.id)
        async with serving(tmp_path, Rules(replica="b2")) as (service, _):
            assert (await service.get(job.id)) is not None

    asyncio.run(run())
    assert re.fullmatch(r"video_gen_[0-9a-f]{32}", new_id())


@pytest.mark.parametrize("name", ["A", "a_b", "", "a" * 17, "ä", "a/b"])
def test_a_name_that_a_balancer_could_not_tell_from_an_id_is_refused(name: str) -> None:
    if not name:
        assert load({"H3_REPLICA": name}).replica is None
        return
    with pytest.raises(SettingsError, match="H3_REPLICA"):
        load({"H3_REPLICA": name})


def test_no_queue_still_takes_one_clip(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, Rules(max_queue=0)) as (service, worker):
            assert (await finished(service, worker)).status is Status.COMPLETED

    asyncio.run(run())


def test_a_key_makes_one_job_of_several_requests_and_refuses_a_different_one(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (service, worker):
            first, second = FakeOrder(worker, at_once=True), FakeOrder(worker)
            job, new = await service.submit(asked("k"), first)
            await service.wait(job.id)
            again, again_new = await service.submit(asked("k"), second)
            assert (again.id, new, again_new) == (job.id, True, False)
            assert second.closed
            with pytest.raises(UsageError, match="Idempotency-Key 'k' was used for another request"):
                await service.submit(asked("k", fingerprint="b"), FakeOrder(worker))
            await service.delete(job.id)
            assert (await service.submit(asked("k", fingerprint="b"), FakeOrder(worker, at_once=True)))[1]

    asyncio.run(run())


def test_a_full_disk_fails_the_job_and_leaves_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (service, worker):
            with monkeypatch.context() as patch:

                def full(descriptor: int) -> None:
                    raise OSError(errno.ENOSPC, "No space left on device")

                patch.setattr("vllm_h3_plugin.serving.jobs.clips.os.fsync", full)
                failed = await finished(service, worker)
            assert failed.failure is not None
            assert (failed.failure.code, failed.failure.http_status) == ("disk_full", 507)
            assert "No space left on device" in failed.failure.message
            assert list(service.kept.clips.folder.iterdir()) == []
            assert (await finished(service, worker)).status is Status.COMPLETED

    asyncio.run(run())


def test_after_a_kill_finished_clips_are_there_and_the_others_say_so(tmp_path: Path) -> None:
    async def run() -> None:
        worker = FakeWorker()
        killed = JobService(tmp_path, worker, Rules(), Told())
        await killed.start()
        done = await finished(killed, worker)
        order = FakeOrder(worker)
        running, _ = await killed.submit(asked("k"), order)
        await order.began.wait()
        waiting, _ = await killed.submit(asked(), FakeOrder(worker))
        for task in killed._tasks:
            task.cancel()
        # What a kill leaves: records as they were, no lock, half a file.
        killed.kept._owners.leave()
        (killed.kept.clips.folder / f"{running.id}.mp4.part").write_bytes(b"half")
        (killed.kept.clips.folder / "video_gen_stranger.mp4").write_bytes(b"whose?")
        async with serving(tmp_path) as (service, _):
            listed, more = service.kept.store.listed()
            assert [job.id for job in listed] == [waiting.id, running.id, done.id]
            assert not more
            assert [job.failure and job.failure.code for job in listed] == ["interrupted", "interrupted", None]
            assert service.kept.clips.path(done.id).read_bytes() == CLIP
            names = {path.name for path in service.kept.clips.folder.iterdir()}
            assert names == {f"{done.id}.mp4", f"{done.id}.json"}

    asyncio.run(run())


def test_a_clip_that_was_promoted_before_its_record_is_finished_all_the_same(tmp_path: Path) -> None:
    async def run() -> None:
        worker = FakeWorker()
        killed = JobService(tmp_path, worker, Rules(), Told())
        await killed.start()
        done = await finished(killed, worker)
        killed._tasks[0].cancel()
        record = {**done.as_record(), "status": "in_progress", "ended_at": None, "nbytes": 0}
        killed.kept.store._db.execute(
            "UPDATE jobs SET status='in_progress', ended_at=NULL, record=? WHERE id=?", (json.dumps(record), done.id)
        )
        killed.kept._owners.leave()
        async with serving(tmp_path) as (service, _):
            found = await service.get(done.id)
            assert found == done

    asyncio.run(run())


def test_jobs_of_a_server_that_lives_are_left_alone(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (first, worker):
            order = FakeOrder(worker)
            job, _ = await first.submit(asked(), order)
            await order.began.wait()
            async with serving(tmp_path) as (second, _):
                seen = await second.get(job.id)
                assert seen is not None and seen.status is Status.IN_PROGRESS
                with pytest.raises(UsageError, match="is another server's"):
                    await second.delete(job.id)
            order.end.set()
            ended = await first.wait(job.id)
            assert ended is not None and ended.status is Status.COMPLETED

    asyncio.run(run())


def test_clips_whose_database_is_gone_are_listed_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (service, worker):
            done = await finished(service, worker)
        for path in (tmp_path / "h3").glob("jobs.sqlite*"):
            path.unlink()
        async with serving(tmp_path) as (service, _):
            found = await service.get(done.id)
            assert found is not None and found.sha256 == done.sha256

    asyncio.run(run())


def test_a_damaged_database_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "h3").mkdir()
    (tmp_path / "h3" / "jobs.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(ServerError, match=r"jobs\.sqlite cannot be used.*Move jobs\.sqlite\* there away"):
        JobService(tmp_path, FakeWorker(), Rules())


def test_what_is_too_old_or_too_much_goes_with_its_file(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, Rules(retention=Retention(quota_bytes=2 * len(CLIP)))) as (service, worker):
            jobs = [await finished(service, worker) for _ in range(3)]
            assert service.kept.tidy() == [jobs[0].id]
            assert not service.kept.clips.path(jobs[0].id).exists()
            assert service.kept.clips.path(jobs[2].id).exists()
            service.kept.retention = Retention(ttl_s=0.0)
            assert set(service.kept.tidy()) == {jobs[1].id, jobs[2].id}
            assert Clips(service.kept.clips.folder).sweep([], []) == []

    asyncio.run(run())


def test_events_tell_each_move_and_end_with_the_job(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (service, worker):
            order = FakeOrder(worker)
            job, _ = await service.submit(asked(), order)
            seen = []
            async for event in service.view.events(job.id):
                seen.append(event)
                await order.began.wait()
                worker.state = {
                    "request": f"{job.id}-1", "phase": "denoising", "step": len(seen), "steps": 4,
                    "seconds_per_step": 2.0, "time": 0.0, "busy_since": 0.0,
                }  # fmt: skip
                if len(seen) == 3:
                    order.end.set()
            assert [event and event["status"] for event in seen][-1] == "completed"
            percents = [event["progress"] for event in seen if event]
            assert percents == sorted(percents) and percents[-1] == 100

    asyncio.run(run())
