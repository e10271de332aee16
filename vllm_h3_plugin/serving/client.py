# SPDX-License-Identifier: Apache-2.0
"""A client of the video API: create a job, watch it, fetch the clip. Nothing is kept that the server calls an error.

A job outlives the connection that made it. So does this client: whatever breaks after the job was created, it looks for
the job again, with growing pauses, until the job's time is over.
"""

from __future__ import annotations

import ipaddress
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from vllm_h3_plugin import settings
from vllm_h3_plugin.errors import H3Error, ServerError, SettingsError, UsageError
from vllm_h3_plugin.serving.answers import ask, describe, finite, refusal, unreachable
from vllm_h3_plugin.serving.api_key import fault_of_key, read_api_key
from vllm_h3_plugin.serving.download import download
from vllm_h3_plugin.serving.limits import Deadline, Limits
from vllm_h3_plugin.serving.rules.ratios import ratio_name
from vllm_h3_plugin.serving.watching import LOST_TOUCH, OnLook, Outcome, Watch, rest, watch

_CREATES = 3
"""Times that a job is asked for before an answer came; a server that knows Idempotency-Key makes one job of them."""
_DOWNLOADS = 3
_LOST = (502, 504)
"""What a proxy answers for a server that may have understood all the same."""


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
            # With a size it decides nothing, but a host without this plugin refuses t2va without one.
            "aspect_ratio": ratio_name(self.width, self.height),
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


