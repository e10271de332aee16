# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 down``: no job is lost unasked, nothing foreign is touched, and the memory comes back or is named."""

from __future__ import annotations

import httpx
import pytest

from tests.kit.conftest import Verb
from tests.kit.made_outside import GIB, NOW, Box, MadeOutside, denoising, job, run_verb
from vllm_h3_plugin.errors import BusyError, ServerError, SettingsError, ToolMissingError
from vllm_h3_plugin.preflight.machine import Memory, Ran

APPS = "nvidia-smi --query-compute-apps"


@pytest.fixture
def running(outside: MadeOutside) -> MadeOutside:
    """A server on unified memory: 4 GiB in its processes, 55 GiB by its allocator, 30 GiB left."""
    outside.boxes = [Box("check", "exited", health=""), Box(health="healthy")]
    outside.ready()
    outside.top = "  PID\n   71\n   72\n"
    outside.processes = {71: 1 * GIB, 72: 3 * GIB}
    outside.machine.commands[APPS] = Ran(0, "72, python3, 56320\n")
    outside.available(30)
    return outside


def freed(outside: MadeOutside, gib: float = 89) -> None:
    """All that the server held is back."""
    outside.processes = {}
    outside.machine.commands[APPS] = Ran(0, "")
    outside.available(gib)


def test_an_idle_server_is_stopped_and_its_memory_seen_to_come_back(running: MadeOutside, verb: Verb) -> None:
    running.at(3, lambda: freed(running))
    ended = verb("down", "--json")
    assert ended.code == 0, ended.err
    assert "30.0 GiB available before, 89.0 GiB now; it held 59.0 GiB" in ended.out
    assert ended.answer["stopped"] == ["vllm-h3-check-1", "vllm-h3-server-1"]
    assert ended.answer["held_bytes"] == 59 * GIB and ended.answer["seconds"] == 3.0
    assert ended.answer["killed"] == "" and ended.answer["device_bytes"] == 0
    # Volumes are kept.
    assert not any(word in ("-v", "--volumes") for argv in running.asked for word in argv)


def test_a_running_job_is_waited_for_with_its_step_and_time_left(running: MadeOutside, verb: Verb) -> None:
    running.server.progress, running.server.jobs = denoising(), [job(), job("video_gen_2", status="queued")]

    def done() -> None:
        assert running.words == []
        running.server.progress, running.server.jobs = {"phase": "idle"}, []

    running.at(20, done)
    running.at(21, lambda: freed(running))
    ended = verb("down")
    assert ended.code == 0 and running.words == ["down"]
    assert "waiting for the job: job video_gen_1 (denoising, step 7 of 50, 8.0 s a step, 5 min" in ended.err
    assert "and 1 waiting" in ended.err
    assert running.monotonic() >= 20


def test_a_request_that_is_no_job_is_waited_for_too(running: MadeOutside, verb: Verb) -> None:
    running.server.progress = denoising()
    running.at(10, lambda: running.server.progress.update(phase="idle"))
    running.at(11, lambda: freed(running))
    ended = verb("down")
    assert ended.code == 0 and "waiting for the job: a request (denoising, step 7 of 50" in ended.err


def test_a_clip_that_is_being_encoded_for_a_waiting_caller_is_waited_for(running: MadeOutside, verb: Verb) -> None:
    """The worker is idle then, and there is no job: only the request is still in flight."""
    running.server.in_flight = 1

    def sent() -> None:
        assert running.words == []
        running.server.in_flight = 0

    running.at(10, sent)
    running.at(11, lambda: freed(running))
    ended = verb("down")
    assert ended.code == 0 and "waiting for the job: a request (preparing or encoding)" in ended.err


def test_after_the_timeout_nothing_is_stopped(running: MadeOutside, verb: Verb) -> None:
    running.server.progress, running.server.jobs = denoising(), [job()]
    ended = verb("down", "--timeout", "60")
    assert ended.code == BusyError.exit_code and running.words == []
    assert "still runs after 60 s, and nothing was stopped" in ended.err
    assert "video_gen_1" in ended.err and "--timeout" in ended.err and "vllm-h3 down --now" in ended.err


def test_now_says_what_it_kills(running: MadeOutside, verb: Verb) -> None:
    running.server.progress, running.server.jobs = denoising(), [job()]
    running.on_down = lambda: (freed(running), running._down())[1]
    ended = verb("down", "--now", "--json")
    assert ended.code == 0 and running.monotonic() == 0
    assert "killed: job video_gen_1 (denoising, step 7 of 50" in ended.err
    assert ended.answer["killed"].startswith("job video_gen_1")


