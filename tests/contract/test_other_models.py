# SPDX-License-Identifier: Apache-2.0
"""Another model on the same host never notices the plugin, ``--quantization fp8`` included.

Run as a script this file prints, as one JSON line, what the host's registries hold before the host loads its plugins,
after it, and after a fault that the comparison must notice. It is a process of its own because other tests of this run
have registered the plugin long ago.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def snapshot() -> dict[str, dict[str, str]]:
    """Every registry of diffusion models and of quantization methods, and what ``fp8`` makes of one layer."""
    from vllm.model_executor.layers import quantization as vllm_quantization
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm_omni.diffusion import registry
    from vllm_omni.quantization import build_quant_config, factory

    tables = {
        name: {str(key): repr(entry) for key, entry in table.items()}
        for name, table in vars(registry).items()
        if name.startswith("_DIFFUSION_") and isinstance(table, dict)
    }
    tables["_NO_CACHE_ACCELERATION"] = dict.fromkeys(registry._NO_CACHE_ACCELERATION, "")
    tables["DiffusionModelRegistry"] = {
        arch: repr(model) for arch, model in registry.DiffusionModelRegistry.models.items()
    }
    tables["_OVERRIDES"] = {
        method: f"{builder.__module__}.{builder.__qualname__}" for method, builder in factory._OVERRIDES.items()
    }
    methods = (*vllm_quantization.QUANTIZATION_METHODS, *factory.SUPPORTED_QUANTIZATION_METHODS)
    tables["methods"] = dict.fromkeys(methods, "")
    config = build_quant_config("fp8")
    # A path that H3 has too: what decides must be the model, not the layer's name.
    layer = ReplicatedLinear(64, 64, bias=False, quant_config=config, prefix="blocks.0.attn.qkv_proj")
    tables["fp8"] = {
        kind: f"{type(made).__module__}.{type(made).__qualname__}"
        for kind, made in (("config", config), ("method", layer.quant_method))
    }
    return tables


def probe() -> dict[str, Any]:
    """Snapshots before and after, and with a fault put in."""
    from vllm_omni.plugins import load_omni_general_plugins
    from vllm_omni.quantization.factory import register_quantization_override

    from vllm_h3_plugin.host.standalone import single_rank

    with single_rank():
        before = snapshot()
        load_omni_general_plugins()
        after = snapshot()
        register_quantization_override("fp8", _foreign_fp8)
        return {"before": before, "after": after, "fault": snapshot()}


def _foreign_fp8(**_: Any) -> Any:
    """What a plugin might do that wants ``fp8`` to mean its own thing."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    return type("ForeignFp8Config", (Fp8Config,), {})()


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "H3_REFERENCE": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=800,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("PROBE ")]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("PROBE "))


def changes(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> dict[str, set[str]]:
    """Keys of each table whose entry came, went or changed."""
    assert before.keys() == after.keys()
    found = {}
    for name, entries in before.items():
        keys = entries.keys() | after[name].keys()
        changed = {key for key in keys if entries.get(key) != after[name].get(key)}
        if changed:
            found[name] = changed
    return found


def test_the_plugin_really_registered(seen: dict[str, Any]) -> None:
    from vllm_h3_plugin.host.register import ARCHITECTURES, PIPELINE_MODULE

    for architecture in ARCHITECTURES:
        assert PIPELINE_MODULE not in seen["before"]["_DIFFUSION_MODELS"][architecture]
        assert PIPELINE_MODULE in seen["after"]["_DIFFUSION_MODELS"][architecture]


def test_nothing_but_the_two_h3_architectures_changes(seen: dict[str, Any]) -> None:
    from vllm_h3_plugin.host.register import ARCHITECTURES

    found = changes(seen["before"], seen["after"])
    assert set().union(*found.values()) == set(ARCHITECTURES)
    assert set(found) <= {"_DIFFUSION_MODELS", "DiffusionModelRegistry", "_DIFFUSION_POST_PROCESS_FUNCS"}
    assert len(seen["after"]["_DIFFUSION_MODELS"]) > 20


def test_fp8_is_still_the_hosts_own(seen: dict[str, Any]) -> None:
    for moment in ("before", "after"):
        fp8 = seen[moment]["fp8"]
        assert fp8["config"] == "vllm.model_executor.layers.quantization.fp8.Fp8Config"
        assert fp8["method"].startswith("vllm.model_executor.layers.quantization.")
    assert seen["after"]["_OVERRIDES"] == seen["before"]["_OVERRIDES"]


def test_an_override_of_fp8_would_be_noticed(seen: dict[str, Any]) -> None:
    found = changes(seen["after"], seen["fault"])
    assert found["fp8"] == {"config"}
    assert found["_OVERRIDES"] == {"fp8"}


if __name__ == "__main__":
    print("PROBE " + json.dumps(probe()))
