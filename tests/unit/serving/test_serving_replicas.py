# SPDX-License-Identifier: Apache-2.0
"""Two servers behind a real nginx: which one gets what. The servers are stand-ins that know a line and ids."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.nginx import CONF, balancer
from vllm_h3_plugin.host.video_body import MAX_BODY_BYTES
from vllm_h3_plugin.serving.jobs.job import new_id
from vllm_h3_plugin.serving.profile import load_profile, profile_names

pytestmark = [pytest.mark.host, pytest.mark.programs("nginx")]


class StandIn:
    """A server: jobs that never end, an end to its line, and a record of what it was sent."""

    def __init__(self, name: str) -> None:
        self.name, self.jobs, self.most = name, 0, 16
        self.seen: list[tuple[str, str, dict[str, str], int]] = []
        self.go_on = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                owner.seen.append((self.command, self.path, dict(self.headers), len(body)))
                if self.command == "POST":
                    most = min(owner.most, int(self.headers.get("X-H3-Max-Queue", owner.most)))
                    if owner.jobs and owner.jobs > most:
                        self.answer({"error": {"code": "queue_full"}}, 429, {"Retry-After": "7"})
                        return
                    owner.jobs += 1
                    self.answer({"id": new_id(owner.name), "server": owner.name})
                elif self.path.endswith("/events"):
                    self.send_response(200)
                    self.send_header("Content-Type", "text/event-stream")
                    self.send_header("Connection", "close")
                    self.end_headers()
                    self.wfile.write(b"data: 1\n\n")
                    owner.go_on.wait(60)
                    self.wfile.write(b"data: 2\n\n")
                    self.close_connection = True
                else:
                    self.answer({"server": owner.name})

            do_GET = do_POST = do_DELETE = handle_one

            def answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                for name, text in {**(headers or {}), "Content-Length": str(len(data))}.items():
                    self.send_header(name, text)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def pair() -> Iterator[tuple[httpx.Client, StandIn, StandIn]]:
    a, b = StandIn("a"), StandIn("b")
    with tempfile.TemporaryDirectory(prefix="h3-nginx-") as folder, balancer(Path(folder), a.port, b.port) as url:
        try:
            with httpx.Client(base_url=url, timeout=60) as client:
                yield client, a, b
        finally:
            a.stop()
            b.stop()


def servers(answers: list[httpx.Response]) -> str:
    return "".join(answer.json()["server"] for answer in answers)


def test_new_jobs_go_where_the_line_is_shortest_and_the_last_answer_is_a_servers_own() -> None:
    with pair() as (client, a, b):
        assert servers([client.post("/v1/videos", data={"prompt": "x"}) for _ in range(4)]) == "abab"
        # a's jobs have ended, b has two: the next two are a's, whatever the turn.
        a.jobs = 0
        assert servers([client.post("/v1/videos", data={"prompt": "x"}) for _ in range(2)]) == "aa"
        a.jobs, b.jobs, a.most, b.most = 9, 5, 8, 8
        assert servers([client.post("/v1/videos/sync", data={"prompt": "x"})]) == "b"
        a.jobs, b.jobs = 9, 9
        refused = client.post("/v1/videos", data={"prompt": "x"})
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "7")
        assert refused.json()["error"]["code"] == "queue_full"
        # A body is sent on whole each time.
        assert len({size for method, _, _, size in (*a.seen, *b.seen) if method == "POST"}) == 1


def test_a_caller_who_will_not_wait_is_refused_only_if_both_are_busy() -> None:
    with pair() as (client, a, b):
        alone = {"X-H3-Max-Queue": "0"}
        assert servers([client.post("/v1/videos", headers=alone) for _ in range(2)]) == "ab"
        assert client.post("/v1/videos", headers=alone).status_code == 429
        assert {headers["X-H3-Max-Queue"] for _, _, headers, _ in (*a.seen, *b.seen)} == {"0"}


def test_an_id_leads_to_its_server_by_every_route() -> None:
    with pair() as (client, a, b):
        for server in (a, b, a, b):
            job = new_id(server.name)
            assert (
                servers(
                    [
                        client.get(f"/v1/videos/{job}"),
                        client.get(f"/v1/videos/{job}/content?variant=video"),
                        client.delete(f"/v1/videos/{job}"),
                        client.get(f"/v1/videos?after={job}"),
                        client.get(f"/v1/videos?replica={server.name}"),
                        client.get(f"/v1/h3/info?replica={server.name}"),
                    ]
                )
                == server.name * 6
            )
        # An id without a name, or with one that nobody has, is for any server to say that there is no such job.
        assert servers([client.get(f"/v1/videos/{new_id()}"), client.get(f"/v1/videos/{new_id('c')}")]) == "aa"
        assert servers([client.get("/v1/videos"), client.get("/health")]) == "aa"


def test_a_key_leads_to_one_server_however_busy_it_is() -> None:
    with pair() as (client, a, b):
        homes = {}
        for number in range(20):
            headers = {"Idempotency-Key": f"key-{number}"}
            answers = [client.post(path, headers=headers) for path in ("/v1/videos", "/v1/videos/sync")]
            found = servers([*answers, client.get(f"/v1/videos?idempotency_key=key-{number}")])
            assert found in ("aaa", "bbb")
            homes[number] = found[0]
            a.jobs = b.jobs = 0
        assert set(homes.values()) == {"a", "b"}
        # Its server's refusal is the answer: the other one does not know the key.
        a.jobs = b.jobs = 99
        assert client.post("/v1/videos", headers={"Idempotency-Key": "key-0"}).status_code == 429
        assert all("X-H3-Max-Queue" not in headers for _, _, headers, _ in (*a.seen, *b.seen))


def test_without_one_server_new_jobs_go_to_the_other_and_its_own_say_502() -> None:
    with pair() as (client, a, _):
        a.stop()
        assert servers([client.post("/v1/videos", data={"prompt": "x"}) for _ in range(3)]) == "bbb"
        assert servers([client.get("/health"), client.get(f"/v1/videos/{new_id('b')}")]) == "bb"
        assert client.get(f"/v1/videos/{new_id('a')}").status_code == 502
        keyed = {client.post("/v1/videos", headers={"Idempotency-Key": f"key-{n}"}).status_code for n in range(20)}
        assert keyed == {200, 502}


def test_events_arrive_when_they_happen() -> None:
    with pair() as (client, a, _), client.stream("GET", f"/v1/videos/{new_id('a')}/events") as answer:
        lines = answer.iter_lines()
        # The second event is only sent after the first was read here: a buffer would hold both back.
        assert next(lines) == "data: 1"
        a.go_on.set()
        assert [line for line in lines if line] == ["data: 2"]


def test_a_body_as_large_as_a_server_takes_passes_and_its_answer_may_take_as_long_as_a_profile_allows() -> None:
    text = CONF.read_text(encoding="utf-8")
    most = int(text.partition("client_max_body_size ")[2].partition("m;")[0]) << 20
    assert MAX_BODY_BYTES <= most < MAX_BODY_BYTES * 1.1
    longest = max(load_profile(name).request_timeout_s for name in profile_names())
    assert int(text.partition("proxy_read_timeout ")[2].partition("h;")[0]) * 3600 > longest
    with pair() as (client, a, _):
        assert client.post("/v1/videos", content=b"x" * (8 << 20)).status_code == 200
        assert a.seen[-1][3] == 8 << 20
