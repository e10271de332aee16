# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 status``: every state from made-up answers, and once over a real socket."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit.conftest import Verb
from tests.kit.made_outside import LOADING, NOW, URL, Box, MadeOutside, Served, denoising, job
from vllm_h3_plugin.cli import kit_shared
from vllm_h3_plugin.errors import HostError
from vllm_h3_plugin.kit import answers
from vllm_h3_plugin.kit.outside import LocalOutside
from vllm_h3_plugin.kit.words import doing, seconds_left, span
from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.preflight.machine import Ran

STARTING, BAD = 10, 7
INFO = "/v1/h3/info"
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


def test_a_request_that_is_no_job_yet_keeps_it_busy(running: MadeOutside, verb: Verb) -> None:
    running.server.in_flight = 2
    ended = verb("status", "--json")
    assert ended.code == 0 and "busy: preparing a request, or encoding its clip" in ended.out
    assert "a request that is being read; 1 waiting" in ended.out and ended.answer["in_flight"] == 2


def test_jobs_that_ended_long_ago_do_not_hide_whether_one_runs(running: MadeOutside, verb: Verb) -> None:
    running.server.more_jobs = True
    running.server.jobs = [job(f"video_gen_{place}", status="completed") for place in range(100)]
    ended = verb("status", "--json")
    assert ended.code == 0 and ended.answer["state"] == "ready"


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


ODD: list[tuple[dict[str, Any], str]] = [
    ({"workers": {"a": 1}}, "workers"),
    ({"workers": ["x"]}, "workers"),
    ({"workers": [{"memory": {"device": "cuda:0"}}]}, "memory"),
    ({"workers": [{"memory": {"resident_bytes": None, "peak_bytes": "1"}}]}, "memory"),
    ({"guard": "on"}, "guard"),
    ({"guard": {"active": True}}, "guard"),
    ({"host": "vllm"}, "host"),
    ({"provenance": "x"}, "provenance"),
    ({"provenance": {"image": "x"}}, "image"),
    ({"server": "x"}, "server"),
    ({"server": {"started_at": "yesterday"}}, "server"),
    ({"progress": {"phase": "idle", "step": "3", "time": "now"}}, "progress"),
]


@pytest.mark.parametrize(("change", "named"), ODD)
def test_a_part_that_is_not_understood_is_named_and_the_rest_shown(
    running: MadeOutside, verb: Verb, change: dict[str, Any], named: str
) -> None:
    info = {**running.server.info(), **change}
    running.server.fails[INFO] = httpx.Response(200, json=info)
    ended = verb("status", "--json")
    assert ended.code == 0 and ended.answer["state"] == "ready", ended.out + ended.err
    assert f"not understood of what it answers: {named}" in ended.out
    assert ended.answer["not_understood"] == [named]
    assert verb("up").code in (0, HostError.exit_code)


@pytest.mark.parametrize(
    ("path", "instead", "why"),
    [
        (INFO, httpx.Response(200, json=[1]), "GET /v1/h3/info is not understood: it is no object"),
        (INFO, httpx.Response(200, text="null"), "GET /v1/h3/info is not understood: it is no object"),
        (INFO, httpx.Response(200, text="[" * 100_000), "no server of this project"),
        (INFO, httpx.Response(200, text='{"a": ' + "9" * 10_000 + "}"), "no server of this project"),
        (INFO, httpx.Response(200, json={"progress": "x"}), "it does not say what it is at"),
        (INFO, httpx.DecodingError("bad gzip"), "not understood: bad gzip"),
        (INFO, httpx.Response(500), "GET /v1/h3/info gave 500"),
        ("/v1/videos", httpx.Response(500), "GET /v1/videos gave 500"),
        ("/v1/videos", httpx.Response(200, json="x"), "its list of jobs is not understood"),
    ],
)
def test_a_server_that_does_not_say_what_it_does_is_not_called_ready(
    running: MadeOutside, verb: Verb, path: str, instead: httpx.Response | Exception, why: str
) -> None:
    running.server.fails[path] = instead
    ended = verb("status", "--json")
    assert ended.code == BAD and why in ended.out and ended.answer["remedy"]


def test_a_job_without_id_is_a_job(running: MadeOutside, verb: Verb) -> None:
    running.server.jobs = [{"status": "queued", "size": 7}]
    ended = verb("status", "--json")
    assert ended.code == 0 and ended.answer["state"] == "busy" and "(without id), size not given" in ended.out


