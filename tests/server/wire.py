# SPDX-License-Identifier: Apache-2.0
"""Bytes that Ulysses exchanges: those that ranks handed over, and those that its formula asks for."""

from __future__ import annotations

import json
import os
from pathlib import Path

from vllm_h3_plugin.checkpoint.configs import DitConfig

_COUNTER = Path(__file__).parent / "wire_count"
_BF16 = 2


def counting(folder: Path) -> dict[str, str]:
    """Variables of a process that counts into a folder."""
    paths = [str(_COUNTER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "COUNT_WIRE": str(folder)}


def counted(folder: Path, pid: int) -> int:
    """Bytes that a process has handed to ``all_to_all`` so far."""
    path = folder / f"{pid}.json"
    return json.loads(path.read_text())["bytes"] if path.exists() else 0


def needed(dit: DitConfig, tokens: int, ranks: int) -> int:
    """Bytes that a rank has to hand over in a step: its rows of q, k and v in each block, and what attention gives."""
    rows = -(-tokens // ranks)
    return dit.num_layers * 4 * rows * dit.num_attention_heads * dit.attention_head_dim * _BF16
