# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 up`` on machines and engines in every state: ready, or the cause and the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.conftest import Verb
from tests.kit.made_outside import GIB, LOADING, URL, Box, MadeOutside
from vllm_h3_plugin.errors import BusyError, CheckpointError, HostError, ServerError, SettingsError, ToolMissingError
from vllm_h3_plugin.kit import start
from vllm_h3_plugin.preflight import run
from vllm_h3_plugin.preflight.check import Unknown, failed, passed
from vllm_h3_plugin.preflight.machine import Ran

SHARD = "shard 3 of FL2VA ends early: 4 of 5 GiB. Copy it again."
OWN_ERROR = f"\x1b[0;36m(Worker)\x1b[0;0m ERROR [core.py:7] vllm_h3_plugin.errors.CheckpointError: {SHARD}"
WRAPPED = [
    OWN_ERROR,
    "RuntimeError: Orchestrator initialization failed",
    "error: the server ended with exit code 1 before it was ready",
    f"  why: {SHARD}",
    "  fix: See its log above the last error.",
]


def no_image() -> Ran:
    return Ran(1, "", "Error response from daemon: No such image: vllm-h3-plugin:nvidia\n")


def boxes(outside: MadeOutside, *made: Box, code: int = 0, said: str = "") -> Callable[[], Ran]:
    """What `compose up` leaves behind."""

    def up() -> Ran:
        outside.boxes = list(made)
        return Ran(code, "", said)

    return up


def test_up_waits_through_the_phases_until_the_server_is_ready(outside: MadeOutside, verb: Verb) -> None:
    def load() -> None:
        outside.boxes[-1].log = [LOADING]

    def warm() -> None:
        outside.boxes[-1].log = [LOADING, "INFO [pipeline.py:180] H3 loaded from checkpoint: 55.20 GiB read in 60 s"]

    outside.at(2, load)
    outside.at(4, warm)
    outside.at(70, outside.ready)
    ended = verb("up", "--json")
    assert ended.code == 0, ended.err
    phases = ["this machine is ready", "starting container", "starting the host", "loading transformer", "warm-up"]
    places = [ended.err.index(phase) for phase in phases]
    assert places == sorted(places)
    assert "12.30 of 45.00 GiB, 1.20 GiB/s, 27 s left" in ended.err
    assert ended.out.startswith(f"ready after 1 min 10 s: {URL}  plugin ")
    assert ended.answer == {
        "ok": True,
        "url": URL,
        "ready_s": 70.0,
        "already_running": False,
        "same_configuration": True,
        "plugin": outside.server.version,
        "recipe": "fp8",
    }


