# SPDX-License-Identifier: Apache-2.0
"""What the executor tells the API process: that ranks are lost, also while they start again."""

from __future__ import annotations

from vllm_h3_plugin.host import run_state

_FILE = "cluster.json"


def tell(fault: str | None) -> None:
    """Say what is wrong; None: nothing."""
    run_state.write(_FILE, {"fault": fault})


def told() -> str | None:
    """What is wrong with the ranks on other machines; None where nothing is, or where there are none."""
    state = run_state.read(_FILE)
    return None if state is None else state["fault"]
