# SPDX-License-Identifier: Apache-2.0
"""The worker as the runner of jobs sees it: through files in ``H3_RUN_DIR``, whichever process it is in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from vllm_h3_plugin.host import cancel, run_state
from vllm_h3_plugin.host.request_ledger import LEDGER
from vllm_h3_plugin.host.video_order import explain
from vllm_h3_plugin.serving.jobs.job import Failure
from vllm_h3_plugin.serving.jobs.progress import belongs

Abort = Callable[[str], Awaitable[None]]


class JobWorker:
    """See :class:`~vllm_h3_plugin.serving.jobs.made.Worker`."""

    def __init__(self, abort: Abort | None = None) -> None:
        """
        Args:
            abort: the host's own way to stop a request, used where there is no run folder; None: it has none.
        """
        self._abort = abort

    def progress(self) -> Mapping[str, Any] | None:
        """What rank 0 last wrote."""
        return run_state.read(run_state.PROGRESS)

    def ledger(self, job_id: str) -> Mapping[str, Any]:
        """What rank 0 left of this job."""
        found = run_state.read(LEDGER)
        if not belongs(found, job_id):
            return {}
        return {name: value for name, value in (found or {}).items() if name != "request"}

    async def stop(self, job_id: str) -> None:
        """Leave the job's id where every rank looks between its steps."""
        path = cancel.flag()
        if path is not None:
            temporary = path.with_name(f".{path.name}")
            temporary.write_text(job_id, encoding="utf-8")
            temporary.replace(path)
        elif self._abort is not None:
            await self._abort(job_id)

    def resume(self) -> None:
        """Take it away again."""
        path = cancel.flag()
        if path is not None:
            path.unlink(missing_ok=True)

    def explain(self, error: Exception) -> Failure:
        """See :func:`~vllm_h3_plugin.host.video_order.explain`."""
        return explain(error)


def worker_of(state: Any) -> JobWorker:
    """The worker of an app; ``state`` is its state. 0.28's handler cannot abort."""

    async def abort(job_id: str) -> None:
        handler = getattr(state, "openai_serving_video", None)
        if handler is not None and hasattr(handler, "abort_request"):
            await handler.abort_request(job_id)

    return JobWorker(abort)