def test_numbers_that_json_does_not_have_are_left_out(running: MadeOutside, verb: Verb) -> None:
    text = json.dumps({**running.server.info(), "progress": {**denoising(), "time": float("nan"), "step": 10**400}})
    running.server.fails[INFO] = httpx.Response(200, text=text)
    ended = verb("status", "--json")
    assert ended.code == 0 and "busy: denoising" in ended.out and ended.answer["progress"]["time"] is None


def test_what_a_terminal_would_obey_is_not_printed(running: MadeOutside, verb: Verb) -> None:
    running.server.version = "0.1\x1b[31m\x1b]0;title\x07\x9b2J\ud800"
    running.boxes[-1].health, running.boxes[-1].said = "unhealthy", "error: \x1b]52;c;aGk=\x07bad\x08"
    text = json.dumps({**running.server.info(), "host": {"\x1b[2Jvllm": "1"}})
    running.server.fails[INFO] = httpx.Response(200, text=text)
    for name in ("status", "up"):
        ended = verb(name)
        assert not set("\x1b\x07\x08\x9b\ud800") & set(ended.out + ended.err) and "bad" in ended.out + ended.err
    assert "vllm-h3-plugin 0.1, vllm 1" in verb("status").out


def test_the_key_is_hidden_in_what_others_say(running: MadeOutside, verb: Verb) -> None:
    running.setenv("VLLM_API_KEY", "sekrit")
    running.server.version = "Bearer sekrit"
    for name in ("status", "up"):
        ended = verb(name)
        assert "sekrit" not in ended.out + ended.err and "Bearer ***" in ended.out + ended.err
    running.server.fails["/health"] = httpx.ConnectError("Illegal header value b'Bearer sekrit'")
    ended = verb("status")
    assert "sekrit" not in ended.out + ended.err and "Bearer ***" in ended.out


@pytest.mark.parametrize(
    "content", [b"sekritone\nsekrittwo\n", "schl\u00fcssel-sekrit".encode(), b"\xff\xfesekrit", b""]
)
@pytest.mark.parametrize("how", ["H3_API_KEY_FILE", ".env"])
def test_a_key_file_without_a_key_is_said_so(
    running: MadeOutside, verb: Verb, checkout: Path, content: bytes, how: str
) -> None:
    (checkout / "a key").write_bytes(content)
    if how == ".env":
        (checkout / ".env").write_text("VLLM_H3_API_KEY_FILE=./a key\n")
    else:
        running.setenv(how, str(checkout / "a key"))
    running.server.info_status = 401
    ended = verb("status")
    assert ended.code == 0 and running.keys == [None]
    assert "sekrit" not in ended.out + ended.err and "a key holds no key" in ended.out


def test_a_key_file_with_carriage_returns_holds_its_key(running: MadeOutside, verb: Verb, checkout: Path) -> None:
    (checkout / "key").write_bytes(b"sekrit\r\n")
    running.setenv("H3_API_KEY_FILE", str(checkout / "key"))
    assert verb("status").code == 0 and running.keys == ["sekrit"]


def test_without_an_engine_dotenv_still_says_where_it_is(outside: MadeOutside, verb: Verb, checkout: Path) -> None:
    outside.refuses["docker ps"] = Ran(1, "", "permission denied while trying to connect to the Docker daemon socket")
    outside.ready()
    (checkout / "key").write_text("sekrit\n")
    (checkout / ".env").write_text("VLLM_H3_PORT=8123\nVLLM_H3_BIND=127.0.0.2\nVLLM_H3_API_KEY_FILE=key\n")
    ended = verb("status", "--json")
    assert ended.code == 0 and ended.answer["url"] == "http://127.0.0.2:8123" and outside.keys == ["sekrit"]


def test_an_empty_variable_of_the_shell_counts_as_compose_counts_it(
    outside: MadeOutside, verb: Verb, checkout: Path
) -> None:
    (checkout / ".env").write_text("VLLM_H3_PORT=8123\n")
    outside.setenv("VLLM_H3_PORT", "")
    assert verb("status", "--json").answer["url"] == "http://127.0.0.1:8000"


def test_a_folder_that_is_no_checkout_is_named(outside: MadeOutside, verb: Verb) -> None:
    ended = verb("status", "-C", "/nonexistent")
    assert ended.code == 2 and "no compose.yaml in /nonexistent" in ended.err