def test_a_job_that_does_not_move_is_not_waited_for(running: MadeOutside, verb: Verb) -> None:
    running.server.progress, running.server.jobs = denoising(seconds_ago=1900), [job()]
    running.at(1, lambda: freed(running))
    ended = verb("down")
    assert ended.code == 0 and "not waited for: stuck in denoising, step 7 of 50" in ended.err
    assert "killed: job video_gen_1 (denoising" in ended.err


def test_a_mute_server_may_hold_a_job(running: MadeOutside, verb: Verb) -> None:
    running.server.mute = True
    ended = verb("down", "--timeout", "30")
    assert ended.code == BusyError.exit_code and running.words == []


def test_without_its_key_nothing_is_stopped_unasked(running: MadeOutside, verb: Verb) -> None:
    running.server.info_status = 401
    ended = verb("down")
    assert ended.code == ServerError.exit_code and running.words == []
    assert "H3_API_KEY_FILE" in ended.err and "--now" in ended.err


INFO, VIDEOS = "/v1/h3/info", "/v1/videos"
NOT_KNOWN = "whether a job runs is not known, and nothing was stopped"


@pytest.mark.parametrize(
    ("path", "instead", "why"),
    [
        (INFO, httpx.Response(500), "GET /v1/h3/info gave 500"),
        (INFO, httpx.Response(429), "GET /v1/h3/info gave 429"),
        (INFO, httpx.Response(403), "GET /v1/h3/info gave 403"),
        (INFO, httpx.Response(200, text="<html>"), "no server of this project"),
        (INFO, httpx.Response(200, text="[" * 100_000), "no server of this project"),
        (INFO, httpx.Response(200, json={}), "is not understood: it is empty"),
        (INFO, httpx.Response(200, json=[]), "is not understood: it is no object"),
        (INFO, httpx.Response(200, json={"plugin": "1", "progress": "busy"}), "does not say what it is at"),
        (INFO, httpx.Response(200, json={"progress": {"phase": "idle"}, "requests": 1}), "requests are not understood"),
        (VIDEOS, httpx.Response(500), "GET /v1/videos gave 500"),
        (VIDEOS, httpx.Response(200, json=[]), "its list of jobs is not understood"),
        (VIDEOS, httpx.Response(200, json={"data": ["x"]}), "its list of jobs is not understood"),
        (VIDEOS, httpx.Response(200, json={"data": [], "has_more": True}), "its list of jobs is not whole"),
        ("/health", httpx.ReadError("Connection reset by peer"), "Connection reset by peer"),
        ("/health", httpx.ConnectError("Connection refused"), "Connection refused"),
    ],
)
def test_where_it_is_not_said_what_runs_nothing_is_stopped_unasked(
    running: MadeOutside, verb: Verb, path: str, instead: httpx.Response | Exception, why: str
) -> None:
    running.server.fails[path] = instead
    ended = verb("down")
    assert ended.code == ServerError.exit_code and running.words == []
    assert NOT_KNOWN in ended.err and why in ended.err and "Whatever runs, `vllm-h3 down --now` ends it." in ended.err
    running.on_down = lambda: (freed(running), running._down())[1]
    ended = verb("down", "--now", "--json")
    assert ended.code == 0 and running.words == ["down"]
    assert "killed: not known what runs" in ended.err and why in ended.answer["killed"]


def test_what_passes_within_ten_seconds_ends_no_wait(running: MadeOutside, verb: Verb) -> None:
    running.server.progress = denoising()
    running.at(4, lambda: running.server.fails.update({INFO: httpx.Response(502)}))
    running.at(10, running.server.fails.clear)
    running.at(20, lambda: running.server.progress.update(phase="idle"))
    running.at(21, lambda: freed(running))
    ended = verb("down")
    assert ended.code == 0 and "asking what runs: GET /v1/h3/info gave 502" in ended.err
    assert running.monotonic() >= 20


def test_a_container_that_ends_meanwhile_has_no_job(running: MadeOutside, verb: Verb) -> None:
    running.server.progress = denoising()

    def die() -> None:
        running.boxes[-1].status, running.server.health = "exited", None
        freed(running)

    running.at(4, die)
    assert verb("down").code == 0 and running.words == ["down"]


@pytest.mark.parametrize("status", ["running", None, 7])
def test_a_job_of_unknown_status_counts_as_running(running: MadeOutside, verb: Verb, status: object) -> None:
    running.server.jobs = [job(status=status)]
    ended = verb("down", "--timeout", "30")
    assert ended.code == BusyError.exit_code and running.words == [] and "video_gen_1" in ended.err


