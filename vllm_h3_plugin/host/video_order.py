# SPDX-License-Identifier: Apache-2.0
"""An order that the host's handler makes, and what its errors mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import HTTPException
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.errors import OmniClientError

from vllm_h3_plugin.errors import H3Error
from vllm_h3_plugin.pins import installed_host
from vllm_h3_plugin.serving.jobs.job import Failure
from vllm_h3_plugin.serving.jobs.made import Made


def host_video_module() -> Any:
    """The host's module with the parts of its video routes: 0.30 has moved them out of its api_server."""
    if installed_host().vllm_omni == "0.28.0":
        from vllm_omni.entrypoints.openai import api_server

        return api_server
    from vllm_omni.entrypoints.openai.video.generation import helpers

    return helpers


@dataclass
class VideoOrder:
    """A request that the host's handler can make.

    Attributes:
        handler: the host's ``OmniOpenAIServingVideo``.
        request: its ``VideoGenerationRequest``.
        references: further arguments of ``generate_video_bytes``.
        cleanup: removes the files that references were kept in.
    """

    handler: Any
    request: Any
    references: Mapping[str, Any]
    cleanup: Callable[[], None] = field(default=lambda: None)

    async def make(self, job_id: str) -> Made:
        """Run the model and encode its frames. See :class:`~vllm_h3_plugin.serving.jobs.made.Order`."""
        result = await self.handler.generate_video_bytes(self.request, job_id, **self.references)
        # 0.30 tells what it really made as a fifth value.
        data, stage_durations, peak_memory_mb, action, *rest = result
        metadata = {name: value for name, value in (rest[0] if rest else {}).items() if value is not None}
        return Made(
            data,
            {
                "stage_durations": stage_durations,
                "peak_memory_mb": float(peak_memory_mb),
                "action": None if action is None else action.model_dump(mode="json"),
                **metadata,
            },
        )

    def close(self) -> None:
        """Remove reference files."""
        cleanup, self.cleanup = self.cleanup, lambda: None
        cleanup()


def explain(error: Exception) -> Failure:
    """What an error of the host's handler means to the caller."""
    if isinstance(error, H3Error):
        code = "insufficient_memory" if error.http_status == 503 else "generation_failed"
        return Failure(code, str(error), error.http_status)
    # 0.28 has words and no class for it where a worker of the mp executor died.
    if isinstance(error, EngineDeadError) or str(error) == "Executor shut down":
        return Failure("engine_dead", "The engine died; the server is about to end.", 503)
    status, message = 500, str(error) or type(error).__name__
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, OmniClientError):
        status, message = error.status_code, error.message
    code = "invalid_request" if 400 <= status < 500 else "generation_failed"
    # What a worker raises reaches the API process as text. These words are memory/guard.py's.
    if "not enough memory" in message or "H3_MEMORY_HARD_FLOOR_GIB" in message:
        code, status = "insufficient_memory", 503
    return Failure(code, message, status)
