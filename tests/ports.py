# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that need seconds or minutes until they listen."""

from __future__ import annotations

import random

from vllm_h3_plugin.errors import ServerError
from vllm_h3_plugin.serving.server import check_port_free

_FIRST, _LAST = 20_000, 32_000
"""Below those that Linux gives to whoever asks for any: what connects or listens meanwhile cannot get one of these."""
_TRIES = 100
_given: set[int] = set()


def own_port(address: str = "127.0.0.1") -> int:
    """A TCP port that is free now and that nobody gets by chance until it is used. Each is given once."""
    for _ in range(_TRIES):
        port = random.randrange(_FIRST, _LAST)
        if port in _given:
            continue
        try:
            check_port_free(address, port)
        except ServerError:
            continue
        _given.add(port)
        return port
    raise AssertionError(f"no port from {_FIRST} to {_LAST} is free on {address}")
