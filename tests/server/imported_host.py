# SPDX-License-Identifier: Apache-2.0
"""The host, imported once: the fork server of forked.py loads this module and forks the tests' servers from it.

It holds what the stock host imports too, and the reference platform, which is found while vLLM is imported. Plugins are
found and registered in each server after the fork, by the code that does it in production.
"""

from __future__ import annotations

import gc
import os
import sys

for _name in [name for name in os.environ if name.startswith("H3_")]:
    del os.environ[_name]  # each server has its own
os.environ["H3_REFERENCE"] = "1"
os.environ["VLLM_PLUGINS"] = "h3_reference"

import vllm.plugins  # noqa: E402
import vllm_omni.diffusion.models.minimax_h3  # noqa: E402
import vllm_omni.entrypoints.cli.main  # noqa: E402
import vllm_omni.plugins  # noqa: E402

gc.freeze()  # a collection in one server would copy the pages that it shares with all others

_OURS_BEFORE_THE_FORK = "vllm_h3_plugin.host.reference"


def require_no_plugin() -> None:
    """
    Raises:
        RuntimeError: more than the host was imported before the fork: a server would prove nothing.
    """
    ours = [
        name
        for name in sys.modules
        if name.startswith("vllm_h3_plugin.host.") and not name.startswith(_OURS_BEFORE_THE_FORK)
    ]
    if ours or vllm.plugins.plugins_loaded or vllm_omni.plugins.omni_plugins_loaded:
        raise RuntimeError(f"plugins were loaded before the fork: {ours}")
