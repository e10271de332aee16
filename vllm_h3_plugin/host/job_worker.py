# SPDX-License-Identifier: Apache-2.0
"""The worker as the runner of jobs sees it: through files in ``H3_RUN_DIR``, whichever process it is in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_h3_plugin.host import cancel, run_state
from vllm_h3_plugin.host.request_ledger import LEDGER
from vllm_h3_plugin.host.video_order import explain
from vllm_h3_plugin.serving.jobs.job import Failure
from vllm_h3_plugin.serving.jobs.progress import belongs


class JobWorker:
    """See :class:`~vllm_h3_plugin.serving.jobs.made.Worker`."""

    def progress(self) -> Mapping[str, Any] | None:
        """What rank 0 last wrote."""
        return run_state.read(run_state.PROGRESS)

    def ledger(self, job_id: str) -> Mapping[str, Any]:
        """What rank 0 left of this job."""
        found = run_state.read(LEDGER)
        if not belongs(found, job_id):
            return {}
        return {name: value for name, value in (found or {}).items() if name != "request"}

    def stop(self, job_id: str) -> bool:
        """Leave the job's id where every rank looks between its steps. False: there is no run folder to leave it in, or
        no room."""
        return cancel.add(job_id)

    def explain(self, error: Exception) -> Failure:
        """See :func:`~vllm_h3_plugin.host.video_order.explain`."""
        return explain(error)
