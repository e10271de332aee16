# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 status``: every state from made-up answers, and once over a real socket."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from tests.kit.conftest import Verb
from tests.kit.made_outside import LOADING, NOW, URL, Box, MadeOutside, Served, denoising, job
from vllm_h3_plugin.cli import kit_shared
from vllm_h3_plugin.kit.outside import LocalOutside
from vllm_h3_plugin.kit.words import doing, seconds_left, span
from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.preflight.machine import Ran

STARTING, BAD = 10, 7
REPORT = ["error: 1 fault in /checkpoint/FL2VA", "  why: shard 3 is not there", "  fix: Copy it."]


@pytest.fixture
def running(outside: MadeOutside) -> MadeOutside:
    """A server that is ready."""
    outside.boxes = [Box("check", "exited", health=""), Box()]
    outside.ready()
    return outside


def test_a_ready_server_tells_memory_uptime_versions_and_image(running: MadeOutside, verb: Verb) -> None:
    ended = verb("status", "--json")
    assert ended.code == 0
    for words in (
        "ready: nothing to do",
        "31.0 GiB available (guarded, floor 6.0 GiB); 55.0 GiB on cuda:0, peak 60.0 GiB",
        "2 h 13 min",
        "vllm 0.30.0, vllm-omni 0.30.0",
        "vllm-h3-server-1: running, healthy",
        "vllm-h3-plugin:nvidia sha256:abc",
        "commit 3eb87f7 on name@sha256:1",
    ):
        assert words in ended.out, words
    answer = ended.answer
    assert (answer["ok"], answer["state"], answer["uptime_s"]) == (True, "ready", 7980.0)
    assert answer["progress"] is None and answer["jobs"] == [] and answer["waiting"] == 0
    assert answer["container"]["image_id"] == "sha256:abc" and answer["versions"]["torch"] == "2.11.0"


def test_a_busy_server_tells_job_step_time_left_and_queue(running: MadeOutside, verb: Verb) -> None:
    running.server.progress = denoising()
    running.server.jobs = [job(), job("video_gen_2", status="queued"), job("video_gen_3", status="queued")]
    ended = verb("status", "--json")
    assert ended.code == 0
    assert "busy: denoising, step 7 of 50, 8.0 s a step, 5 min 43 s left" in ended.out
    assert "video_gen_1, 768x448; 2 waiting" in ended.out
    assert ended.answer["state"] == "busy" and ended.answer["seconds_left"] == 343.0 and ended.answer["waiting"] == 2


def test_a_caller_who_waits_for_the_clip_itself_keeps_it_busy(running: MadeOutside, verb: Verb) -> None:
    running.server.in_flight = 2
    ended = verb("status", "--json")
    assert ended.code == 0 and "busy: preparing a request, or encoding its clip" in ended.out
    assert "a request of /v1/videos/sync; 1 waiting" in ended.out and ended.answer["in_flight"] == 2


def test_a_stuck_request_is_unhealthy_with_the_remedy(running: MadeOutside, verb: Verb) -> None:
    running.server.progress = denoising(seconds_ago=1900)
    ended = verb("status")
    assert ended.code == BAD
    assert "unhealthy: stuck in denoising, step 7 of 50: nothing has moved for 1900 s" in ended.out
    assert "vllm-h3 down --now && vllm-h3 up" in ended.out and "does not do it by itself" in ended.out
    assert verb("status", "--stuck-after", "3600").code == 0


@pytest.mark.parametrize(
    ("box", "code", "words"),
    [
        (Box(log=[LOADING]), STARTING, "starting: loading transformer, 12.30 of 45.00 GiB, 1.20 GiB/s, 27 s left"),
        (Box(status="restarting", restarts=2, log=REPORT), BAD, "restarted 2 times): 1 fault in /checkpoint/FL2VA"),
        (Box(health="unhealthy", said="error: mute\n  why: y"), BAD, "unhealthy: its health check fails: mute; why: y"),
        (Box(status="exited", exit_code=3, health="", log=REPORT), BAD, "stopped: it ended with exit code 3: 1 fault"),
        (Box(status="exited", health=""), BAD, "stopped: it was stopped"),
        (Box(status="exited", exit_code=137, health=""), BAD, "it was ended by SIGKILL"),
        (Box(status="created", error="no such device", health=""), BAD, "stopped: no such device"),
    ],
)
def test_a_container_whose_server_does_not_answer(
    outside: MadeOutside, verb: Verb, box: Box, code: int, words: str
) -> None:
    outside.boxes = [box]
    ended = verb("status", "--json")
    assert ended.code == code and words in ended.out
    assert ended.answer["ok"] is False and ended.answer["error"]["fix"] == ended.answer["remedy"]


def test_a_check_that_failed_is_the_reason(outside: MadeOutside, verb: Verb) -> None:
    outside.boxes = [Box("check", "exited", 3, health="", log=REPORT), Box(status="created", health="")]
    ended = verb("status")
    assert ended.code == BAD and "the check before the start failed: 1 fault" in ended.out
    outside.boxes[0].status, outside.boxes[0].exit_code = "running", 0
    ended = verb("status")
    assert ended.code == STARTING and "the check before the start runs" in ended.out