def test_jobs_that_have_ended_are_not_waited_for(running: MadeOutside, verb: Verb) -> None:
    running.server.jobs = [job(status="completed"), job("video_gen_2", status="failed")]
    running.at(1, lambda: freed(running))
    assert verb("down").code == 0 and running.words == ["down"]


def test_a_dead_engine_with_a_job_names_it(running: MadeOutside, verb: Verb) -> None:
    running.server.health, running.server.progress, running.server.jobs = 503, denoising(), [job()]
    ended = verb("down")
    assert ended.code == ServerError.exit_code and running.words == []
    assert "/health gave 503, beside job video_gen_1" in ended.err and "vllm-h3 down --now" in ended.err


def test_a_dead_engine_that_names_no_job_is_stopped(running: MadeOutside, verb: Verb) -> None:
    running.server.health = 503
    running.at(1, lambda: freed(running))
    assert verb("down").code == 0


def test_a_paused_server_may_hold_a_job(running: MadeOutside, verb: Verb) -> None:
    running.boxes[-1].status = "paused"
    ended = verb("down")
    assert ended.code == ServerError.exit_code and running.words == []
    assert NOT_KNOWN in ended.err and "vllm-h3-server-1 is paused" in ended.err
    running.on_down = lambda: (freed(running), running._down())[1]
    ended = verb("down", "--now")
    assert ended.code == 0 and "killed: not known what runs: container vllm-h3-server-1 is paused" in ended.err


def test_each_server_that_runs_is_asked(running: MadeOutside, verb: Verb) -> None:
    running.boxes.insert(0, Box("server-extra", "paused"))
    running.boxes.append(Box("server-more", "paused"))
    assert verb("down").code == ServerError.exit_code and running.words == []


@pytest.mark.parametrize("key", ["sekrit one", "sekrit\r", "sekrit\nsekrittwo", "schl\u00fcssel-sekrit"])
def test_a_key_that_is_none_is_not_sent_nor_shown(running: MadeOutside, verb: Verb, key: str) -> None:
    running.setenv("VLLM_API_KEY", key)
    running.server.info_status = 401
    for name in ("down", "status", "up"):
        ended = verb(name)
        assert set(running.keys) == {None} and running.words == []
        assert "sekrit" not in ended.out + ended.err
        assert "VLLM_API_KEY holds no key: a key is one word of printable ASCII" in ended.out + ended.err


@pytest.mark.parametrize("how", ["environment", ".env"])
def test_stuck_is_what_the_health_check_calls_so(running: MadeOutside, verb: Verb, how: str) -> None:
    running.server.progress = denoising(seconds_ago=2000)
    running.server.jobs = [job()]
    if how == ".env":
        (running.checkout / ".env").write_text("VLLM_H3_STUCK_AFTER_S=7200\n")
    else:
        running.setenv("VLLM_H3_STUCK_AFTER_S", "7200")
    assert verb("status").code == 0
    ended = verb("down", "--timeout", "60")
    assert ended.code == BusyError.exit_code and running.words == []


def test_a_limit_that_is_no_number_is_named(running: MadeOutside, verb: Verb) -> None:
    running.setenv("VLLM_H3_STUCK_AFTER_S", "2h")
    for name in ("down", "status"):
        ended = verb(name)
        assert ended.code == SettingsError.exit_code and "VLLM_H3_STUCK_AFTER_S=2h" in ended.err and ".env" in ended.err


def test_who_came_by_make_is_told_to_go_on_by_make(running: MadeOutside, capsys: pytest.CaptureFixture[str]) -> None:
    running.server.info_status = 500
    ended = run_verb("down", capsys=capsys, made=True)
    assert "`make down ARGS=--now` ends it" in ended.err and "vllm-h3 down" not in ended.err
    running.server.info_status, running.server.health = 200, 503
    ended = run_verb("status", "--engine", "podman", capsys=capsys, made=True)
    assert "`make logs ARGS='--errors --engine podman'`" in ended.out
    assert "`make down ARGS='--now --engine podman' && make up ARGS='--engine podman'`" in ended.out


def test_memory_that_does_not_come_back_is_an_error_that_names_its_holders(running: MadeOutside, verb: Verb) -> None:
    running.machine.main_memory = Memory(119 * GIB, 30 * GIB, 0, 0, ("python3 (pid 72, 3.0 GiB)",))
    running.at(1, lambda: running.processes.pop(71))
    ended = verb("down", "--json")
    assert ended.code == BusyError.exit_code and running.words == ["down"]
    assert "did not come back within 60 s" in ended.err
    assert "59.0 GiB are missing (30.0 GiB are available), and its processes 72 still hold memory" in ended.err
    assert "python3 (pid 72, on the device), python3 (pid 72, 3.0 GiB)" in ended.err
    assert ended.answer["ok"] is False and ended.answer["error"]["stopped"]
    assert running.monotonic() == 60


