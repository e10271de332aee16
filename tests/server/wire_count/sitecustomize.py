# SPDX-License-Identifier: Apache-2.0
"""Counts what a process hands to ``all_to_all``, where PYTHONPATH names this folder and COUNT_WIRE one for the counts.

Ranks are processes of Ray's, which nobody can reach into from a test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("COUNT_WIRE")
WATCHED = ("all_to_all_single", "all_to_all")


class Finder:
    """Lets ``torch.distributed`` be imported as ever, and wraps its exchanges then."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """None for all other modules."""
        if name != "torch.distributed":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for watched in WATCHED:
                _wrap(module, watched)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_counts = {"calls": 0, "bytes": 0}


def _wrap(module: Any, name: str) -> None:
    exchange = getattr(module, name, None)
    if exchange is None:
        return

    def counted(output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = input if isinstance(input, (list, tuple)) else [input]
        _counts["calls"] += 1
        _counts["bytes"] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        path = Path(str(FOLDER)) / f"{os.getpid()}.json"
        path.with_suffix(".part").write_text(json.dumps(_counts))
        path.with_suffix(".part").replace(path)
        return exchange(output, input, *args, **kwargs)

    setattr(module, name, counted)


if FOLDER:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