def test_a_failed_check_stops_before_anything_is_started(
    outside: MadeOutside, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = (
        passed("docker", "engine 28"),
        failed("port", "127.0.0.1:8000 cannot be listened on", "Stop what uses it"),
    )
    monkeypatch.setattr(run, "run_preflight", lambda survey, **options: run.Report(checks, {}))
    ended = verb("up")
    assert ended.code == 1 and outside.words == []
    assert "fail  port: 127.0.0.1:8000 cannot be listened on\n      fix: Stop what uses it" in ended.err
    assert "this machine is not ready: port" in ended.err and "vllm-h3 preflight" in ended.err


def test_the_checks_are_those_of_preflight(outside: MadeOutside, verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    from vllm_h3_plugin.cli import kit_shared

    monkeypatch.setattr(kit_shared, "this_outside", lambda: outside)
    outside.machine.environ = {}
    outside.machine.ports_taken = [8000]
    outside.machine.main_memory = outside.machine.main_memory.__class__(119 * GIB, 20 * GIB, 0, 0)
    ended = verb("up", "-C", str(outside.checkout))
    assert ended.code == 1 and outside.words == []
    last = next(line for line in ended.err.splitlines() if line.startswith("error: "))
    assert all(name in last for name in ("licence", "port", "memory"))


def test_a_check_service_that_fails_shows_its_cause_and_ends_with_its_code(outside: MadeOutside, verb: Verb) -> None:
    report = ["error: 1 fault in /checkpoint/FL2VA", "  why: shard 3 is one of 12 and not there", "  fix: Copy it."]
    check = Box("check", "exited", 3, health="", log=["noise"] * 400 + report)
    said = 'service "check" didn\'t complete successfully: exit 3\n'
    outside.on_up = boxes(outside, check, Box(status="created", health=""), code=1, said=said)
    ended = verb("up")
    assert ended.code == CheckpointError.exit_code
    assert "the check before the start failed, and nothing was started" in ended.err
    assert "shard 3 is one of 12 and not there" in ended.err and "fix: Copy it. `vllm-h3 logs`" in ended.err
    assert "noise" not in ended.err


def test_a_server_that_ends_while_it_loads_shows_the_plugins_own_error(outside: MadeOutside, verb: Verb) -> None:
    def die() -> None:
        outside.boxes[-1].status, outside.boxes[-1].exit_code = "exited", 7
        outside.boxes[-1].log = [LOADING, *WRAPPED]

    outside.at(6, die)
    ended = verb("up", "--json")
    assert ended.code == CheckpointError.exit_code
    assert "the server ended while it started" in ended.err and SHARD.rstrip(".") in ended.err
    assert "Orchestrator" not in ended.err
    assert ended.answer["error"]["type"] == "CheckpointError" and ended.answer["ok"] is False


def test_a_restart_loop_is_stopped_at_its_first_turn(outside: MadeOutside, verb: Verb) -> None:
    def again() -> None:
        outside.boxes[-1].restarts, outside.boxes[-1].log = 1, [*WRAPPED, LOADING]

    outside.at(4, again)
    ended = verb("up")
    assert ended.code == CheckpointError.exit_code
    assert "its restarts were stopped" in ended.err and SHARD.rstrip(".") in ended.err
    assert outside.words == ["up", "stop"]
    # What it said before its last start is the cause: the log is read from before it.
    assert "--since" not in next(argv for argv in reversed(outside.asked) if argv[1] == "logs")


def test_memory_limit_is_named_where_the_kernel_ended_it(outside: MadeOutside, verb: Verb) -> None:
    outside.on_up = boxes(outside, Box(status="exited", exit_code=137, oom=True, health=""))
    ended = verb("up")
    assert ended.code == ServerError.exit_code
    assert "more memory than its limit" in ended.err and "VLLM_H3_MEMORY_LIMIT" in ended.err


def test_an_unhealthy_server_is_named_with_the_remedy(outside: MadeOutside, verb: Verb) -> None:
    said = "error: stuck in building table\n  why: nothing has moved for 1900 s\n"
    outside.on_up = boxes(outside, Box(health="unhealthy", said=said))
    ended = verb("up")
    assert ended.code == ServerError.exit_code
    assert "vllm-h3-server-1 is unhealthy" in ended.err and "nothing has moved for 1900 s" in ended.err
    assert "does not restart it by itself" in ended.err and "vllm-h3 down --now" in ended.err


def test_a_timeout_says_where_it_is_and_leaves_it_running(outside: MadeOutside, verb: Verb) -> None:
    outside.on_up = boxes(outside, Box(log=[LOADING]))
    ended = verb("up", "--timeout", "30")
    assert ended.code == ServerError.exit_code
    assert "not ready after 30 s" in ended.err and "loading transformer, 12.30 of 45.00 GiB" in ended.err
    assert "left running" in ended.err and "vllm-h3 logs -f" in ended.err and "--timeout" in ended.err
    assert outside.words == ["up"]


def test_the_wait_is_as_long_as_the_profile_allows(
    outside: MadeOutside, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "LOOK_S", 300.0)
    ended = verb("up")
    assert "not ready after 1800 s" in ended.err and outside.monotonic() >= 1800


def test_a_running_server_of_this_configuration_is_success_without_a_check(
    outside: MadeOutside, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        run, "run_preflight", lambda survey, **options: pytest.fail("its own port would be found taken")
    )
    outside.boxes = [Box(restarts=2)]
    outside.ready()
    ended = verb("up", "--json")
    assert ended.code == 0 and outside.words == []
    assert "it runs with this configuration" in ended.err and ended.out.startswith("ready already running")
    assert ended.answer["already_running"] is True and ended.answer["same_configuration"] is True


def test_a_server_of_another_configuration_is_left_alone(outside: MadeOutside, verb: Verb) -> None:
    outside.boxes = [Box()]
    outside.ready()
    outside.dry_run = Ran(0, "", " DRY-RUN MODE -  Container vllm-h3-server-1  Recreate\n")
    ended = verb("up")
    assert ended.code == BusyError.exit_code and outside.words == []
    assert "runs with another configuration" in ended.err and "vllm-h3 down" in ended.err


def test_an_old_compose_that_cannot_compare_is_said_to(outside: MadeOutside, verb: Verb) -> None:
    outside.boxes = [Box()]
    outside.ready()
    outside.dry_run = Ran(16, "", "unknown flag: --dry-run")
    ended = verb("up", "--json")
    assert ended.code == 0 and "could not be compared" in ended.err
    assert ended.answer["same_configuration"] is None


def test_containers_of_another_checkout_are_never_taken_over(outside: MadeOutside, verb: Verb) -> None:
    outside.boxes = [Box(files="/srv/old place/compose.yaml")]
    outside.machine.files["/srv/old place/compose.yaml"] = b""
    for name in ("up", "down"):
        ended = verb(name)
        assert ended.code == BusyError.exit_code and outside.words == []
        assert "made from /srv/old place/compose.yaml" in ended.err
        assert "`vllm-h3 down --directory '/srv/old place'`" in ended.err


def test_the_remedy_for_a_checkout_that_was_moved_needs_no_folder(outside: MadeOutside, verb: Verb) -> None:
    outside.boxes = [Box(files="/srv/gone/compose.yaml")]
    ended = verb("up")
    assert ended.code == BusyError.exit_code and "--directory" not in ended.err
    assert "That checkout is gone" in ended.err and "`docker compose --project-name vllm-h3 down`" in ended.err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Unknown("docker is not installed, or not on PATH"), ["not installed", "Install Docker Engine", "--engine"]),
        (Ran(1, "", "permission denied while trying to connect to the Docker daemon socket"), ["usermod -aG docker"]),
        (Ran(1, "", "Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?"), ["systemctl"]),
    ],
    ids=["missing", "no rights", "not running"],
)
@pytest.mark.parametrize("name", ["up", "down", "logs"])
def test_an_engine_that_cannot_be_used_is_named_with_the_way_out(
    outside: MadeOutside, verb: Verb, name: str, answer: Ran | Unknown, words: list[str]
) -> None:
    outside.refuses["docker ps"] = answer
    ended = verb(name)
    assert ended.code == ToolMissingError.exit_code
    for word in words:
        assert word in ended.err


