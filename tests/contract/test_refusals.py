# SPDX-License-Identifier: Apache-2.0
"""What the host would do inside its own loader is refused by name where this plugin's loader takes its place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm_omni.diffusion.lora.manager import LoRABackend

from vllm_h3_plugin.errors import AdapterError, UsageError
from vllm_h3_plugin.host.adapters import _asked
from vllm_h3_plugin.host.pipeline import refuse_what_the_loader_skips
from vllm_h3_plugin.host.session import requested_method


def _pipeline(**attributes: object) -> SimpleNamespace:
    return SimpleNamespace(**{"_dit_modules": ["transformer"], "transformer": SimpleNamespace(), **attributes})


def test_a_plain_pipeline_and_one_with_a_fused_adapter_pass() -> None:
    refuse_what_the_loader_skips(_pipeline(_fasth3=None))
    refuse_what_the_loader_skips(_pipeline(_fasth3=object()))


@pytest.mark.parametrize(
    ("flags", "what"),
    [({"lora_path": ["a", "b"]}, "names 2 adapters"), ({"lora_path": "a", "lora_backend": "distill"}, "distill")],
)
def test_adapters_that_the_host_would_load_otherwise_are_refused(flags: dict[str, object], what: str) -> None:
    with pytest.raises(AdapterError, match=what):
        _asked(SimpleNamespace(**flags))


def test_the_hosts_flags_are_read_in_each_of_their_forms() -> None:
    assert _asked(SimpleNamespace()) == (None, 1.0)
    assert _asked(SimpleNamespace(lora_path=["a"], lora_scale=[0.5])) == ("a", 0.5)
    assert _asked(SimpleNamespace(lora_path="a", lora_scale=0.25, lora_backend=LoRABackend.PEFT)) == ("a", 0.25)


def test_an_adaln_sidecar_is_refused() -> None:
    sidecar = SimpleNamespace(_adaln_sidecar_candidate=object())
    with pytest.raises(UsageError, match="minimax_h3_adaln_cache_path"):
        refuse_what_the_loader_skips(_pipeline(transformer=sidecar))


def test_a_component_quantization_config_is_refused_with_the_recipe_to_use() -> None:
    with pytest.raises(UsageError, match="fp8-text-bf16"):
        requested_method(SimpleNamespace(get_name=lambda: "component"))
    assert requested_method(None) is None
    assert requested_method(SimpleNamespace(get_name=lambda: "fp8")) == "fp8"
