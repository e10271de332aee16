# SPDX-License-Identifier: Apache-2.0
"""What the executor tells the API process: that ranks are lost, also while they start again."""

from __future__ import annotations

import time

from vllm_h3_plugin.host import run_state

_FILE = "cluster.json"


def tell(fault: str | None) -> None:
    """Say what is wrong; None: nothing."""
    run_state.write(_FILE, {"fault": fault})


def announce_idle() -> None:
    """Nothing runs any more: what rank 0 announced last would be a request that never moves."""
    from vllm_h3_plugin.host.progress import IDLE, State

    now = time.time()
    run_state.write(run_state.PROGRESS, State(IDLE, 0, None, now, now, None).as_dict())


def told() -> str | None:
    """What is wrong with the ranks on other machines; None where nothing is, or where there are none."""
    state = run_state.read(_FILE)
    return None if state is None else state["fault"]
