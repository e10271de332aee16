# SPDX-License-Identifier: Apache-2.0
"""An order that the host's handler makes, and what its errors mean."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import HTTPException
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.errors import OmniClientError

from vllm_h3_plugin.attention.low_bit import ALLOWED
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
        """Run the model. See :class:`~vllm_h3_plugin.serving.jobs.made.Order`."""
        artifacts = await self.handler._run_and_extract(self.request, job_id, **self.references)
        data, metadata = await asyncio.to_thread(_delivered, artifacts, self.handler)
        action = artifacts.actions[0]
        return Made(
            data,
            {
                "stage_durations": artifacts.stage_durations,
                "peak_memory_mb": float(artifacts.peak_memory_mb),
                "action": None if action is None else action.model_dump(mode="json"),
                **metadata,
            },
        )

    def close(self) -> None:
        """Remove reference files."""
        cleanup, self.cleanup = self.cleanup, lambda: None
        cleanup()


def _delivered(artifacts: Any, handler: Any) -> tuple[bytes, dict[str, Any]]:
    """The file, and what 0.30 tells of what it really made. Not for the event loop.

    The worker has encoded the clip, unless it was told not to (``H3_ENCODER=host``): then it is encoded here as the
    host's ``generate_video_bytes`` does it, which would do it on the event loop.
    """
    from vllm_omni.entrypoints.openai import serving_video

    video, audio = artifacts.videos[0], artifacts.audios[0]
    if not isinstance(video, bytes):
        sound = {} if audio is None else {"audio": audio, "audio_sample_rate": artifacts.audio_sample_rate}
        video = serving_video._encode_video_bytes(
            video,
            fps=artifacts.output_fps,
            **sound,
            video_codec_options={"preset": "ultrafast", "threads": "0"},
            frame_converter=handler._video_frame_converter,
        )
    told = {}
    if hasattr(serving_video, "_video_metadata_from_artifacts"):
        told = serving_video._video_metadata_from_artifacts(artifacts)
    return video, {name: value for name, value in told.items() if value is not None}


def explain(error: Exception) -> Failure:
    """What an error of the host's handler means to the caller."""
    if isinstance(error, H3Error):
        code = "insufficient_memory" if error.http_status == 503 else "generation_failed"
        return Failure(code, str(error), error.http_status)
    # 0.28 has words and no class for it where a worker of the mp executor died.
    if isinstance(error, EngineDeadError) or str(error) == "Executor shut down":
        return Failure("engine_dead", "The engine died; the server is about to end.", 503)
    status, message = 500, str(error) or type(error).__name__
    # What a worker raises reaches the API process as text, in request mode without its status.
    if ALLOWED in message:
        return Failure("invalid_request", message, 400)
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, OmniClientError):
        status, message = error.status_code, error.message
    code = "invalid_request" if 400 <= status < 500 else "generation_failed"
    # These words are memory/guard.py's.
    if "not enough memory" in message or "H3_MEMORY_HARD_FLOOR_GIB" in message:
        code, status = "insufficient_memory", 503
    return Failure(code, message, status)
