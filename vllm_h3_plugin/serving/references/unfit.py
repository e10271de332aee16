# SPDX-License-Identifier: Apache-2.0
"""A reference that cannot be taken."""

from __future__ import annotations


class Unfit(Exception):
    """Raised while one reference is loaded; :func:`.load.load` names the field and makes a fault of it.

    Attributes:
        why: the reason, a clause without a full stop.
        allowed: what would be taken, in words.
    """

    def __init__(self, why: str, allowed: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.allowed = allowed
