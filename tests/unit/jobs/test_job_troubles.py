# SPDX-License-Identifier: Apache-2.0
"""What goes wrong around jobs: callers at the same moment, records that cannot be used, an end in the middle."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest

from tests.unit.jobs.job_service import CLIP, FakeOrder, FakeWorker, Told, asked, finished, serving
from vllm_h3_plugin.errors import BusyError
from vllm_h3_plugin.serving.jobs.job import Failure, Job, Status
from vllm_h3_plugin.serving.jobs.keeper import INTERRUPTED
from vllm_h3_plugin.serving.jobs.service import JobService, Rules

SOON = 5.0


def test_a_job_that_several_callers_delete_at_once_is_gone_for_all_of_them(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (service, worker):
            first = FakeOrder(worker)
            running, _ = await service.submit(asked(), first)
            waiting, _ = await service.submit(asked(), FakeOrder(worker))
            await first.began.wait()
            for job in (waiting, running):
                assert any(await asyncio.gather(*(service.delete(job.id) for _ in range(8))))
                assert await service.get(job.id) is None

    asyncio.run(run())


def test_a_job_can_be_stopped_at_the_moment_when_it_leaves_the_line(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (service, worker):
            for pauses in range(30):
                job, _ = await service.submit(asked(), FakeOrder(worker))
                for _ in range(pauses):
                    await asyncio.sleep(0)
                assert await service.cancel(job.id), f"neither in the line nor running after {pauses} pauses"
                ended = await service.wait(job.id)
                assert ended is not None and ended.status is Status.CANCELLED

    asyncio.run(run())


@pytest.mark.parametrize("code", ["interrupted", "engine_dead", "insufficient_memory", "disk_full", "not_saved"])
def test_a_key_whose_job_was_lost_makes_it_again(tmp_path: Path, code: str) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (service, worker):
            worker.explain = lambda error: Failure(code, "lost", 503)  # type: ignore[method-assign]
            lost, _ = await service.submit(asked("k"), FakeOrder(worker, RuntimeError(), at_once=True))
            assert (await service.wait(lost.id) or lost).status is Status.FAILED
            again, new = await service.submit(asked("k"), FakeOrder(worker, at_once=True))
            made = await service.wait(again.id)
            assert new and made is not None and made.status is Status.COMPLETED
            assert (await service.submit(asked("k"), FakeOrder(worker)))[0].id == again.id
            assert (await service.get(lost.id) or again).failure is not None

    asyncio.run(run())


def test_a_key_whose_request_failed_by_itself_is_not_made_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (service, worker):
            failed, _ = await service.submit(asked("k"), FakeOrder(worker, RuntimeError("no"), at_once=True))
            await service.wait(failed.id)
            again, new = await service.submit(asked("k"), FakeOrder(worker))
            assert (again.id, new) == (failed.id, False)

    asyncio.run(run())


def test_records_that_are_locked_make_the_server_busy_and_hold_no_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_h3_plugin.serving.jobs.store._WAIT_S", 0.05)

    async def run() -> None:
        async with serving(tmp_path) as (service, worker):
            order = FakeOrder(worker)
            job, _ = await service.submit(asked(), order)
            await order.began.wait()
            other = sqlite3.connect(service.kept.store.path, isolation_level=None)
            other.execute("BEGIN EXCLUSIVE")
            with pytest.raises(BusyError, match=r"cannot be recorded.*locked.*then ask again") as busy:
                await service.submit(asked(), FakeOrder(worker))
            assert busy.value.details["retry_after_s"] > 0
            waiting = asyncio.create_task(service.wait(job.id))
            order.end.set()
            ended = await asyncio.wait_for(waiting, SOON)
            assert ended is not None and ended.status is Status.COMPLETED
            other.execute("ROLLBACK")
            other.close()
            assert (await finished(service, worker)).status is Status.COMPLETED
            (recorded,) = service.kept.store._db.execute("SELECT status FROM jobs WHERE id=?", (job.id,)).fetchone()
            assert recorded == "completed"

    asyncio.run(run())


def test_an_observer_that_fails_leaves_no_caller_waiting(tmp_path: Path) -> None:
    class Broken(Told):
        def ended(self, job: Job) -> None:
            raise ValueError("Counters can only be incremented by non-negative amounts.")

    async def run() -> None:
        worker = FakeWorker()
        service = JobService(tmp_path, worker, Rules(), Broken())
        await service.start()
        for _ in range(2):
            assert (await asyncio.wait_for(finished(service, worker), SOON)).status is Status.COMPLETED
        await service.stop()

    asyncio.run(run())


def test_a_clip_is_saved_where_somebody_has_cleaned_its_folder_away(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (service, worker):
            shutil.rmtree(service.kept.clips.folder)
            done = await finished(service, worker)
            assert service.kept.clips.path(done.id).read_bytes() == CLIP

    asyncio.run(run())


def test_an_end_in_the_middle_of_saving_keeps_the_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> str:
        worker, begun, go_on = FakeWorker(), threading.Event(), threading.Event()
        service = JobService(tmp_path, worker, Rules(), Told())
        await service.start()
        save = service.kept.clips.save

        def slow(*arguments: object) -> Job:
            begun.set()
            go_on.wait(SOON)
            return save(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(service.kept.clips, "save", slow)
        job, _ = await service.submit(asked(), FakeOrder(worker, at_once=True))
        await asyncio.to_thread(begun.wait, SOON)
        stopping = asyncio.create_task(service.stop())
        await asyncio.sleep(0.05)
        go_on.set()
        await asyncio.wait_for(stopping, SOON)
        return job.id

    async def look(job_id: str) -> None:
        async with serving(tmp_path) as (service, _):
            found = await service.get(job_id)
            assert found is not None and found.status is Status.COMPLETED
            assert service.kept.clips.path(job_id).read_bytes() == CLIP

    asyncio.run(look(asyncio.run(run())))


def test_a_server_that_ends_answers_whoever_waits_and_takes_nothing_more(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (service, worker):
            first = FakeOrder(worker)
            worker.stop = lambda job_id: True  # type: ignore[method-assign]  # told, and gone before it can answer
            orders = [FakeOrder(worker) for _ in range(4)]
            jobs = [(await service.submit(asked(), order))[0] for order in (first, *orders)]
            await first.began.wait()
            waiting = [asyncio.create_task(service.wait(job.id)) for job in jobs]
            await service.leave()
            for task in waiting:
                ended = await asyncio.wait_for(task, SOON)
                assert ended is not None and ended.failure == INTERRUPTED
            assert not any(order.began.is_set() for order in orders)
            assert not service.accepting
            with pytest.raises(BusyError, match="the server is ending"):
                await service.submit(asked(), FakeOrder(worker))

    asyncio.run(run())


def test_a_job_of_another_server_is_waited_for_and_ends_with_that_server(tmp_path: Path) -> None:
    async def run() -> None:
        worker = FakeWorker()
        other = JobService(tmp_path, worker, Rules(), Told())
        await other.start()
        orders = [FakeOrder(worker), FakeOrder(worker)]
        jobs = [(await other.submit(asked(key), order))[0] for key, order in zip("ab", orders, strict=True)]
        async with serving(tmp_path) as (service, mine):
            joined, new = await service.submit(asked("a"), FakeOrder(mine))
            assert (joined.id, new) == (jobs[0].id, False)
            waiting = asyncio.create_task(service.wait(joined.id))
            orders[0].end.set()
            ended = await asyncio.wait_for(waiting, SOON)
            assert ended is not None and ended.status is Status.COMPLETED
            # Killed: its lock is gone, and nothing else happens.
            for task in other._tasks:
                task.cancel()
            other.kept._owners.leave()
            waiting = asyncio.create_task(service.wait(jobs[1].id))
            service.kept.tidy()
            ended = await asyncio.wait_for(waiting, SOON)
            assert ended is not None and ended.failure == INTERRUPTED

    asyncio.run(run())
