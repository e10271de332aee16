# SPDX-License-Identifier: Apache-2.0
"""Collectives stay out of compiled and captured regions: nothing that ranks share is compiled or captured."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vllm_h3_plugin.host
from vllm_h3_plugin.errors import SettingsError
from vllm_h3_plugin.host import step
from vllm_h3_plugin.settings import Settings

HOST = Path(vllm_h3_plugin.host.__file__).parent


def test_blocks_of_several_ranks_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(compile=True)
    assert step.Step.of(SimpleNamespace(), None, settings).compiled
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(SettingsError, match="H3_COMPILE=1 with 2 ranks"):
        step.Step.of(SimpleNamespace(), None, settings)
    # As they are without it: the plugin's kernels between the exchanges, each compiled by itself.
    assert not step.Step.of(SimpleNamespace(), None, Settings()).compiled


def test_nothing_else_in_a_server_compiles_or_captures() -> None:
    words = re.compile(r"regionally_compile\(|torch\.compile\(|CUDAGraph\(|cuda\.graph\(|NPUGraph\(")
    found = {
        path.relative_to(HOST).as_posix()
        for path in HOST.rglob("*.py")
        if path.parent.name != "bench" and words.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"step.py"}
