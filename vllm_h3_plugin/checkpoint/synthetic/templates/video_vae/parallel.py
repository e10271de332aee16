# SPDX-License-Identifier: Apache-2.0
"""State of tile-parallel decoding, which the host fills in; the synthetic VAE has one tile and ignores it."""

_STATE: dict = {}


def get_parallel_state():
    """The one mutable state of this process."""
    return _STATE
