# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 down``: no job is lost unasked, nothing foreign is touched, and the memory comes back or is named."""

from __future__ import annotations

import pytest

from tests.kit.conftest import Verb
from tests.kit.made_outside import GIB, NOW, Box, MadeOutside, denoising, job
from vllm_h3_plugin.errors import BusyError, ServerError, ToolMissingError
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


def test_a_mute_server_may_hold_a_job(running: MadeOutside, verb: Verb) -> None:
    running.server.mute = True
    ended = verb("down", "--timeout", "30")
    assert ended.code == BusyError.exit_code and running.words == []


def test_without_its_key_nothing_is_stopped_unasked(running: MadeOutside, verb: Verb) -> None:
    running.server.info_status = 401
    ended = verb("down")
    assert ended.code == ServerError.exit_code and running.words == []
    assert "H3_API_KEY_FILE" in ended.err and "--now" in ended.err


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
