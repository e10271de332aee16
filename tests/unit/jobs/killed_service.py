# SPDX-License-Identifier: Apache-2.0
"""A process that makes clips without end until it is killed: ``python -m tests.unit.jobs.killed_service FOLDER SEED``.

It prints a line for each job whose end its caller was told of, and a first one with what it found.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

from tests.unit.jobs.job_service import FakeOrder, FakeWorker, asked
from vllm_h3_plugin.serving.jobs.service import JobService, Rules


async def main(folder: Path, seed: int) -> None:
    """Make clips, two in line, some cancelled."""
    rng, worker = random.Random(seed), FakeWorker()
    service = JobService(folder, worker, Rules())
    await service.start()
    kept = service.kept
    found = {job.id: [job.status.value, kept.clips.path(job.id).is_file()] for job in kept.store.ended()}
    print(json.dumps({"found": found, "open": len(kept.store.unfinished())}), flush=True)
    while True:
        jobs = [(await service.submit(asked(), FakeOrder(worker, at_once=True)))[0] for _ in range(2)]
        if rng.random() < 0.3:
            await service.cancel(jobs[1].id)
        for job in jobs:
            ended = await service.wait(job.id)
            assert ended is not None
            print(json.dumps({"id": ended.id, "status": ended.status.value, "sha256": ended.sha256}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