@pytest.mark.parametrize(
    "said",
    [
        "docker: unknown command: docker compose\n\nRun 'docker --help' for more information\n",
        "docker: 'compose' is not a docker command.\nSee 'docker --help'\n",
        "unknown shorthand flag: 'f' in -f\nSee 'docker --help'.\n",
    ],
)
def test_a_missing_compose_plugin_is_named(outside: MadeOutside, verb: Verb, said: str) -> None:
    outside.on_up = lambda: Ran(1, "", said)
    ended = verb("up")
    assert ended.code == ToolMissingError.exit_code
    assert "docker-compose-plugin" in ended.err


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        (no_image().stderr, ServerError.exit_code, ["image is not on this machine", "make build"]),
        (
            "error while interpolating x: required variable VLLM_H3_CHECKPOINT is missing a value: name it in .env\n",
            SettingsError.exit_code,
            ["VLLM_H3_CHECKPOINT has no value", "name it in .env"],
        ),
        ("something else went wrong\n", ServerError.exit_code, ["something else went wrong", "vllm-h3 preflight"]),
    ],
)
def test_what_compose_refuses_is_said_in_a_sentence(
    outside: MadeOutside, verb: Verb, said: str, code: int, words: list[str]
) -> None:
    outside.on_up = lambda: Ran(1, "", said)
    ended = verb("up")
    assert ended.code == code
    for word in words:
        assert word in ended.err


def test_what_the_engine_says_of_a_container_that_it_could_not_start(outside: MadeOutside, verb: Verb) -> None:
    error = 'could not select device driver "nvidia" with capabilities: [[gpu]]'
    outside.on_up = boxes(outside, Box(status="created", error=error, health=""), code=1, said="Error response\n")
    ended = verb("up")
    assert ended.code == ServerError.exit_code and error in ended.err


