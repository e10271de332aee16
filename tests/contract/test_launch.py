# SPDX-License-Identifier: Apache-2.0
"""The launcher lets a server start only with this plugin, in a pinned host, with settings that something reads."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from vllm_h3_plugin import pins
from vllm_h3_plugin.errors import HostError, SettingsError
from vllm_h3_plugin.host import launch, register


@pytest.fixture(autouse=True)
def no_stray_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("H3_RECIPE", "H3_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_the_plugin_is_proved_in_this_host() -> None:
    launch.prove_plugin_loads()


def test_another_host_version_is_refused_and_both_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "version", lambda package: "0.26.0")
    with pytest.raises(HostError) as caught:
        launch.prove_plugin_loads()
    assert "0.26.0" in caught.value.what
    assert "0.30.0" in caught.value.why and "0.28.0" in caught.value.why


@pytest.mark.parametrize(
    "points",
    [[], [EntryPoint("h3", "somebody_else:register", launch.GROUP)]],
    ids=["missing", "another-package"],
)
def test_an_entry_point_that_is_not_ours_is_refused(monkeypatch: pytest.MonkeyPatch, points: list[EntryPoint]) -> None:
    monkeypatch.setattr(launch, "entry_points", lambda group: points)
    with pytest.raises(HostError, match="not registered") as caught:
        launch.prove_plugin_loads()
    assert "--no-deps" in caught.value.fix


def test_an_error_while_the_plugin_loads_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host would log it and serve the stock model."""

    def broken() -> None:
        raise HostError("the plugin cannot register")

    monkeypatch.setattr(register, "register", broken)
    with pytest.raises(HostError, match="cannot register"):
        launch.prove_plugin_loads()


def test_another_plugin_in_this_ones_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.diffusion.registry import DiffusionModelRegistry

    stranger = SimpleNamespace(__module__="somebody_else.pipeline")
    monkeypatch.setattr(DiffusionModelRegistry, "_try_load_model_cls", lambda name: stranger)
    with pytest.raises(HostError, match="took the place"):
        launch.prove_plugin_loads()


def test_a_setting_that_nothing_reads_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H3_RECIPPE", "fp8")
    with pytest.raises(SettingsError, match="H3_RECIPE"):
        launch.prove_plugin_loads()
