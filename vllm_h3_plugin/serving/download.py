# SPDX-License-Identifier: Apache-2.0
"""A clip's bytes from the server into a file: only a whole ``video/mp4`` of a sane size is kept."""

from __future__ import annotations

import errno
from pathlib import Path
from urllib.parse import quote

import httpx

from vllm_h3_plugin.errors import BusyError, H3Error, ServerError, UsageError
from vllm_h3_plugin.serving.answers import Answer, refusal
from vllm_h3_plugin.serving.limits import Deadline

_ERROR_BYTES = 64 << 10


def download(http: httpx.Client, job_id: str, part: Path, deadline: Deadline, max_bytes: int) -> int:
    """Stream the clip of a job into ``part``, which is new; whatever goes wrong, it is gone again.

    Returns:
        Bytes written: as many as ``Content-Length`` says, where the server says it.

    Raises:
        httpx.RequestError: the connection ended before the body did, or stalled; a second try may succeed.
        ServerError: another status, another content type, a body that is too large, or the deadline is over.
        BusyError: the disk is full.
        UsageError: the file cannot be written.
    """
    path = f"/v1/videos/{quote(job_id, safe='')}/content"
    what = f"the clip of job {job_id}"
    try:
        # Compression would hide how many bytes are to come, and clips do not shrink.
        with http.stream("GET", path, headers={"Accept-Encoding": "identity"}) as answer:
            _require_clip(answer, what, deadline, max_bytes)
            return _write(answer, what, part, deadline, max_bytes)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _require_clip(answer: httpx.Response, what: str, deadline: Deadline, max_bytes: int) -> None:
    kind = answer.headers.get("content-type") or "no content type"
    coding = answer.headers.get("content-encoding", "identity")
    seen = kind if coding == "identity" else f"{kind} in {coding}"
    is_clip = kind.partition(";")[0].strip().lower() == "video/mp4" and coding == "identity"
    if not (answer.is_success and is_clip):
        body = Answer(answer.status_code, _words(answer, deadline), answer.headers.get("location"))
        if answer.is_redirect or answer.status_code in (401, 403):
            raise refusal(body, f"hand out {what}")
        raise ServerError(
            f"fetching {what} gave HTTP {answer.status_code}, {seen}",
            why=body.message,
            fix="The clip was not saved; the server's log says more.",
        )
    told = answer.headers.get("content-length", "")
    if told.isdecimal() and int(told) > max_bytes:
        raise _too_large(what, f"{int(told)} bytes", max_bytes)


def _words(answer: httpx.Response, deadline: Deadline) -> str:
    """The beginning of an error body."""
    body = b""
    for block in answer.iter_bytes():
        body += block
        deadline.check("an error message of the server")
        if len(body) > _ERROR_BYTES:
            break
    return body.decode("utf-8", errors="replace")


def _write(answer: httpx.Response, what: str, part: Path, deadline: Deadline, max_bytes: int) -> int:
    written = 0
    try:
        with part.open("xb") as file:
            for block in answer.iter_raw():
                written += len(block)
                if written > max_bytes:
                    raise _too_large(what, "more", max_bytes)
                file.write(block)
                deadline.check(f"the download of {what}")
    except OSError as exc:
        raise _cannot_write(part, exc) from exc
    return written


def _too_large(what: str, size: str, max_bytes: int) -> ServerError:
    return ServerError(
        f"{what} has {size}, {max_bytes} are allowed",
        why="no clip of H3 is that large",
        fix="The clip was not saved; raise --max-mib if it is right.",
    )


def _cannot_write(part: Path, exc: OSError) -> H3Error:
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return BusyError(
            f"{part}: {exc.strerror}",
            why="the clip does not fit there; it is still on the server",
            fix=f"Free space in {part.parent}; the same command fetches the clip then.",
        )
    return UsageError(
        f"{part} cannot be written", why=exc.strerror or str(exc), fix=f"Check that {part.parent} is a folder of yours."
    )