def test_a_server_without_this_plugin_is_refused(outside: MadeOutside, verb: Verb) -> None:
    outside.server.version = "0.0.0"
    outside.at(2, outside.ready)
    ended = verb("up")
    assert ended.code == HostError.exit_code and "without this plugin" in ended.err


def test_a_server_whose_key_is_unknown_is_ready_all_the_same(outside: MadeOutside, verb: Verb) -> None:
    outside.server.info_status = 401
    outside.at(2, outside.ready)
    ended = verb("up")
    assert ended.code == 0 and "asks for a key that is not known here" in ended.err


def test_the_key_is_read_from_the_file_that_dotenv_names(outside: MadeOutside, verb: Verb, checkout: Path) -> None:
    (checkout / "a key").write_text("s3cret\n")
    (checkout / ".env").write_text("VLLM_H3_API_KEY_FILE=./a key\n")
    outside.at(2, outside.ready)
    ended = verb("up")
    assert ended.code == 0 and outside.keys[-1] == "s3cret"
    assert "s3cret" not in ended.out + ended.err


def test_ctrl_c_leaves_the_container_and_says_how_to_go_on(outside: MadeOutside, verb: Verb) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    outside.at(4, interrupt)
    ended = verb("up")
    assert ended.code == 130 and outside.words == ["up"]
    assert "left as it is" in ended.err and "vllm-h3 logs -f" in ended.err and "vllm-h3 down" in ended.err


def test_ascend_has_its_own_file_and_role(
    outside: MadeOutside, verb: Verb, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_h3_plugin.cli import up

    wanted = up._wanted
    monkeypatch.setattr(up, "_wanted", lambda world, project: wanted(world, project.__class__("x", project.file)))
    file = str(checkout / "compose.ascend.yaml")
    made = Box("server-4", project="vllm-h3-ascend", files=file)
    outside.on_up = boxes(outside, Box("check-4", "exited", project="vllm-h3-ascend", files=file), made)
    outside.at(2, outside.ready)
    ended = verb("up", "--cards", "4")
    assert ended.code == 0, ended.err
    argv = next(argv for argv in outside.asked if argv[1] == "compose")
    assert argv[2:8] == ("--project-name", "vllm-h3-ascend", "--file", file, "--profile", "cards-4")


@pytest.mark.parametrize(
    ("cards", "env", "profile"),
    [
        (2, "", "ascend-2"),
        (2, "ASCEND_2_PROFILE=ascend-2-resident", "ascend-2-resident"),
        (4, "ASCEND_2_PROFILE=ascend-2-resident", "ascend-4"),
        (None, "ASCEND_2_PROFILE=ascend-2-resident", "spark"),
    ],
)
def test_the_machine_is_checked_for_the_role_that_compose_starts(
    outside: MadeOutside, checkout: Path, cards: int | None, env: str, profile: str
) -> None:
    from vllm_h3_plugin.cli import up
    from vllm_h3_plugin.kit.project import open_project

    (checkout / ".env").write_text(f"{env}\n")
    project = open_project(outside, checkout, cards=cards, engine="docker")
    assert up._wanted(outside, project).expected.profile == profile


def test_a_role_that_does_not_exist_is_refused(outside: MadeOutside, verb: Verb) -> None:
    ended = verb("up", "--cards", "3")
    assert ended.code == 2 and "1, 2 and 4 cards" in ended.err


def test_a_folder_without_compose_file_is_named(outside: MadeOutside, verb: Verb, tmp_path: Path) -> None:
    ended = verb("up", "-C", str(tmp_path))
    assert ended.code == 2
    assert f"no compose.yaml in {tmp_path}" in ended.err and "--directory" in ended.err


def test_remedies_carry_the_flags_that_were_given(outside: MadeOutside, verb: Verb, checkout: Path) -> None:
    outside.boxes = [Box()]
    outside.dry_run = Ran(0, "", "Container vllm-h3-server-1  Recreate\n")
    ended = verb("up", "-C", str(checkout), "--engine", "podman")
    assert f"vllm-h3 down --engine podman --directory '{checkout}'" in ended.err
