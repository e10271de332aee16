# SPDX-License-Identifier: Apache-2.0
"""What a start on several machines waits for, and what a rank that is killed leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_h3_plugin.errors import ServerError
from vllm_h3_plugin.host.cluster import nodes, rank
from vllm_h3_plugin.serving.server import free_port


def test_a_head_that_is_not_there_is_given_up_in_time_by_its_address() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ServerError, match=f"there is no Ray cluster at {address}") as refused:
        nodes.connect(address, 1)
    assert "for 1 s" in refused.value.why


def test_run_folders_of_ranks_that_are_gone_go_and_others_stay(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone, foreign = tmp_path / f"vllm-h3-rank-{ended.pid}-a", tmp_path / "vllm-h3-rank-other"
    gone.mkdir()
    (gone / "worker-1.json").touch()
    foreign.mkdir()
    own = Path(rank.own_run_dir(tmp_path))
    second = Path(rank.own_run_dir(tmp_path))
    assert not gone.exists() and foreign.exists() and own.exists() and second != own
    assert own.name.startswith(f"vllm-h3-rank-{os.getpid()}-")
