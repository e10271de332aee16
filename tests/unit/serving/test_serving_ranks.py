# SPDX-License-Identifier: Apache-2.0
"""A server that loses one of its ranks is ended, with the rank in the message; one that ends by itself is not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from vllm_h3_plugin.errors import ServerError
from vllm_h3_plugin.serving.ranks import wait_with_ranks

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


class Process(subprocess.Popen):
    """A process with the server's names."""


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started = [Process(SLEEP) for _ in range(3)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def workers(processes: list[Process]) -> list[dict]:
    return [{"rank": rank, "pid": process.pid} for rank, process in enumerate(processes)]


def test_a_rank_that_was_killed_ends_the_wait_and_is_named(processes: list[Process]) -> None:
    server, *ranks = processes
    ranks[1].kill()
    said: list[str] = []
    with pytest.raises(ServerError, match=rf"rank 1 \(pid {ranks[1].pid}\) ended while the server") as caught:
        wait_with_ranks(server, workers(ranks), grace_s=0.2, say=said.append)
    assert caught.value.details["ranks"] == [1] and "dmesg" in caught.value.fix and "503" in caught.value.why
    assert said and "rank 1" in said[0]


def test_a_server_that_ends_by_itself_has_its_own_exit_code(processes: list[Process]) -> None:
    server, *ranks = processes
    server.kill()
    assert wait_with_ranks(server, workers(ranks)) == -9


def test_a_worker_in_the_servers_own_process_is_not_watched(processes: list[Process]) -> None:
    server = processes[0]
    server.terminate()
    assert wait_with_ranks(server, [{"rank": 0, "pid": server.pid}]) == -15