@pytest.mark.parametrize(
    ("name", "value"),
    [("VLLM_H3_PORT", "abc"), ("VLLM_H3_PORT", "70000"), ("VLLM_H3_BIND", "a:b"), ("VLLM_H3_BIND", "[x")],
)
def test_a_port_or_address_that_is_none_is_named(outside: MadeOutside, verb: Verb, name: str, value: str) -> None:
    outside.setenv(name, value)
    ended = verb("status")
    assert ended.code == 2 and f"{name}={value}" in ended.err and ".env" in ended.err


@pytest.mark.parametrize("value", ["[::1]", "::1"])
def test_an_address_of_version_6_may_stand_in_brackets(outside: MadeOutside, verb: Verb, value: str) -> None:
    outside.setenv("VLLM_H3_BIND", value)
    assert verb("status", "--json").answer["url"] == "http://[::1]:8000"


@pytest.mark.parametrize("port", ["abc", "99999", None, [1]])
def test_a_port_that_the_engine_garbles_is_taken_from_the_variables(
    running: MadeOutside, verb: Verb, port: object
) -> None:
    running.boxes[-1].host_port = port
    running.setenv("VLLM_H3_PORT", "8123")
    assert verb("status", "--json").answer["url"] == "http://127.0.0.1:8123"


@pytest.mark.parametrize("said", ["garbage", "null", "[null]", "{}", "[" * 100_000])
def test_a_description_that_is_none_is_said_so(running: MadeOutside, verb: Verb, said: str) -> None:
    running.refuses["docker inspect"] = Ran(0, said)
    ended = verb("down")
    assert ended.code == 9 and "its answer to `docker inspect` is not understood" in ended.err
    assert verb("status").code == 0


def test_parts_of_a_description_may_be_of_any_type(running: MadeOutside, verb: Verb) -> None:
    one = running.boxes[-1].inspect(running.checkout)
    for odd in (None, [], "x", 7):
        state: dict[str, Any] = {"Status": "exited", "ExitCode": odd, "Health": odd, "StartedAt": odd}
        parts: dict[str, Any] = {
            "State": state,
            "NetworkSettings": {"Ports": odd},
            "HostConfig": odd,
            "RestartCount": odd,
        }
        running.refuses["docker inspect"] = Ran(0, json.dumps([{**one, **parts}]))
        assert verb("status", "--json").answer["container"]["restarts"] in (0, 7)


def test_a_container_that_vanishes_while_it_is_looked_at_is_looked_for_again(
    outside: MadeOutside, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside.boxes = [Box()]
    run = outside.run

    def vanish(argv: Sequence[str], timeout_s: float = 30.0) -> Ran | Unknown:
        if argv[1] == "inspect":
            outside.boxes = []
            return Ran(1, "[]\n", "Error: No such container: id-server\n")
        return run(argv, timeout_s)

    monkeypatch.setattr(outside, "run", vanish)
    ended = verb("down")
    assert ended.code == 0 and ended.out == "nothing to stop\n"


def test_containers_that_never_stand_still_are_no_fault_of_the_engine(running: MadeOutside, verb: Verb) -> None:
    running.refuses["docker inspect"] = Ran(1, "[]\n", "Error: No such object: id-server\n")
    ended = verb("down")
    assert ended.code == BAD and "change while they are looked at" in ended.err and "systemctl" not in ended.err


def test_a_paused_container_is_unhealthy(running: MadeOutside, verb: Verb) -> None:
    running.boxes[-1].status, running.server.health = "paused", None
    ended = verb("status")
    assert ended.code == BAD and "its container is paused" in ended.out and "unpause vllm-h3-server-1" in ended.out
    ended = verb("up")
    assert ended.code == BAD and "docker unpause vllm-h3-server-1" in ended.err


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


def test_an_answer_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "HTTP_TIMEOUT_S", 0.5)
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            while not over.wait(0.1):
                self.wfile.write(b" ")
                self.wfile.flush()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        began = time.monotonic()
        with LocalOutside().http(f"http://127.0.0.1:{server.server_port}", None) as http:
            seen = answers.ask_server(http)
        seconds = time.monotonic() - began
        over.set()
        server.shutdown()
        thread.join()
    assert seen.mute and "no whole answer in time" in seen.unsure and seconds < 5


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
