# SPDX-License-Identifier: Apache-2.0
"""State of tile-parallel decoding, which the host fills in (vLLM-Omni: `set_parallel_size`)."""

_STATE: dict = {}


def get_parallel_state():
    """The one mutable state of this process."""
    return _STATE
