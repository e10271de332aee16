# SPDX-License-Identifier: Apache-2.0
"""A client of the video API: create a job, watch it, fetch the clip. Nothing is kept that the server calls an error."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from vllm_h3_plugin.errors import ServerError, UsageError

_POLL_S = 0.25

# The host takes these names only; with an explicit size the name decides nothing, but t2va is refused without one
# (vLLM-Omni 0.30.0 model_executor/models/minimax_h3/preprocessing.py:39).
_ASPECT_RATIOS = {"21:9": 21 / 9, "16:9": 16 / 9, "4:3": 4 / 3, "1:1": 1.0, "3:4": 3 / 4, "9:16": 9 / 16}


@dataclass(frozen=True)
class VideoRequest:
    """One request of the video API, in its own terms.

    Attributes:
        prompt: what to show.
        width, height: pixels; multiples of 32.
        frames: number of frames at 24 fps; the server snaps it up to 17 n + 5.
        steps: denoise steps.
        seed: same seed, same server configuration, same clip.
        references: image, video or audio files. FL2VA takes them as first frame, or first and last frame.
    """

    prompt: str
    width: int
    height: int
    frames: int
    steps: int
    seed: int
    references: tuple[Path, ...] = ()

    def form(self) -> dict[str, str]:
        """The multipart form's text fields."""
        return {
            "prompt": self.prompt,
            "size": f"{self.width}x{self.height}",
            "aspect_ratio": nearest_ratio(self.width, self.height),
            "num_frames": str(self.frames),
            "num_inference_steps": str(self.steps),
            "seed": str(self.seed),
        }

    def files(self) -> list[tuple[str, tuple[str, bytes]]]:
        """The multipart form's files.

        Raises:
            UsageError: a reference file cannot be read.
        """
        try:
            return [("input_references", (path.name, path.read_bytes())) for path in self.references]
        except OSError as exc:
            raise UsageError(f"reference {exc.filename} cannot be read", why=exc.strerror or str(exc)) from exc


@dataclass(frozen=True)
class Watch:
    """One look at a running job."""

    seconds: float
    status: str
    phase: str
    step: int
    steps: int | None


def nearest_ratio(width: int, height: int) -> str:
    """The aspect ratio's name that is nearest to a size, by quotient."""
    return min(_ASPECT_RATIOS, key=lambda name: abs(math.log(_ASPECT_RATIOS[name] * height / width)))


def authorization(api_key: str | None) -> dict[str, str]:
    """Headers that a server with an API key wants."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


class VideoClient:
    """Talks to one server."""

    def __init__(self, url: str, *, timeout_s: float = 30, api_key: str | None = None) -> None:
        self._http = httpx.Client(base_url=url, timeout=timeout_s, headers=authorization(api_key))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> VideoClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def make(self, request: VideoRequest, part: Path, on_look: Callable[[Watch], None] | None = None) -> dict[str, Any]:
        """Create a job, wait for its end and stream its clip into ``part``.

        Args:
            part: file to write; the caller verifies and promotes it. Left absent if the job fails.

        Returns:
            The finished job as the server describes it.

        Raises:
            ServerError: the request was refused, the job failed, or the answer is no clip; carries the server's words.
        """
        job = self._json(
            self._http.post("/v1/videos", data=request.form(), files=request.files() or None), "create a video"
        )
        for look in self._looks(str(job["id"])):
            if on_look:
                on_look(look)
        job = self._json(self._http.get(f"/v1/videos/{job['id']}"), "read the job")
        if job["status"] != "completed":
            error = job.get("error") or {}
            raise ServerError(
                f"job {job['id']} {job['status']}", why=str(error.get("message", "the server gave no reason"))
            )
        self._download(str(job["id"]), part)
        return job

    def _looks(self, job_id: str) -> Iterator[Watch]:
        started = time.monotonic()
        while True:
            answer = self._http.get(f"/v1/videos/{job_id}")
            # The host answers 500 for a failed job; its body still says so.
            status = str(answer.json().get("status", "failed")) if answer.status_code in (200, 500) else "failed"
            if status in ("completed", "failed"):
                if answer.status_code >= 400:
                    self._json(answer, "make the video")
                return
            progress = self._progress()
            yield Watch(
                time.monotonic() - started,
                status,
                str(progress.get("phase", status)),
                int(progress.get("step") or 0),
                progress.get("steps"),
            )
            time.sleep(_POLL_S)

    def _progress(self) -> dict[str, Any]:
        answer = self._http.get("/v1/h3/info")
        return (answer.json().get("progress") or {}) if answer.status_code == 200 else {}

    def _download(self, job_id: str, part: Path) -> None:
        with self._http.stream("GET", f"/v1/videos/{job_id}/content") as answer:
            kind = answer.headers.get("content-type", "")
            if answer.status_code != 200 or not kind.startswith("video/mp4"):
                answer.read()
                raise ServerError(
                    f"fetching the clip of job {job_id} gave HTTP {answer.status_code}, {kind or 'no content type'}",
                    why=answer.text[:500],
                    fix="The clip was not saved; the server's log says more.",
                )
            with part.open("xb") as file:
                for block in answer.iter_bytes():
                    file.write(block)

    @staticmethod
    def _json(answer: httpx.Response, what: str) -> dict[str, Any]:
        if answer.status_code >= 400:
            raise ServerError(f"the server refused to {what}: HTTP {answer.status_code}", why=_message(answer))
        content: dict[str, Any] = answer.json()
        return content


def _message(answer: httpx.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        return answer.text[:500]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
