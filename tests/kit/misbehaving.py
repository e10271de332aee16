# SPDX-License-Identifier: Apache-2.0
"""A video server on loopback that behaves, except where a test tells it not to."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

from vllm_h3_plugin import __version__
from vllm_h3_plugin.serving.server import PIPELINE

Fault = Callable[["Handler"], None]


@dataclass
class Misbehaving:
    """Jobs outlive :meth:`stop`, as long as nobody clears them.

    Attributes:
        clips: body of a clip by its size, ``"64x64"``.
        jobs: id -> the job.
        created: form, headers and idempotency key of each job that was asked for, first attempt to last.
        hold: while it is set, jobs stay in progress.
        create, look, content: stand in for the proper answer while they are set.
        asked: set when somebody looks at a job.
    """

    clips: dict[str, bytes]
    key: str | None = None
    recipe: str = "fp8"
    tasks: tuple[str, ...] = ("fl2va", "t2va")
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    create: Fault | None = None
    look: Fault | None = None
    content: Fault | None = None
    downloads: int = 0
    port: int = 0
    _server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        owner = self

        class Bound(Handler):
            shop = owner

        self._server = Server(("127.0.0.1", self.port), Bound)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def die_and_return(self, away_s: float, *, forget: bool = False) -> threading.Thread:
        """Once somebody has looked at a job: go away, and come back on the same port."""

        def run() -> None:
            assert self.asked.wait(120)
            self.stop()
            if forget:
                self.jobs.clear()
            time.sleep(away_s)
            self.hold.clear()
            self.start()

        thread = threading.Thread(target=run)
        thread.start()
        return thread


class Server(ThreadingHTTPServer):
    """Its threads do not keep a test waiting."""

    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is what these tests are about."""
        if not isinstance(sys.exception(), OSError | ValueError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """HTTP/1.0: each answer ends its connection."""

    shop: Misbehaving

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self._allowed():
            return
        form = {name.decode(): value.decode() for name, value in re.findall(rb'name="(\w+)"\r\n\r\n(.*?)\r\n', body)}
        if not form:
            form = dict(parse_qsl(body.decode()))
        form["files"] = str(body.count(b'name="input_references"'))
        self.shop.created.append({"form": form, "key": self.headers.get("Idempotency-Key")})
        if self.shop.create is not None:
            return self.shop.create(self)
        job = {"id": f"video_{len(self.shop.created)}", "status": "in_progress", "progress": 0, "model": "H3"}
        self.shop.jobs[str(job["id"])] = {**job, "size": form["size"]}
        self.json(200, job)

    def do_GET(self) -> None:
        if not self._allowed():
            return
        if self.path == "/v1/h3/info":
            worker = {
                "pipeline": PIPELINE,
                "recipe": self.shop.recipe,
                "backend": "reference",
                "attention": "PrefixSDPABackend",
                "memory": {"device": "cpu"},
                "supported_tasks": self.shop.tasks,
            }
            progress = {"phase": "denoising", "step": 3, "steps": 8, "time": time.time()}
            return self.json(200, {"plugin": __version__, "host": {}, "workers": [worker], "progress": progress})
        _, _, _, job_id, *rest = self.path.split("/")
        job = self.shop.jobs.get(job_id)
        if job is None:
            return self.json(404, {"detail": "Video not found"})
        if rest:
            self.shop.downloads += 1
            return (self.shop.content or proper)(self)
        self.shop.asked.set()
        if self.shop.look is not None:
            return self.shop.look(self)
        if job["status"] == "in_progress" and not self.shop.hold.is_set():
            job |= {"status": "completed", "progress": 100, "inference_time_s": 1.5}
        self.json(500 if job["status"] == "failed" else 200, job)

    def _allowed(self) -> bool:
        if self.shop.key is None or self.headers.get("Authorization") == f"Bearer {self.shop.key}":
            return True
        self.json(401, {"error": "Unauthorized"})
        return False

    @property
    def clip(self) -> bytes:
        """What the job of this request would be answered with."""
        return self.shop.clips[self.shop.jobs[self.path.split("/")[3]]["size"]]

    def head(self, status: int, **headers: object) -> None:
        """Status line and headers; underscores stand for hyphens."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def json(self, status: int, body: object, **headers: object) -> None:
        """A whole JSON answer."""
        data = json.dumps(body).encode()
        self.head(status, Content_Type="application/json", Content_Length=len(data), **headers)
        self.wfile.write(data)

    def send(self, body: bytes, *, length: int | None = None, kind: str = "video/mp4", status: int = 200) -> None:
        """A body, and how long it is said to be."""
        self.head(status, Content_Type=kind, Content_Length=len(body) if length is None else length)
        self.wfile.write(body)


def proper(handler: Handler) -> None:
    """The clip, as it should be."""
    handler.send(handler.clip)


def stall(handler: Handler) -> None:
    """Half of the clip, and then nothing."""
    handler.send(handler.clip[: len(handler.clip) // 2], length=len(handler.clip))
    handler.wfile.flush()
    handler.shop.over.wait(30)


def cut(handler: Handler) -> None:
    """Half of the clip, and then the end of the connection."""
    handler.send(handler.clip[: len(handler.clip) // 2], length=len(handler.clip))


def trickle(handler: Handler) -> None:
    """A byte now and then, never long enough apart to be a stall."""
    handler.head(200, Content_Type="video/mp4", Content_Length=len(handler.clip))
    for byte in _bytes(handler.clip):
        handler.wfile.write(byte)
        handler.wfile.flush()
        if handler.shop.over.wait(0.05):
            return


def endless(handler: Handler) -> None:
    """A body without an end, and without a word about its length."""
    handler.head(200, Content_Type="video/mp4")
    while not handler.shop.over.is_set():
        handler.wfile.write(bytes(1 << 16))


def _bytes(data: bytes) -> Iterator[bytes]:
    return (data[n : n + 1] for n in range(len(data)))
