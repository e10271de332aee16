# SPDX-License-Identifier: Apache-2.0
"""Shared pieces of the quantization tests: models as lists of layers, recipes as files, random weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_h3_plugin.checkpoint.layout import DitConfig, LinearSpec, TextEncoderConfig, VisionConfig, linear_layers

TINY_DIT = DitConfig(
    num_layers=2,
    token_refiner_num_layers=1,
    hidden_size=64,
    num_attention_heads=4,
    attention_head_dim=16,
    ffn_hidden_size=128,
    timestep_input_dim=32,
    time_embed_hidden_size=64,
    time_embed_dim=32,
    adaln_out_features=18 * 64,
    final_adaln_out_features=2 * 64,
    rope_inv_freq_len=2,
)
TINY_TEXT = TextEncoderConfig(
    vocab_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    intermediate_size=32,
    vision=VisionConfig(depth=1, hidden_size=32, num_heads=2, intermediate_size=64, deepstack_visual_indexes=(0,)),
)


@pytest.fixture
def tiny_configs() -> tuple[DitConfig, TextEncoderConfig]:
    """A two-block model."""
    return TINY_DIT, TINY_TEXT


@pytest.fixture
def tiny() -> tuple[LinearSpec, ...]:
    """Linear layers of a two-block model."""
    return linear_layers(TINY_DIT, TINY_TEXT)


@pytest.fixture
def real() -> tuple[LinearSpec, ...]:
    """Linear layers of the real model."""
    return linear_layers(DitConfig(), TextEncoderConfig())


@pytest.fixture
def recipe_dict() -> dict[str, Any]:
    """The default recipe as a dictionary of the test's own, to be changed and written."""
    from vllm_h3_plugin.data import data_path

    return copy.deepcopy(json.loads((data_path("quant") / "fp8.json").read_text()))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[dict[str, Any] | str], Path]:
    """Write a recipe, as a dictionary or as text, and return its path."""

    def _write(content: dict[str, Any] | str) -> Path:
        path = tmp_path / "mine.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return _write
