# SPDX-License-Identifier: Apache-2.0
"""The measurement of a LoRA's cost runs, switches the adapter between turns, and notices one without effect."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vllm_h3_plugin.checkpoint.synthetic import tiny_dit
from vllm_h3_plugin.errors import H3Error
from vllm_h3_plugin.host.bench import lora
from vllm_h3_plugin.memory.requests import RequestSize

CONFIG = tiny_dit(layers=2, refiner_layers=1, hidden=128, heads=4, head_dim=32, ffn=256)
SIZE = RequestSize(64, 64, 22)


def test_both_turns_are_timed(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[bool] = []
    switch = lora.Switch.__call__
    monkeypatch.setattr(lora.Switch, "__call__", lambda self, on: (switched.append(on), switch(self, on)))
    found = lora.measure_overhead(CONFIG, SIZE, device, tmp_path, rounds=3)
    assert found.layers == 2 and found.tokens == SIZE.tokens
    assert found.without_ms > 0 and found.with_ms > 0
    assert found.share == pytest.approx(found.with_ms / found.without_ms - 1)
    assert switched[:2] == [False, True] and switched[2:].count(True) == switched[2:].count(False) == 4


def test_an_adapter_without_effect_is_no_measurement(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora.Switch, "__call__", lambda self, on: None)
    with pytest.raises(H3Error, match="changed nothing"):
        lora.measure_overhead(CONFIG, SIZE, device, tmp_path, rounds=1)
