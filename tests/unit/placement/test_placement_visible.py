# SPDX-License-Identifier: Apache-2.0
"""Cards that are visible against cards that are configured, on Ascend and CUDA, before any file is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_h3_plugin.cli.serve import check_before_start
from vllm_h3_plugin.errors import BackendError, RecipeError, SettingsError
from vllm_h3_plugin.placement import visible
from vllm_h3_plugin.placement.visible import check_count, visible_cards
from vllm_h3_plugin.serving.cards import check_cards, check_method_of
from vllm_h3_plugin.serving.command import server_command
from vllm_h3_plugin.serving.profile import Profile, load_profile

VARIABLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
NODES = {
    "npu": ["davinci0", "davinci1", "davinci2", "davinci3", "davinci_manager", "null"],
    "cuda": ["nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"],
}


@pytest.fixture(params=["npu", "cuda"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_without_a_variable_the_device_nodes_are_counted(kind) -> None:
    seen = visible_cards(kind, {}, NODES[kind])
    assert (seen.count, seen.cards, seen.present) == (4, ("0", "1", "2", "3"), 4)


def test_the_variable_says_which_are_visible(kind) -> None:
    assert visible_cards(kind, {VARIABLE[kind]: "2, 0"}, NODES[kind]).cards == ("2", "0")
    assert visible_cards(kind, {VARIABLE[kind]: ""}, NODES[kind]).count == 0


def test_a_card_that_is_listed_twice_is_named(kind) -> None:
    with pytest.raises(SettingsError) as caught:
        visible_cards(kind, {VARIABLE[kind]: "0,1,1"}, NODES[kind])
    assert f"{VARIABLE[kind]}=0,1,1 lists card 1 twice" in caught.value.what and caught.value.fix


def test_a_card_that_is_not_there_is_named(kind) -> None:
    with pytest.raises(SettingsError) as caught:
        visible_cards(kind, {VARIABLE[kind]: "0,7"}, NODES[kind])
    assert "names card 7" in caught.value.what and "4 of /dev/" in caught.value.why


@pytest.mark.parametrize("word", ["a", "0-3", "0;1", "00", "+1", "1.0", "²", "-1", "all"])
def test_a_word_that_is_no_card_does_not_count_as_one(kind, word: str) -> None:
    with pytest.raises(SettingsError) as caught:
        visible_cards(kind, {VARIABLE[kind]: f"1,{word}"}, NODES[kind])
    assert (
        VARIABLE[kind] in caught.value.what
        and repr(word) in caught.value.what
        and f"{VARIABLE[kind]}=0,1" in caught.value.fix
    )


def test_minus_one_hides_all_cards(kind) -> None:
    seen = visible_cards(kind, {VARIABLE[kind]: "-1"}, NODES[kind])
    with pytest.raises(SettingsError, match="1 card is configured in profile mine and 0 are visible"):
        check_count("mine", 1, seen)


def test_only_cuda_knows_cards_by_uuid() -> None:
    with pytest.raises(SettingsError, match="names 'GPU-aa'"):
        visible_cards("npu", {VARIABLE["npu"]: "GPU-aa"}, NODES["npu"])


def test_cards_are_counted_as_the_runtime_counts_them() -> None:
    """A container that was given one device sees it as card 0, whatever its number on the machine."""
    assert visible_cards("npu", {"ASCEND_RT_VISIBLE_DEVICES": "0"}, ["davinci3"]).count == 1
    assert visible_cards("cuda", {"CUDA_VISIBLE_DEVICES": "0"}, ["nvidia3"]).count == 1
    with pytest.raises(SettingsError, match="no /dev/davinciN"):
        visible_cards("npu", {"ASCEND_RT_VISIBLE_DEVICES": "0"}, ["null"])


def test_cards_by_uuid_are_counted() -> None:
    assert visible_cards("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-aa,MIG-bb"}, NODES["cuda"]).count == 2


def test_four_configured_and_two_visible_names_both_and_the_variable(kind) -> None:
    seen = visible_cards(kind, {VARIABLE[kind]: "0,1"}, NODES[kind])
    with pytest.raises(SettingsError) as caught:
        check_count("ascend-4", 4, seen)
    error = caught.value
    assert error.what == "4 cards are configured in profile ascend-4 and 2 are visible"
    assert f"{VARIABLE[kind]}=0,1" in error.why and f"{VARIABLE[kind]}=0,1,2,3" in error.fix
    assert (error.details["configured"], error.details["visible"]) == (4, 2)


def test_two_configured_and_four_visible_is_refused_too(kind) -> None:
    seen = visible_cards(kind, {}, NODES[kind])
    with pytest.raises(SettingsError, match="2 cards are configured in profile mine and 4 are visible") as caught:
        check_count("mine", 2, seen)
    assert f"{VARIABLE[kind]}=0,1" in caught.value.fix
    check_count("mine", 2, seen, exactly=False)


def test_fewer_nodes_than_configured_says_which_to_pass(kind) -> None:
    with pytest.raises(SettingsError) as caught:
        check_count("mine", 4, visible_cards(kind, {}, NODES[kind][:2]))
    assert "/dev/" in caught.value.fix and VARIABLE[kind] in caught.value.fix


# Profiles.


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    here = [*NODES["npu"], *NODES["cuda"]]
    monkeypatch.setattr(visible, "device_nodes", lambda: here)
    return here


@pytest.mark.parametrize("name", ["ascend-1", "ascend-2", "ascend-2-resident", "ascend-4"])
def test_an_ascend_profile_starts_with_as_many_cards_as_it_has_roles_for(name: str, nodes) -> None:
    profile = load_profile(name)
    cards = ",".join(map(str, range(profile.devices)))
    check_cards(profile, name, {"ASCEND_RT_VISIBLE_DEVICES": cards}, "ascend")
    for wrong in ("0,1,2", ""):
        with pytest.raises(SettingsError, match=rf"{profile.devices} cards? (is|are) configured in profile {name} and"):
            check_cards(profile, name, {"ASCEND_RT_VISIBLE_DEVICES": wrong}, "ascend")


def test_one_cuda_device_may_be_one_of_several_and_two_may_not(nodes) -> None:
    one = Profile(description="x")
    check_cards(one, "spark", {}, "nvidia")
    check_cards(one, "spark", {"CUDA_VISIBLE_DEVICES": "3"}, "nvidia")
    with pytest.raises(SettingsError, match="1 card is configured in profile spark and 0 are visible"):
        check_cards(one, "spark", {"CUDA_VISIBLE_DEVICES": ""}, "nvidia")
    two = one.model_copy(update={"devices": 2})
    with pytest.raises(SettingsError, match="2 cards are configured in profile mine and 4 are visible"):
        check_cards(two, "mine", {}, "nvidia")
    check_cards(two, "mine", {"CUDA_VISIBLE_DEVICES": "1,2"}, "nvidia")


def test_ranks_of_the_reference_platform_are_not_counted(nodes) -> None:
    check_cards(Profile(description="x", devices=4, reference=True), "reference", {}, "nvidia")


def test_a_part_beside_the_dit_is_refused_where_the_host_cannot_show_its_card(nodes) -> None:
    with pytest.raises(SettingsError, match="text_encoder beside the DiT's card") as caught:
        check_cards(load_profile("ascend-2-resident"), "ascend-2-resident", {}, "nvidia")
    assert "ascend host" in caught.value.fix


def test_ascend_cards_under_the_other_host_are_refused(nodes) -> None:
    with pytest.raises(SettingsError, match="profile ascend-4 is for Ascend cards and the nvidia host is") as caught:
        check_cards(load_profile("ascend-4"), "ascend-4", {}, "nvidia")
    assert "HOST=ascend make setup" in caught.value.fix


@pytest.mark.host
def test_a_wrong_count_stops_the_start_before_the_checkpoint_is_looked_for(nodes, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1")
    profile = load_profile("ascend-4").with_flags({"checkpoint": tmp_path / "absent"})
    with pytest.raises(SettingsError, match="4 cards are configured in profile ascend-4 and 2 are visible"):
        check_before_start(profile, "ascend-4")


@pytest.mark.parametrize(
    ("name", "recipe", "why", "fix"),
    [
        ("spark", "int8", "SM121 has no INT8 path", "recipe fp8"),
        ("h200", "int8-text", "INT8 is computed on Ascend only", "recipe fp8"),
        ("mine.toml", "int8", "GB10 (SM121) and other Blackwell chips have no INT8 path", "recipe fp8"),
        ("ascend-1", "fp8", "there is no FP8 path", "recipe int8"),
    ],
)
def test_a_recipe_of_the_other_accelerator_is_refused_before_a_server_starts(name, recipe, why, fix) -> None:
    profile = load_profile(name) if not name.endswith(".toml") else Profile(description="x")
    with pytest.raises(BackendError) as caught:
        check_method_of(profile.with_flags({"recipe": recipe}), name)
    assert why in caught.value.why and fix in caught.value.fix
    check_method_of(profile, name)
    check_method_of(profile.with_flags({"recipe": recipe, "reference": True}), name)


def _words(name: str, tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    command = server_command(load_profile(name), Path("/ckpt/FL2VA"), run_dir=tmp_path, environ={})
    return list(command.argv), dict(command.environment)


def test_profiles_become_the_hosts_options(tmp_path: Path) -> None:
    words, environment = _words("ascend-4", tmp_path)
    assert " ".join(words[words.index("--quantization") :]) == (
        "--quantization int8 --num-gpus 4 --usp 4 --text-encoder-tp-size 4 --vae-patch-parallel-size 4"
    )
    assert "H3_PARTS_ON" not in environment and environment["H3_RECIPE"] == "int8"
    for name, parts in (("ascend-2", "audio_vae=1"), ("ascend-2-resident", "text_encoder=1")):
        words, environment = _words(name, tmp_path)
        assert "--num-gpus" not in words and "--usp" not in words and environment["H3_PARTS_ON"] == parts
    assert "H3_PARTS_ON" not in _words("ascend-1", tmp_path)[1]


def test_a_map_by_hand_in_a_profile_is_validated(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    head = 'description = "x"\naccelerator = "npu"\nrecipe = "int8"\ndevices = 2\n'
    path.write_text(f"{head}[roles]\ndit = [0, 1]\ntext_encoder = [0, 1]\nvideo_vae = [0]\naudio_vae = [0]\n")
    command = server_command(load_profile(str(path)), Path("c"), run_dir=tmp_path, environ={})
    assert command.argv[-6:] == ("--num-gpus", "2", "--usp", "2", "--text-encoder-tp-size", "2")
    path.write_text(f"{head}[roles]\ndit = [0, 1]\ntext_encoder = [0, 1]\nvideo_vae = [0]\n")
    with pytest.raises(SettingsError, match="leaves audio_vae out"):
        server_command(load_profile(str(path)), Path("c"), run_dir=tmp_path, environ={})


def test_room_on_the_cards_is_looked_at_before_the_start(tmp_path: Path) -> None:
    """A tiny checkpoint fits in 1 GiB and not in 1 MiB."""
    from vllm_h3_plugin.checkpoint.inventory import take_inventory
    from vllm_h3_plugin.checkpoint.synthetic.spec import SynthSpec
    from vllm_h3_plugin.checkpoint.synthetic.writer import write_checkpoint
    from vllm_h3_plugin.serving.cards import check_room_on_cards

    inventory = take_inventory(write_checkpoint(tmp_path, SynthSpec(partition="fl2va")).partitions[0], None)
    cut = {"dit": [0, 1, 2, 3], "text_encoder": [0], "video_vae": [0, 1, 2, 3], "audio_vae": [3]}
    profile = load_profile("ascend-4").with_flags({"roles": cut})
    lines = check_room_on_cards(profile, inventory)
    assert any("host keeps the audio VAE on all 4 cards" in line for line in lines)
    assert sum(line.startswith("card ") for line in lines) == 4
    with pytest.raises(SettingsError, match="text encoder is on 4 cards: they do not divide its 2 key/value heads"):
        check_room_on_cards(load_profile("ascend-4"), inventory)
    small = profile.with_flags({"card_gib": 0.001})
    with pytest.raises(RecipeError, match="does not fit on card 0, card 1, card 2, card 3"):
        check_room_on_cards(small, inventory)


def test_several_cards_without_a_map_share_all_that_can_be_cut(tmp_path: Path) -> None:
    """The host would have each of them make every clip on its own. Nobody has set ``card_gib`` for them."""
    from vllm_h3_plugin.checkpoint.inventory import take_inventory
    from vllm_h3_plugin.checkpoint.synthetic.spec import SynthSpec
    from vllm_h3_plugin.checkpoint.synthetic.writer import write_checkpoint
    from vllm_h3_plugin.serving.cards import check_room_on_cards, placement_of

    two = Profile(description="x", devices=2, card_gib=0.001)
    placed = placement_of(two)
    assert placed is not None
    assert placed.options() == ("--usp", "2", "--text-encoder-tp-size", "2", "--vae-patch-parallel-size", "2")
    assert placement_of(Profile(description="x")) is None
    inventory = take_inventory(write_checkpoint(tmp_path, SynthSpec(partition="fl2va")).partitions[0], None)
    assert all("role map all" in line for line in check_room_on_cards(two, inventory))
    with pytest.raises(SettingsError, match="the DiT is on 3 cards: they do not divide its 4") as caught:
        check_room_on_cards(two.with_flags({"devices": 3}), inventory)
    assert "Use one of 1, 2, 4 cards" in caught.value.fix
