# SPDX-License-Identifier: Apache-2.0
"""The host, imported once: the fork server of forked.py loads this module and forks the tests' servers from it.

It holds what the stock host imports too, and the reference platform, which is found while vLLM is imported. Plugins are
found and registered in each server after the fork, by the code that does it in production.
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

for _name in [name for name in os.environ if name.startswith("H3_")]:
    del os.environ[_name]  # each server has its own
os.environ["H3_REFERENCE"] = "1"
os.environ["VLLM_PLUGINS"] = "h3_reference"

import vllm.plugins  # noqa: E402
import vllm_omni.diffusion.models.minimax_h3  # noqa: E402
import vllm_omni.entrypoints.cli.main  # noqa: E402
import vllm_omni.plugins  # noqa: E402

gc.freeze()  # a collection in one server would copy the pages that it shares with all others

_PR_SET_PDEATHSIG = 1
_OURS_BEFORE_THE_FORK = "vllm_h3_plugin.host.reference"


def run(argv: Sequence[str], environment: Mapping[str, str], output: Connection) -> None:
    """Become ``python -m MODULE ARGUMENTS`` in a session of its own, which ends when the fork server does.

    Args:
        argv: interpreter, ``-m``, module, arguments.
        environment: all variables of the process.
        output: takes stdout and stderr.

    Raises:
        RuntimeError: the fork server did more than import the host: this server would prove nothing.
    """
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    ours = [
        name
        for name in sys.modules
        if name.startswith("vllm_h3_plugin.host.") and not name.startswith(_OURS_BEFORE_THE_FORK)
    ]
    if ours or vllm.plugins.plugins_loaded or vllm_omni.plugins.omni_plugins_loaded:
        raise RuntimeError(f"plugins were loaded before the fork: {ours}")
    os.environ.clear()
    os.environ.update(environment)
    _, _, module, *arguments = argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