def authorization(api_key: str | None) -> dict[str, str]:
    """Headers that a server with an API key wants."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def callers_key() -> str | None:
    """The key that a caller sends: from the file that ``H3_API_KEY_FILE`` names, else ``VLLM_API_KEY``.

    Raises:
        SettingsError: the file or the variable holds no key; the message holds nothing of it.
    """
    path = settings.load().api_key_file
    if path:
        return read_api_key(path)
    key = os.environ.get("VLLM_API_KEY") or None
    if key is not None and (why := fault_of_key(key)):
        raise SettingsError(
            "VLLM_API_KEY", why=why, fix="Set it to the server's key, or name a file in H3_API_KEY_FILE."
        )
    return key


class VideoClient:
    """Talks to one server."""

    def __init__(
        self, url: str, *, timeout_s: float = 120, api_key: str | None = None, limits: Limits | None = None
    ) -> None:
        """
        Args:
            url: the server's address.
            timeout_s: seconds without a byte after which a connection counts as dead; ``limits`` wins.
            api_key: the server's key.

        Raises:
            UsageError: the address is none.
        """
        self.limits = limits or Limits(stall_s=timeout_s)
        self.url = url.rstrip("/")
        self.http = httpx.Client(
            base_url=_checked(url),
            timeout=httpx.Timeout(self.limits.stall_s, connect=min(10.0, self.limits.stall_s)),
            headers=authorization(api_key),
            follow_redirects=False,
            # A proxy named in the environment reaches its own 127.0.0.1, not ours.
            trust_env=not _is_here(url),
        )

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def __enter__(self) -> VideoClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def make(self, request: VideoRequest, part: Path, on_look: OnLook | None = None) -> dict[str, Any]:
        """Create a job, wait for its end and stream its clip into ``part``.

        Args:
            part: file to write; the caller verifies and promotes it. Left absent if the job fails.

        Returns:
            The finished job as the server describes it.

        Raises:
            ServerError: the request was refused, the job failed, or the answer is no clip; carries the server's words.
        """
        deadline = Deadline(self.limits.total_s)
        job = self.create(request, deadline)
        outcome = self.complete(str(job["id"]), part, deadline, on_look)
        if outcome is None:
            raise ServerError(f"the server no longer knows job {job['id']}", why="it was started again, or deleted it")
        failure = outcome.failure()
        if failure is not None:
            raise failure
        return outcome.job

    def info(self) -> dict[str, Any]:
        """``/v1/h3/info``; empty where the plugin is not active.

        Raises:
            ServerError: the server does not answer, or wants a key.
        """
        try:
            answer = ask(self.http, Deadline(self.limits.stall_s), "GET", "/v1/h3/info")
        except httpx.RequestError as exc:
            raise unreachable(self.http, exc) from exc
        if answer.status == 200:
            return answer.json() or {}
        if answer.status == 404:
            return {}
        raise refusal(answer, "tell what it runs")

    def create(self, request: VideoRequest, deadline: Deadline, key: str | None = None) -> dict[str, Any]:
        """Create a job and return it, with its ``id``.

        Args:
            key: sent as ``Idempotency-Key``: servers that know it make one job of several attempts with one key.

        Raises:
            H3Error: it was refused, with the server's words; ``details["answered"]`` is false if no answer came, and
                there may be a job then.
        """
        headers = {} if key is None else {"Idempotency-Key": key}
        sent = {"data": request.form(), "files": request.files() or None, "headers": headers}
        attempt = 0
        while True:
            attempt += 1
            cause: httpx.RequestError | None = None
            try:
                answer = ask(self.http, deadline, "POST", "/v1/videos", **sent)
                if answer.status not in _LOST:
                    break
                lost: H3Error = refusal(answer, "create a video")
            except ServerError as exc:  # the time is over, or the answer has no end
                exc.details["answered"] = False
                raise
            except httpx.RequestError as exc:
                lost, cause = unreachable(self.http, exc), exc
            # Without a key each attempt might be a job.
            if attempt == _CREATES or key is None:
                lost.details["answered"] = False
                raise lost from cause
            rest(deadline, self.limits, attempt)
        job = answer.json()
        if not 200 <= answer.status < 300:
            raise refusal(answer, "create a video")
        name = None if job is None else job.get("id")
        if job is None or not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _ID:
            raise ServerError(
                f"POST /v1/videos gave HTTP {answer.status} without a job",
                why=answer.message,
                fix="Check --url: another program may answer there.",
            )
        return job

    def complete(self, job_id: str, part: Path, deadline: Deadline, on_look: OnLook | None = None) -> Outcome | None:
        """Wait for a job's end and stream its clip into ``part``, which is new.

        Returns:
            How it ended; None if the server does not know the job (any more).

        Raises:
            ServerError: the time is over, the server stayed away, or what it handed out is no clip.
            BusyError: the disk is full.
        """
        running: float | None = None

        def look(seen: Watch) -> None:
            nonlocal running
            running = seen.seconds if running is None and seen.status == "in_progress" else running
            if on_look:
                on_look(seen)

        began = time.monotonic()
        for attempt in range(1, _DOWNLOADS + 1):
            job = watch(self.http, job_id, deadline, self.limits, look)
            if job is None:
                return None
            seen_s = time.monotonic() - began - (running or 0.0)
            generation = job.get("inference_time_s")
            counted = finite(generation)
            times = running, seen_s if counted is None else counted
            if job["status"] != "completed":
                return Outcome(job, *times)
            started = time.monotonic()
            try:
                nbytes = download(self.http, job_id, part, deadline, self.limits.max_bytes)
                return Outcome(job, *times, time.monotonic() - started, nbytes)
            except httpx.RequestError as exc:
                if attempt == _DOWNLOADS:
                    raise ServerError(
                        f"the clip of job {job_id} could not be fetched whole in {_DOWNLOADS} attempts",
                        why=describe(exc),
                        fix="Nothing of it was kept; the same command fetches it again.",
                    ) from exc
                look(Watch(time.monotonic() - began, LOST_TOUCH, describe(exc), 0, None))
            rest(deadline, self.limits, attempt)
        raise AssertionError("the last attempt returns or raises")


_ID = 200
"""Characters that the id of a job may have."""


def _checked(url: str) -> str:
    fault: H3Error = UsageError(f"--url {url}", why="it is no address", fix="Give one such as http://127.0.0.1:8000.")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as exc:
        raise fault from exc
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise fault
    if parsed.userinfo:
        raise UsageError(
            "--url with a user name or password",
            why="it would be kept beside the clip and shown in errors",
            fix="Give the address alone; a server's key goes into the file of H3_API_KEY_FILE.",
        )
    return url


def _is_here(url: str) -> bool:
    host = httpx.URL(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
