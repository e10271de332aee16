# SPDX-License-Identifier: Apache-2.0
"""One clip from a request to its verified file, in steps that a later run of the same command can pick up.

``NAME.json`` is written before the job is asked for, again when the server has named it, again when the clip's bytes
are verified, and at the end. Whoever dies in between leaves a state from which nothing is made twice.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_h3_plugin.checkpoint.atomic import replacing
from vllm_h3_plugin.errors import H3Error, ServerError, UsageError
from vllm_h3_plugin.serving.client import VideoClient
from vllm_h3_plugin.serving.clip_order import Order, choose
from vllm_h3_plugin.serving.clip_record import Record, RecordedRequest, Reference, file_digest, new_key
from vllm_h3_plugin.serving.limits import Deadline
from vllm_h3_plugin.serving.reservation import Reservation
from vllm_h3_plugin.serving.watching import Outcome, Watch
from vllm_h3_plugin.video.checksum import write_checksum
from vllm_h3_plugin.video.promote import promote
from vllm_h3_plugin.video.verdict import Expectation
from vllm_h3_plugin.video.verify import verify

_JOBS = 2
"""Jobs that one run asks for, if the server forgets the first."""


@dataclass(frozen=True)
class Made:
    """A verified clip under its name.

    Attributes:
        path: the clip; ``record`` is its ``NAME.json`` and ``checksum`` its ``NAME.mp4.sha256``.
        seed: with the rest of the record it makes the clip again.
        frames: as delivered; None if the clip was there before.
        timings: seconds, see :class:`Record`.
        existing: it was made by an earlier run and nothing was asked of the server.
    """

    name: str
    path: Path
    record: Path
    checksum: Path
    seed: int
    sha256: str
    frames: int | None
    timings: dict[str, float | None]
    existing: bool = False


@dataclass(frozen=True)
class Listener:
    """Who wants to hear how it goes: remarks, looks at the job, and (decoder, frames done, frames) of verification."""

    note: Callable[[str], None] = lambda text: None
    look: Callable[[str, Watch], None] = lambda name, seen: None
    verifying: Callable[[str, str, int, int], None] = lambda name, decoder, done, total: None


def make_clip(
    client: VideoClient, order: Order, folder: Path, *, server: dict[str, Any], listener: Listener | None = None
) -> Made:
    """Make a clip, or pick up where an earlier run of the same order was left.

    Args:
        folder: where the clip and its files go; made if need be.
        server: :func:`~vllm_h3_plugin.serving.clip_record.server_facts` of the client's server.

    Raises:
        ServerError, BusyError: the server, the connection or the job failed; ``NAME.json`` keeps what can be picked up.
        ClipError: the clip is not what was asked for; its bytes stay in ``NAME.mp4.part``.
        UsageError: the folder cannot be written.
    """
    told = listener or Listener()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UsageError(
            f"{folder} cannot be made", why=exc.strerror or str(exc), fix="Choose another folder with --out."
        ) from exc
    reserved, record = choose(client.url, order, folder, server)
    with reserved:
        if record is not None and record.state == "finished":
            assert record.sha256 is not None  # choose has compared it
            write_checksum(reserved.clip, record.sha256)
            return _made(reserved, record, existing=True)
        return _Maker(client, order, reserved, record, server, told).run()


class _Maker:
    """The steps, on a name that is reserved."""

    def __init__(
        self,
        client: VideoClient,
        order: Order,
        reserved: Reservation,
        record: Record | None,
        server: dict[str, Any],
        told: Listener,
    ) -> None:
        self._client = client
        self._reserved = reserved
        self._told = told
        self._server = server
        self._copied: list[Path] = []
        self._frames: int | None = None
        self._deadline = Deadline(client.limits.total_s)
        self._resumed = record is not None
        self._record = record or self._begin(order)

    def run(self) -> Made:
        """Do what is left to do."""
        if self._record.state == "verified" and not self._verified_bytes():
            self._keep(state="created")
        if self._record.state == "failed":
            self._record = self._record.renewed().write(self._reserved.record)
        if self._record.state in ("creating", "created"):
            self._verify(self._fetch())
        self._finish()
        return _made(self._reserved, self._record, frames=self._frames)

    def _keep(self, **update: Any) -> None:
        self._record = self._record.model_copy(update=update).write(self._reserved.record)

    def _begin(self, order: Order) -> Record:
        request = order.request
        references = []
        for number, path in enumerate(request.references, start=1):
            file = path
            if path.resolve().parent != self._reserved.folder.resolve():
                file = self._reserved.folder / f"{self._reserved.name}.ref{number}{path.suffix}"
                _copy(path, file)
                self._copied.append(file)
            references.append(Reference(file=file.name, sha256=file_digest(file)))
        asked = RecordedRequest(
            prompt=request.prompt,
            width=request.width,
            height=request.height,
            frames=request.frames,
            steps=request.steps,
            seed=request.seed,
            references=tuple(references),
        )
        name = self._reserved.name
        return Record(
            name=name,
            stem=order.stem,
            state="creating",
            url=self._client.url,
            request=asked,
            server=self._server,
            idempotency_key=new_key(asked, name),
            created=time.time(),
        ).write(self._reserved.record)

    def _fetch(self) -> Outcome:
        """The clip's bytes in the part file, from the job that there is or from a new one."""
        self._reserved.part.unlink(missing_ok=True)
        name = self._record.name

        def look(seen: Watch) -> None:
            self._told.look(name, seen)

        for _ in range(_JOBS):
            if self._record.job is None:
                self._create()
            else:
                self._told.note(f"{name}: picking up job {self._record.job}")
            assert self._record.job is not None
            outcome = self._client.complete(self._record.job, self._reserved.part, self._deadline, look)
            if outcome is not None:
                failure = outcome.failure()
                if failure is not None:
                    self._keep(state="failed", error=str(failure))
                    raise failure
                return outcome
            self._told.note(
                f"{name}: the server no longer knows job {self._record.job} (it was started again, or deleted it); "
                "asking anew"
            )
            self._record = self._record.renewed().write(self._reserved.record)
        raise ServerError(
            f"the server forgot {_JOBS} jobs of {name} one after another",
            why="it is started again and again, or deletes jobs",
            fix="See its log; then run the same command.",
        )

    def _create(self) -> None:
        request = self._record.request.request(self._reserved.folder)
        try:
            job = self._client.create(request, self._deadline, self._record.idempotency_key)
        except H3Error as exc:
            if exc.details.get("answered", True) and not self._resumed:
                # Nothing was begun, so nothing is left to pick up.
                for path in (self._reserved.record, *self._copied):
                    path.unlink(missing_ok=True)
            raise
        model = job.get("model")
        self._keep(
            state="created",
            job=str(job["id"]),
            model=str(model) if model else None,
            server=self._server,
            created=time.time(),
        )
        self._told.note(f"{self._record.name}: job {self._record.job}, seed {request.seed}")

    def _verify(self, outcome: Outcome) -> None:
        asked, name = self._record.request, self._record.name

        def show(decoder: str, done: int, total: int) -> None:
            self._told.verifying(name, decoder, done, total)

        verdict = verify(
            self._reserved.part,
            Expectation(width=asked.width, height=asked.height, frames=asked.frames),
            progress=show,
        )
        error = verdict.error()
        if error is not None:
            self._keep(state="failed", error=str(error))
            raise error
        for check in verdict.warnings:
            self._told.note(f"{name}: warning: {check.name}: {check.seen}; {check.why}")
        assert verdict.facts is not None
        self._frames = verdict.facts.frames
        timings = {
            "queue_s": outcome.queue_s,
            "generation_s": outcome.generation_s,
            "download_s": outcome.download_s,
            "total_s": time.time() - self._record.created,
        }
        self._keep(
            state="verified",
            sha256=verdict.facts.sha256,
            bytes=outcome.nbytes,
            error=None,
            timings={key: None if value is None else round(value, 2) for key, value in timings.items()},
        )

    def _verified_bytes(self) -> bool:
        """Whether what was verified is still here, under either name."""
        return any(
            path.is_file() and file_digest(path) == self._record.sha256
            for path in (self._reserved.clip, self._reserved.part)
        )

    def _finish(self) -> None:
        assert self._record.sha256 is not None
        clip, part = self._reserved.clip, self._reserved.part
        if clip.is_file() and file_digest(clip) == self._record.sha256:
            part.unlink(missing_ok=True)  # a run that was ended between the two names of one file
        else:
            promote(part, clip)
        write_checksum(clip, self._record.sha256)
        self._keep(state="finished")


def _made(reserved: Reservation, record: Record, *, frames: int | None = None, existing: bool = False) -> Made:
    assert record.sha256 is not None
    return Made(
        record.name,
        reserved.clip,
        reserved.record,
        reserved.checksum,
        record.request.seed,
        record.sha256,
        frames,
        record.timings,
        existing,
    )


def _copy(source: Path, target: Path) -> None:
    """Copy a file to a name that :func:`choose` has found free."""
    try:
        with replacing(target) as temporary:
            shutil.copyfile(source, temporary)
    except OSError as exc:
        raise UsageError(
            f"reference {source} cannot be copied to {target}",
            why=exc.strerror or str(exc),
            fix="Check that the picture can be read and the folder be written.",
        ) from exc
