# SPDX-License-Identifier: Apache-2.0
"""What every verb prints with: results on stdout, progress and errors on stderr, one JSON line for ``--json``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def stdout() -> Console:
    """Console for results."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def stderr() -> Console:
    """Console for progress and notes; keeps stdout clean for pipes."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def emit_json(ok: bool, **fields: Any) -> None:
    """Print the one JSON line that ends a verb run with ``--json``."""
    print(json.dumps({"ok": ok, **fields}, ensure_ascii=False, default=str), flush=True)
