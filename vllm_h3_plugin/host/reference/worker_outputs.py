# SPDX-License-Identifier: Apache-2.0
"""Output thread of the ``mp`` executor's worker, for a platform without device streams.

Why: ``WorkerProc._async_output_loop`` (diffusion/worker/diffusion_worker.py:1262-1301; 0.28: 1131-1170) opens a
``torch.Stream`` on ``torch.accelerator.current_accelerator()``, which is CUDA for a CUDA-built torch even where no GPU
is. The thread dies, no output is ever sent, and the request hangs.
Scope: only the reference platform. Removal: when the host takes the device from its platform.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm_omni.diffusion.worker import diffusion_worker as host_worker

logger = init_logger(__name__)


def _output_loop(self: Any) -> None:
    while True:
        item = self._async_output_queue.get()
        if item is None:
            return
        output, output_id, _ = item
        message: dict[str, Any] = {"kind": host_worker.AsyncOutputKind.OUTPUT_READY, "async_output_id": output_id}
        try:
            host_worker.pack_diffusion_output_shm(output)
            message["output"] = output
        except Exception as exc:
            logger.exception("packing of output %s failed", output_id)
            message["error"] = f"packing the output failed: {exc}"
        try:
            self._enqueue_result(host_worker.AsyncDiffusionOutput(**message))
        finally:
            _mark_done(self)


def _mark_done(worker: Any) -> None:
    # 0.30 counts outputs in flight (diffusion_worker.py:1302-1306); 0.28 does not.
    done = getattr(worker, "_async_output_done", None)
    if done is None:
        return
    with done:
        worker._async_output_pending = max(0, worker._async_output_pending - 1)
        done.notify_all()


def install() -> None:
    """Put the stream-free loop in place of the host's. Idempotent."""
    host_worker.WorkerProc._async_output_loop = _output_loop
