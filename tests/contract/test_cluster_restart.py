# SPDX-License-Identifier: Apache-2.0
"""Ranks that do not start again, whatever the reason: who waits is answered. No Ray cluster is needed."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm.v1.engine.exceptions import EngineDeadError

pytest.importorskip("ray", reason="Ray is not installed")

from vllm_h3_plugin.errors import ServerError
from vllm_h3_plugin.host.cluster.executor import RayDiffusionExecutor
from vllm_h3_plugin.host.cluster.group import LostError
from vllm_h3_plugin.host.cluster.nodes import connect
from vllm_h3_plugin.host.cluster.rank import own_run_dir


class Lost:
    """A group whose first rank has ended."""

    members = (0, 1)
    ended = False
    fault: Exception = LostError("rank 1 on node 192.0.2.2 (pid 7) ended while the server was running")

    def call(self, *args: Any, **kwargs: Any) -> list[Any]:
        self.seconds = kwargs["seconds"]
        raise self.fault

    def end(self) -> None:
        self.ended = True


class Restart:
    """Stands for a start that waits until it is told how to end."""

    def __init__(self, fault: Exception) -> None:
        self.fault = fault
        self.go = threading.Event()

    def again(self) -> Any:
        self.go.wait(180)
        raise self.fault


@pytest.fixture
def executor_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("H3_RUN_DIR", str(tmp_path))

    def make(fault: Exception) -> RayDiffusionExecutor:
        made: Any = object.__new__(RayDiffusionExecutor)
        made._closed = made._is_failed = False
        made._failure_callbacks = []
        made._lock, made._ready, made._fault = threading.Lock(), threading.Event(), None
        made._restarts, made._start, made._group = True, Restart(fault), Lost()
        made._ready.set()
        return made

    return make


@pytest.mark.parametrize("fault", [OSError("no space"), ValueError("odd"), ServerError("a node is missing")])
def test_a_restart_that_fails_answers_who_waits_and_the_host(executor_of: Any, fault: Exception) -> None:
    executor, told = executor_of(fault), []
    executor.register_failure_callback(lambda: told.append(True))
    with pytest.raises(LostError, match=r"rank 1 on node 192\.0\.2\.2"):
        executor.collective_rpc("execute_model", unique_reply_rank=0, exec_all_ranks=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(executor.collective_rpc, "execute_model", 60.0)
        executor._start.go.set()
        with pytest.raises(EngineDeadError):
            waiting.result(30)
    assert told == [True] and executor.is_dead
    with pytest.raises(EngineDeadError):
        executor.check_health()


def test_a_request_that_takes_too_long_costs_its_ranks_and_a_question_does_not(
    executor_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_OMNI_DLO_DP_WAVE_TIMEOUT", "90")
    executor = executor_of(OSError("no space"))
    group = executor._group
    group.fault = TimeoutError("rank 1 on node 192.0.2.2 (pid 7) took longer than 90 s for execute_model")
    with pytest.raises(TimeoutError):
        executor.collective_rpc("get_kv_cache_specs", timeout=5)
    assert (group.seconds, group.ended, executor.is_dead) == (5, False, False)
    with pytest.raises(LostError, match=r"rank 1 on node 192\.0\.2\.2 .* longer than 90 s"):
        executor.collective_rpc("execute_model", unique_reply_rank=0, exec_all_ranks=True)
    assert (group.seconds, group.ended) == (90.0, True)
    executor._start.go.set()


def test_a_call_does_not_wait_for_ranks_longer_than_it_may_take(executor_of: Any) -> None:
    executor = executor_of(OSError("no space"))
    with pytest.raises(LostError):
        executor.collective_rpc("execute_model")
    with pytest.raises(TimeoutError, match="have not started again"):
        executor.collective_rpc("execute_model", timeout=0.1)
    executor._start.go.set()


def test_a_closed_port_is_given_up_in_time_and_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(ServerError, match=f"no Ray cluster at {address}"):
            connect(address, 1.0)
    assert time.monotonic() - begun < 30, "Ray itself would have tried for minutes"


def test_run_folders_of_ranks_that_are_gone_go(tmp_path: Path) -> None:
    gone = next(pid for pid in range(2**22 - 1, 0, -1) if not psutil.pid_exists(pid))
    (tmp_path / f"vllm-h3-rank-{gone}-abc").mkdir()
    (tmp_path / "vllm-h3-rank-1-abc").mkdir()
    (tmp_path / "vllm-h3-rank-notes").mkdir()
    made = Path(own_run_dir(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"vllm-h3-rank-1-abc", "vllm-h3-rank-notes", made.name}
