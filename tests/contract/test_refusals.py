# SPDX-License-Identifier: Apache-2.0
"""What the host would do inside its own loader is refused by name where this plugin's loader takes its place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.host.pipeline import refuse_what_the_loader_skips
from vllm_h3_plugin.host.session import requested_method


def _pipeline(**attributes: object) -> SimpleNamespace:
    return SimpleNamespace(**{"_dit_modules": ["transformer"], "transformer": SimpleNamespace(), **attributes})


def test_a_plain_pipeline_passes() -> None:
    refuse_what_the_loader_skips(_pipeline(_fasth3=None))


def test_a_fasth3_adapter_is_refused() -> None:
    with pytest.raises(UsageError, match="Turbo LoRA") as caught:
        refuse_what_the_loader_skips(_pipeline(_fasth3=object()))
    assert "--lora-path" in caught.value.what


def test_an_adaln_sidecar_is_refused() -> None:
    sidecar = SimpleNamespace(_adaln_sidecar_candidate=object())
    with pytest.raises(UsageError, match="minimax_h3_adaln_cache_path"):
        refuse_what_the_loader_skips(_pipeline(transformer=sidecar))


def test_a_component_quantization_config_is_refused_with_the_recipe_to_use() -> None:
    with pytest.raises(UsageError, match="fp8-text-bf16"):
        requested_method(SimpleNamespace(get_name=lambda: "component"))
    assert requested_method(None) is None
    assert requested_method(SimpleNamespace(get_name=lambda: "fp8")) == "fp8"
