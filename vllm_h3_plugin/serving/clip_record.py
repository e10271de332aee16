# SPDX-License-Identifier: Apache-2.0
"""``NAME.json`` beside a clip: what was asked and of whom, so that a job can be picked up and a clip made again."""

from __future__ import annotations

import hashlib
import json
import secrets
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_h3_plugin.checkpoint.atomic import replacing
from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.serving.answers import mapping
from vllm_h3_plugin.serving.client import VideoRequest

_SAME_SERVER = ("plugin", "content_sha256", "host", "recipes", "backends")


class Reference(BaseModel):
    """A file that was sent with the request, by its name in the clip's folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str
    sha256: str


class RecordedRequest(BaseModel):
    """A :class:`VideoRequest` as it is kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str
    width: int
    height: int
    frames: int
    steps: int
    seed: int
    references: tuple[Reference, ...] = ()

    def like(self, request: VideoRequest, *, seed: bool) -> bool:
        """Whether ``request`` asks for the same clip; files count by content.

        Args:
            seed: whether the seed counts.
        """
        fields = ("prompt", "width", "height", "frames", "steps", *(("seed",) if seed else ()))
        return all(getattr(self, name) == getattr(request, name) for name in fields) and [
            reference.sha256 for reference in self.references
        ] == [file_digest(path) for path in request.references]

    def request(self, folder: Path) -> VideoRequest:
        """The request, with its files in ``folder``.

        Raises:
            UsageError: a file is missing or has other bytes.
        """
        for reference in self.references:
            path = folder / reference.file
            if not path.is_file() or file_digest(path) != reference.sha256:
                raise UsageError(
                    f"{path}",
                    why="it is missing" if not path.is_file() else "its bytes are not those that were sent",
                    fix="Put the file back, or ask anew without --request.",
                )
        files = tuple(folder / reference.file for reference in self.references)
        return VideoRequest(self.prompt, self.width, self.height, self.frames, self.steps, self.seed, files)


class Record(BaseModel):
    """One clip of one server, made or being made.

    Attributes:
        stem: the name without the number that keeps clips apart.
        state: ``creating``: the server may or may not have a job; ``created``: it has; ``verified``: the bytes are here
            and good; ``finished``: under the clip's name; ``failed``: the same request needs another job.
        server: what it runs, see :func:`server_facts`.
        idempotency_key: of the request, so that asking twice makes one job.
        created: seconds since 1970.
        timings: ``queue_s``, ``generation_s``, ``download_s``, ``total_s``; null where not known.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    name: str
    stem: str
    state: Literal["creating", "created", "verified", "finished", "failed"]
    url: str
    request: RecordedRequest
    server: dict[str, Any]
    idempotency_key: str
    created: float
    job: str | None = None
    model: str | None = None
    timings: dict[str, float | None] = Field(default_factory=dict)
    sha256: str | None = None
    bytes: int | None = None
    error: str | None = None

    def renewed(self) -> Record:
        """The same request as a new job."""
        return self.model_copy(
            update={
                "state": "creating",
                "idempotency_key": new_key(self.request, self.name),
                "job": None,
                "sha256": None,
                "bytes": None,
                "error": None,
                "timings": {},
            }
        )

    def same_server(self, server: dict[str, Any]) -> bool:
        """Whether a server runs what made this clip."""
        return all(self.server.get(name) == server.get(name) for name in _SAME_SERVER)

    def write(self, path: Path) -> Record:
        """Write it to ``path``, whole or not at all, over an older state of itself; returns it."""
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(self.model_dump(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return self


def read_record(path: Path) -> Record | None:
    """The record in a file; None if there is none that this project wrote."""
    try:
        return Record.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def require_record(path: Path) -> Record:
    """The record in a file that a person named.

    Raises:
        UsageError: it cannot be read, or is none.
    """
    try:
        return Record.model_validate_json(path.read_bytes())
    except OSError as exc:
        raise UsageError(
            f"{path} cannot be read", why=exc.strerror or str(exc), fix="Name the NAME.json of a clip."
        ) from exc
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(
            f"{path} is no record of a clip", why=f"{where}: {first['msg']}", fix="Name a NAME.json of `vllm-h3 smoke`."
        ) from exc


def server_facts(info: dict[str, Any]) -> dict[str, Any]:
    """What a clip's bytes depend on, and who made it, from ``/v1/h3/info``."""
    workers = [mapping(worker) for worker in info["workers"]] if isinstance(info.get("workers"), list) else []
    provenance = mapping(info.get("provenance"))
    return {
        "plugin": info.get("plugin"),
        "content_sha256": mapping(provenance.get("plugin")).get("content_sha256"),
        "host": info.get("host"),
        "recipes": [worker.get("recipe") for worker in workers],
        "backends": [worker.get("backend") for worker in workers],
        "attention": [worker.get("attention") for worker in workers],
    }


def new_key(request: RecordedRequest, name: str) -> str:
    """An ``Idempotency-Key``: of the request and the clip's name, and never given twice."""
    text = f"{request.model_dump_json()} {name} {secrets.token_hex(16)}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise UsageError(f"{path} cannot be read", why=exc.strerror or str(exc), fix="Check its name.") from exc
