# SPDX-License-Identifier: Apache-2.0
"""What every verb prints with: results on stdout, progress and errors on stderr, one JSON line for ``--json``."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from vllm_h3_plugin.errors import H3Error

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


def report_error(exc: H3Error, *, as_json: bool) -> None:
    """Say what happened, why, and what to do: on stderr, and as the JSON line when asked."""
    if as_json:
        emit_json(False, error=exc.as_dict())
    print(exc.report(), file=sys.stderr)
