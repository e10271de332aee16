# SPDX-License-Identifier: Apache-2.0
"""Waiting for a job's end, over lost connections and restarts of the server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from vllm_h3_plugin.errors import ServerError
from vllm_h3_plugin.serving.answers import (
    Answer,
    ask,
    count,
    describe,
    finite,
    mapping,
    refusal,
    without_controls,
)
from vllm_h3_plugin.serving.limits import Deadline, Limits

LOST_TOUCH = "lost touch"
_POLL_S = 0.25
_POLL_MOST_S = 2.0
_GOES_ON = ("queued", "in_progress")
_PHASE = 80
"""Characters of a phase that are shown."""


@dataclass(frozen=True)
class Watch:
    """One look at a running job.

    Attributes:
        seconds: since the first look.
        status: the job's; ``LOST_TOUCH`` while the server does not answer.
        phase: what the server does, or why it does not answer.
        step, steps: denoise steps done and in all, if known.
        percent: the job's own ``progress``, where it says more than 0 or 100.
    """

    seconds: float
    status: str
    phase: str
    step: int
    steps: int | None
    percent: int | None = None

    def __str__(self) -> str:
        """In words, for an error."""
        where = self.phase or self.status
        return where if self.steps is None else f"{where} {self.step}/{self.steps}"


@dataclass(frozen=True)
class Outcome:
    """How a job ended, and its times in seconds.

    Attributes:
        job: the job as the server describes it; every ``status`` but ``completed`` is a failure.
        queue_s: until it was in progress; None if that was not seen.
        generation_s: in progress, as the server counts it, else as it was seen.
        download_s, nbytes: of the clip; None and 0 for a failed job.
    """

    job: dict[str, Any]
    queue_s: float | None
    generation_s: float | None
    download_s: float | None = None
    nbytes: int = 0

    def failure(self) -> ServerError | None:
        """The error that a failed job stands for."""
        if self.job["status"] == "completed":
            return None
        error = self.job.get("error")
        reason = error.get("message") if isinstance(error, dict) else error
        return ServerError(
            f"job {self.job.get('id')} {self.job['status']}",
            why=str(reason or "the server gave no reason"),
            fix="The server's log says more; the same command asks for a new job.",
        )


OnLook = Callable[[Watch], None]


def watch(
    http: httpx.Client, job_id: str, deadline: Deadline, limits: Limits, on_look: OnLook | None = None
) -> dict[str, Any] | None:
    """Wait until a job has ended.

    Returns:
        The job; None if the server does not know it.

    Raises:
        ServerError: the time is over, or the server was away for longer than ``limits.reconnect_s``.
    """
    began = time.monotonic()
    pace = _Pace()
    away_since: float | None = None
    attempt = 0
    last = ""
    while True:
        deadline.check(f"job {job_id}{last}")
        job: dict[str, Any] | None = None
        try:
            answer = ask(http, deadline, "GET", f"/v1/videos/{quote(job_id, safe='')}")
            if answer.status == 404:
                return None
            job, reason = _job(answer), f"HTTP {answer.status}: {answer.message}"
            if job is None and 300 <= answer.status < 500 and answer.status != 429:
                raise refusal(answer, f"tell about job {job_id}")
        except httpx.RequestError as exc:
            reason = describe(exc)
        now = time.monotonic()
        if job is not None:
            away_since, attempt = None, 0
            if job["status"].lower() == "completed":
                return {**job, "status": "completed"}
            if job["status"] not in _GOES_ON:
                return job
            seen = _look(http, job, now - began, deadline)
            last = f", last seen {seen},"
            left = pace.seconds_left(job, seen)
            if left is not None:
                deadline.expect(left)
            if on_look:
                on_look(seen)
            time.sleep(min(deadline.left, _POLL_MOST_S, max(_POLL_S, seen.seconds / 60)))
            continue
        away_since = now if away_since is None else away_since
        if now - away_since > limits.reconnect_s:
            raise ServerError(
                f"the server has not answered about job {job_id} for {limits.reconnect_s:.0f} s",
                why=reason,
                fix="See its log and start it again; the same command picks the job up if the server still knows it.",
            )
        if on_look:
            on_look(Watch(now - began, LOST_TOUCH, reason, 0, None))
        attempt += 1
        rest(deadline, limits, attempt)


def rest(deadline: Deadline, limits: Limits, attempt: int) -> None:
    """Pause before something is tried again."""
    time.sleep(min(deadline.left, limits.pause(attempt)))


class _Pace:
    """How fast steps go by, from those that were seen: a job that is picked up has some behind it."""

    def __init__(self) -> None:
        self._first: Watch | None = None
        self._last: tuple[str, int, object] | None = None

    def seconds_left(self, job: dict[str, Any], seen: Watch) -> float | None:
        """What the server says is left, else what the pace of the steps says; None if it is not known.

        None too while nothing moves: a job that is stuck earns no more time.
        """
        left = finite(job.get("seconds_left"))
        now = (seen.phase, seen.step, left)
        if now == self._last:
            return None
        self._last = now
        if left is not None:
            return left
        if seen.steps is None or not seen.step:
            return None
        if self._first is None or seen.step <= self._first.step:
            self._first = seen
            return None
        return (seen.seconds - self._first.seconds) / (seen.step - self._first.step) * (seen.steps - seen.step)


def _look(http: httpx.Client, job: dict[str, Any], seconds: float, deadline: Deadline) -> Watch:
    told = job if job.get("phase") else _progress(http, deadline)
    percent = job.get("progress")
    return Watch(
        seconds,
        job["status"],
        without_controls(str(told.get("phase") or job["status"]))[:_PHASE],
        count(told.get("step")) or 0,
        count(told.get("steps")),
        percent if isinstance(percent, int) and 0 < percent < 100 else None,
    )


def _progress(http: httpx.Client, deadline: Deadline) -> dict[str, Any]:
    """What the plugin's own route says about the request that runs, which may be another's."""
    try:
        answer = ask(http, deadline, "GET", "/v1/h3/info")
    except httpx.RequestError:
        return {}
    return mapping(mapping(answer.json()).get("progress")) if answer.status == 200 else {}


def _job(answer: Answer) -> dict[str, Any] | None:
    """The job in an answer. The host answers 500 for a failed job; the body is the job all the same."""
    body = answer.json()
    return body if body is not None and isinstance(body.get("status"), str) else None