def test_a_dead_engine_behind_a_living_server(running: MadeOutside, verb: Verb) -> None:
    running.server.health = 503
    ended = verb("status")
    assert ended.code == BAD and "/health gave 503: its engine is dead" in ended.out
    assert "vllm-h3 logs --errors" in ended.out


def test_a_server_that_docker_calls_unhealthy_is_so_though_it_answers(running: MadeOutside, verb: Verb) -> None:
    running.boxes[-1].health, running.boxes[-1].said = "unhealthy", "error: no answer to GET /health"
    ended = verb("status")
    assert ended.code == BAD and "health check fails: no answer to GET /health" in ended.out


def test_a_mute_server_that_was_healthy_is_busy(running: MadeOutside, verb: Verb) -> None:
    running.server.mute = True
    ended = verb("status")
    assert ended.code == 0 and "encoding frames can hold it for a minute" in ended.out


def test_a_server_that_asks_for_a_key_says_how_to_give_it(running: MadeOutside, verb: Verb) -> None:
    running.server.info_status = 401
    ended = verb("status")
    assert ended.code == 0 and "it asks for a key" in ended.out and "H3_API_KEY_FILE" in ended.out


def test_something_else_at_that_address_is_no_server_of_ours(running: MadeOutside, verb: Verb) -> None:
    running.server.info_status = 404
    ended = verb("status")
    assert ended.code == BAD and "this plugin is not active in it" in ended.out


def test_nothing_at_all_is_stopped_and_says_how_to_start(outside: MadeOutside, verb: Verb) -> None:
    ended = verb("status", "--json")
    assert ended.code == BAD and "stopped: nothing answers: Connection refused" in ended.out
    assert "vllm-h3 up" in ended.out and ended.answer["container"] is None


def test_without_an_engine_the_server_is_asked_all_the_same(outside: MadeOutside, verb: Verb) -> None:
    outside.refuses["docker ps"] = Unknown("docker is not installed, or not on PATH")
    outside.ready()
    ended = verb("status", "--json")
    assert ended.code == 0 and "not looked at: docker is not there" in ended.out
    assert "not installed" in ended.answer["no_containers"]


def test_another_address_is_not_described_by_this_projects_container(running: MadeOutside, verb: Verb) -> None:
    ended = verb("status", "--url", "http://127.0.0.1:9123", "--json")
    assert ended.answer["container"] is None and ended.answer["url"] == "http://127.0.0.1:9123"
    assert "no container of this project is at" in ended.answer["no_containers"]
    assert verb("status", "--url", URL, "--json").answer["container"]["name"] == "vllm-h3-server-1"


def test_an_older_server_that_tells_less_is_still_described(running: MadeOutside, verb: Verb) -> None:
    running.server.progress = {"phase": "denoising", "step": 7, "steps": 50, "time": NOW}
    ended = verb("status", "--json")
    assert "busy: denoising, step 7 of 50" in ended.out and ended.answer["seconds_left"] is None


def test_watch_ends_with_ctrl_c_and_one_json_line(
    running: MadeOutside, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second() -> None:
        running.server.progress = denoising()

    def interrupt() -> None:
        raise KeyboardInterrupt

    running.at(2, second)
    running.at(6, interrupt)
    ended = verb("status", "--watch", "--json")
    assert len(ended.out.splitlines()) == 1 and ended.answer["state"] == "busy"
    assert [line.split(":")[0] for line in ended.err.splitlines()] == ["ready", "busy", "busy"]


@pytest.fixture
def listening() -> Iterator[str]:
    """A small server on a real socket that answers like ours."""
    served = Served(health=200, progress=denoising(), jobs=[job()])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = served.answer(httpx.Request("GET", f"http://here{self.path}"))
            self.send_response(answer.status_code)
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_over_a_real_socket(listening: str, verb: Verb, checkout: object, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoEngine(LocalOutside):
        def run(self, argv: object, timeout_s: float = 30.0) -> Ran | Unknown:
            return Unknown("docker is not installed, or not on PATH")

    monkeypatch.setattr(kit_shared, "this_outside", NoEngine)
    ended = verb("status", "--url", listening, "--stuck-after", "1e12", "--json")
    assert ended.code == 0 and ended.answer["state"] == "busy"
    assert ended.answer["jobs"] == [{key: job()[key] for key in ("id", "status", "created_at", "size")}]
    assert json.dumps(ended.answer)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (59.6, "1 min"), (333, "5 min 33 s"), (7980, "2 h 13 min"), (3600, "1 h"), (90000, "1 d 1 h")],
)
def test_spans_in_words(seconds: float, words: str) -> None:
    assert span(seconds) == words


def test_time_left_counts_the_step_that_is_under_way_and_never_more_than_it() -> None:
    assert seconds_left(denoising(49), NOW) == 7.0
    assert seconds_left(denoising(49, seconds_ago=500), NOW) == 0.0
    assert seconds_left(denoising(0, each=None), NOW) is None


def test_bytes_are_shown_where_something_is_read() -> None:
    loading = {
        "phase": "building table",
        "step": 3,
        "steps": 10,
        "time": NOW,
        "done_bytes": 2**29,
        "total_bytes": 2**30,
    }
    assert doing(loading, NOW) == "building table, 0.5 GiB of 1.0 GiB"
