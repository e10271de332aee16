# SPDX-License-Identifier: Apache-2.0
"""Parts beside the DiT's card: built there by subclasses of the host's, and only while the pipeline is built."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from vllm_omni.diffusion.models.minimax_h3 import pipeline_minimax_h3 as host_pipeline
from vllm_omni.engine.async_omni_engine import AsyncOmniEngine

from vllm_h3_plugin.errors import HostError, SettingsError
from vllm_h3_plugin.host.placed_parts import card_device, on_device, parse_parts_on, parts_on_cards
from vllm_h3_plugin.host.stage_devices import show_cards
from vllm_h3_plugin.settings import Settings

CLASSES = {"text_encoder": "MiniMaxH3Qwen3VLEncoder", "audio_vae": "MiniMaxH3AudioVAE"}
BESIDE = Settings(parts_on="text_encoder=1,audio_vae=2")


def test_the_setting_is_read_as_part_and_card() -> None:
    assert parse_parts_on("text_encoder=1, audio_vae=2") == {"text_encoder": 1, "audio_vae": 2}
    assert parse_parts_on(None) == parse_parts_on("") == {}


@pytest.mark.parametrize("text", ["dit=1", "text_encoder", "text_encoder=x", "audio_vae=1,audio_vae=2"])
def test_a_part_that_cannot_be_moved_and_a_card_that_is_none_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="H3_PARTS_ON") as caught:
        parse_parts_on(text)
    assert "text_encoder=CARD" in caught.value.why and "vllm-h3 serve" in caught.value.fix


def test_a_card_is_a_device_of_the_same_kind() -> None:
    """``npu`` is no device type where torch_npu is not."""
    assert card_device(1, torch.device("cuda", 0)) == torch.device("cuda", 1)
    assert card_device(1, torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("part", CLASSES)
def test_the_hosts_classes_take_the_device_that_is_replaced(part: str) -> None:
    parameters = inspect.signature(getattr(host_pipeline, CLASSES[part]).__init__).parameters
    assert parameters["device"].kind is inspect.Parameter.KEYWORD_ONLY
    if part == "audio_vae":
        assert "load_device" in parameters and hasattr(host_pipeline.MiniMaxH3AudioVAE, "decode_latent")


class Part(torch.nn.Module):
    """As the host's: built under a device context and told its device."""

    def __init__(self, path: str, *, device: torch.device, load_device: torch.device | None = None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.told = (path, device, load_device)

    def decode_latent(self, latent: torch.Tensor) -> torch.Tensor:
        return self.linear(latent)


def test_a_part_is_built_on_its_card_and_its_latents_follow() -> None:
    """``meta`` plays the other card."""
    card = torch.device("meta")
    placed = on_device(Part, card)
    assert placed.__name__ == "Part" and issubclass(placed, Part)
    with torch.device("cpu"):
        part: Any = placed("x", device=torch.device("cpu"), load_device=torch.device("cpu"))
    assert part.told == ("x", card, card) and part.linear.weight.device == card
    assert part.decode_latent(torch.zeros(2, 4)).device == card
    assert placed("x", device=torch.device("cpu")).told == ("x", card, None)


def test_the_hosts_classes_are_replaced_while_the_pipeline_is_built_and_no_longer() -> None:
    before = {part: getattr(host_pipeline, name) for part, name in CLASSES.items()}
    with pytest.raises(KeyError), parts_on_cards(BESIDE, torch.device("cuda", 0)) as devices:
        assert devices == {"text_encoder": torch.device("cuda", 1), "audio_vae": torch.device("cuda", 2)}
        for part, name in CLASSES.items():
            placed = getattr(host_pipeline, name)
            assert issubclass(placed, before[part]) and placed is not before[part] and placed.__name__ == name
        raise KeyError
    assert {part: getattr(host_pipeline, name) for part, name in CLASSES.items()} == before
    with parts_on_cards(Settings(), torch.device("cpu")) as devices:
        assert devices == {} and host_pipeline.MiniMaxH3AudioVAE is before["audio_vae"]


def test_the_hosts_stage_is_shown_the_other_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    def default_stage(kwargs: dict) -> list:
        return [{"runtime": {"process": True, "devices": "0"}, "engine_args": kwargs}]

    monkeypatch.setattr(
        AsyncOmniEngine, "_create_default_diffusion_stage_cfg", staticmethod(default_stage), raising=False
    )
    show_cards(Settings())
    assert AsyncOmniEngine._create_default_diffusion_stage_cfg is default_stage
    for _ in range(2):
        show_cards(BESIDE)
        stage = AsyncOmniEngine._create_default_diffusion_stage_cfg({"a": 1})[0]
        assert stage["runtime"]["devices"] == "0,1,2" and stage["engine_args"] == {"a": 1}


@pytest.mark.only_host("ascend", reason="the other host is not for Ascend, and refuses such parts")
def test_the_ascend_hosts_own_stage_has_its_devices_where_they_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = AsyncOmniEngine._create_default_diffusion_stage_cfg
    monkeypatch.setattr(AsyncOmniEngine, "_create_default_diffusion_stage_cfg", staticmethod(original))
    assert original({})[0]["runtime"]["devices"] == "0"
    show_cards(BESIDE)
    assert AsyncOmniEngine._create_default_diffusion_stage_cfg({})[0]["runtime"]["devices"] == "0,1,2"


def test_a_host_without_such_a_stage_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncOmniEngine, "_create_default_diffusion_stage_cfg", None, raising=False)
    with pytest.raises(HostError, match="does not make its stage where") as caught:
        show_cards(BESIDE)
    assert "ascend host" in caught.value.fix