def test_a_process_that_is_left_over_is_named_though_memory_is_back(running: MadeOutside, verb: Verb) -> None:
    def almost() -> None:
        freed(running)
        running.processes = {71: 2**20}

    running.at(1, almost)
    ended = verb("down")
    assert ended.code == BusyError.exit_code and "its processes 71 still hold memory" in ended.err


def test_memory_that_another_program_took_is_told_apart_from_nothing(running: MadeOutside, verb: Verb) -> None:
    running.machine.main_memory = Memory(119 * GIB, 30 * GIB, 0, 0, ("other (pid 9, 40.0 GiB)",))
    running.at(1, lambda: freed(running, 49))
    running.machine.main_memory = Memory(119 * GIB, 30 * GIB, 0, 0, ("other (pid 9, 40.0 GiB)",))
    ended = verb("down")
    assert ended.code == BusyError.exit_code
    assert "40.0 GiB are missing (49.0 GiB are available)" in ended.err and "other (pid 9, 40.0 GiB)" in ended.err


def test_a_tenth_may_be_missing(running: MadeOutside, verb: Verb) -> None:
    running.at(1, lambda: freed(running, 84))
    assert verb("down").code == 0


def test_a_device_with_memory_of_its_own_is_counted_apart(running: MadeOutside, verb: Verb) -> None:
    running.machine.commands["nvidia-smi --query-gpu"] = Ran(0, "0, NVIDIA H200, 580.1, 9.0, 143771, 80000\n")
    running.at(2, lambda: freed(running, 34))
    ended = verb("down", "--json")
    assert ended.code == 0
    assert ended.answer["held_bytes"] == 4 * GIB and ended.answer["device_bytes"] == 55 * GIB
    assert "it held 4.0 GiB, and 55.0 GiB on its device" in ended.out


def test_where_the_driver_has_no_number_the_workers_own_counts(running: MadeOutside, verb: Verb) -> None:
    running.machine.commands[APPS] = Ran(0, "72, python3, [N/A]\n")
    running.at(1, lambda: freed(running))
    assert verb("down", "--json").answer["held_bytes"] == 59 * GIB


def test_nothing_to_stop_is_no_failure(outside: MadeOutside, verb: Verb) -> None:
    ended = verb("down", "--json")
    assert ended.code == 0 and outside.words == []
    assert ended.out.startswith("nothing to stop") and ended.answer["stopped"] == []


def test_a_server_that_ended_is_removed_without_waiting(outside: MadeOutside, verb: Verb) -> None:
    outside.boxes = [Box(status="exited", exit_code=1, health="")]
    ended = verb("down")
    assert ended.code == 0 and outside.words == ["down"] and ended.out.startswith("stopped: vllm-h3-server-1")


def test_a_server_that_still_loads_is_stopped_at_once(outside: MadeOutside, verb: Verb) -> None:
    outside.boxes = [Box()]
    outside.machine.commands[APPS] = Ran(0, "")
    ended = verb("down")
    assert ended.code == 0 and outside.words == ["down"]


def test_the_ascend_role_that_runs_is_found(outside: MadeOutside, verb: Verb) -> None:
    file = str(outside.checkout / "compose.ascend.yaml")
    outside.boxes = [Box("server-2", project="vllm-h3-ascend", files=file, status="exited", health="")]
    ended = verb("down")
    assert ended.code == 0
    argv = next(argv for argv in outside.asked if argv[1] == "compose")
    assert argv[2:] == ("--project-name", "vllm-h3-ascend", "--file", file, "--profile", "cards-2", "down")


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (Ran(1, "", "docker: unknown command: docker compose\n"), ToolMissingError.exit_code, "docker-compose-plugin"),
        (Ran(1, "", "required variable X is missing a value: y\n"), ServerError.exit_code, "docker ps --filter label="),
    ],
)
def test_what_compose_refuses_is_said(running: MadeOutside, verb: Verb, answer: Ran, code: int, words: str) -> None:
    running.on_down = lambda: answer
    ended = verb("down")
    assert ended.code == code and words in ended.err


def test_ctrl_c_while_waiting_stops_nothing(running: MadeOutside, verb: Verb) -> None:
    running.server.progress = denoising()

    def interrupt() -> None:
        raise KeyboardInterrupt

    running.at(4, interrupt)
    ended = verb("down")
    assert ended.code == 130 and running.words == [] and "vllm-h3 status" in ended.err
    assert running.now() > NOW
