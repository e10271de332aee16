# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 logs``: what a person wants to read, and the cause alone."""

from __future__ import annotations

import pytest

from tests.kit.conftest import Verb
from tests.kit.made_outside import LOADING, Box, MadeOutside
from vllm_h3_plugin.errors import BusyError, CheckpointError, ServerError, SettingsError
from vllm_h3_plugin.kit.log import readable, start_phase
from vllm_h3_plugin.serving.log_cause import class_of_exit_code, find_cause

POLLS = [
    '(APIServer pid=2) INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 200 OK',
    '(APIServer pid=2) INFO:     127.0.0.1:5 - "GET /v1/h3/info HTTP/1.1" 200 OK',
    '(APIServer pid=2) INFO:     127.0.0.1:5 - "GET /v1/videos/video_gen_1 HTTP/1.1" 200 OK',
    "",
    "   ",
]
KEPT = [
    '(APIServer pid=2) INFO:     127.0.0.1:5 - "POST /v1/videos HTTP/1.1" 200 OK',
    '(APIServer pid=2) INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 503 Service Unavailable',
]


def test_polls_colours_and_empty_lines_are_left_out_and_failures_kept() -> None:
    shown = list(readable([LOADING, *POLLS, *KEPT, " 10%|#   \r 100%|####"]))
    assert shown == [LOADING.replace("\x1b[0;36m", "").replace("\x1b[0;0m", ""), *KEPT, " 100%|####"]


def test_what_a_terminal_would_obey_is_left_out(outside: MadeOutside, verb: Verb) -> None:
    outside.boxes = [Box(log=["one\x1b]0;title\x07 \x9b2Jtwo\x08\r", "error: \x1b[2Jbad\x1b]52;c;aGk=\x1b\\"])]
    assert verb("logs").out == "one two\nerror: bad\n" == verb("logs", "-f").out
    assert verb("logs", "--errors").out == "vllm-h3-server-1: bad\n"


def test_the_last_lines_are_shown_after_the_noise_is_gone(outside: MadeOutside, verb: Verb) -> None:
    outside.boxes = [Box(log=[*KEPT, *POLLS * 20])]
    ended = verb("logs", "--lines", "2", "--json")
    assert ended.code == 0 and ended.out.splitlines()[:2] == KEPT
    assert ended.answer == {"ok": True, "container": "vllm-h3-server-1", "lines": KEPT}


def test_errors_prints_the_cause_and_nothing_else(outside: MadeOutside, verb: Verb) -> None:
    report = ["error: 1 fault in /checkpoint/FL2VA", "  why: shard 3 is not there", "  fix: Copy it."]
    outside.boxes = [
        Box("check", "exited", 3, health="", log=[*KEPT, *report]),
        Box(status="created", health="", log=["other"]),
    ]
    ended = verb("logs", "--errors")
    assert ended.code == 0
    assert ended.out == "vllm-h3-check-1: 1 fault in /checkpoint/FL2VA\n  why: shard 3 is not there\n  fix: Copy it.\n"


def test_errors_says_when_there_is_none(outside: MadeOutside, verb: Verb) -> None:
    outside.boxes = [Box(log=KEPT)]
    ended = verb("logs", "--errors", "--json")
    assert ended.code == 0 and ended.answer["errors"] == "vllm-h3-server-1: no error in its log"


def test_following_asks_the_engine_to_follow(outside: MadeOutside, verb: Verb) -> None:
    outside.boxes = [Box(log=[*KEPT, *POLLS])]
    ended = verb("logs", "-f", "-n", "7")
    assert ended.code == 0 and ended.out.splitlines() == KEPT
    assert outside.asked[-1] == ("docker", "logs", "--follow", "--tail", "7", "id-server")


def test_following_goes_with_no_json(outside: MadeOutside, verb: Verb) -> None:
    ended = verb("logs", "-f", "--json")
    assert ended.code == 2 and "Leave --follow out" in ended.err


def test_no_container_is_said_so(outside: MadeOutside, verb: Verb) -> None:
    ended = verb("logs")
    assert ended.code == ServerError.exit_code and "vllm-h3 up" in ended.err and "project vllm-h3" in ended.err


@pytest.mark.parametrize(
    ("lines", "what", "kind"),
    [
        (
            [
                "x vllm_h3_plugin.errors.BusyError: an old one",
                "y vllm_h3_plugin.errors.CheckpointError: shard x. Copy it.",
            ],
            "shard x. Copy it.",
            CheckpointError,
        ),
        (
            [
                "error: H3_RECIPE=f8",
                "  why: no such recipe",
                "  fix: Did you mean fp8?",
                "error: the server ended with exit code 2 before it was ready",
                "  why:   fix: Did you mean fp8?",
            ],
            "H3_RECIPE=f8",
            None,
        ),
        (
            ["error: the server was killed by SIGKILL before it was ready", "  why: torch.OutOfMemoryError: CUDA"],
            "torch.OutOfMemoryError: CUDA",
            None,
        ),
        (["INFO fine", "RuntimeError: first", "ValueError: second"], "RuntimeError: first", None),
    ],
    ids=["own exception", "report within", "wrapper alone", "any"],
)
def test_the_most_telling_error_is_the_cause(lines: list[str], what: str, kind: type | None) -> None:
    cause = find_cause(lines)
    assert cause is not None and (cause.what, cause.kind) == (what, kind)


def test_a_log_without_error_has_no_cause() -> None:
    assert find_cause(KEPT) is None and find_cause([]) is None


def test_exit_codes_lead_back_to_the_tree() -> None:
    assert class_of_exit_code(3) is CheckpointError and class_of_exit_code(10) is BusyError
    assert class_of_exit_code(2) is not SettingsError and class_of_exit_code(137) is None


@pytest.mark.parametrize(
    ("lines", "phase"),
    [
        ([], ("starting the host", "")),
        ([LOADING], ("loading transformer", "12.30 of 45.00 GiB, 1.20 GiB/s, 27 s left")),
        (
            ["[progress.py:90] AdaLN table of transformer: 0.10 of 0.20 GiB, 1.00 GiB/s, 1 s left"],
            ("AdaLN table of transformer", "0.10 of 0.20 GiB, 1.00 GiB/s, 1 s left"),
        ),
        ([LOADING, "INFO [pipeline.py:180] H3 loaded from snapshot: 45.00 GiB read in 40 s"], ("warm-up", "")),
        ([LOADING, "INFO [step.py:60] H3 transformer: one small step to load its kernels took 3 s"], ("warm-up", "")),
        ([LOADING, "INFO:     Application startup complete."], ("answering", "")),
    ],
)
def test_the_phase_of_a_start_is_read_from_its_log(lines: list[str], phase: tuple[str, str]) -> None:
    assert start_phase(lines) == phase
