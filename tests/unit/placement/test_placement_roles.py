# SPDX-License-Identifier: Apache-2.0
"""Role maps: the published ones, what is refused in one by hand, and what the host makes of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_h3_plugin.checkpoint.configs import DitConfig, TextEncoderConfig
from vllm_h3_plugin.errors import RecipeError, SettingsError
from vllm_h3_plugin.memory.weights import ModelShapes
from vllm_h3_plugin.placement.fit import check_fit, loads
from vllm_h3_plugin.placement.hosting import hosting
from vllm_h3_plugin.placement.roles import ROLE_MAPS, RoleMap, role_map
from vllm_h3_plugin.quantization.footprint import GIB
from vllm_h3_plugin.quantization.recipe import load_recipe

GOOD = {"dit": (0,), "text_encoder": (1,), "video_vae": (0,), "audio_vae": (0,)}


def refused(places: dict, cards: int = 2) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        RoleMap.of("mine", cards, places)
    assert "role map mine" in caught.value.what and caught.value.fix
    return caught.value


def test_the_published_maps_are_these() -> None:
    assert {name: made.places for name, made in ROLE_MAPS.items()} == {
        "one": {"dit": (0,), "text_encoder": (0,), "video_vae": (0,), "audio_vae": (0,)},
        "two": {"dit": (0,), "text_encoder": (0,), "video_vae": (0,), "audio_vae": (1,)},
        "two-resident": {"dit": (0,), "text_encoder": (1,), "video_vae": (0,), "audio_vae": (0,)},
        "four": {"dit": (0, 1, 2, 3), "text_encoder": (0, 1, 2, 3), "video_vae": (0, 1, 2, 3), "audio_vae": (3,)},
    }
    for made in ROLE_MAPS.values():
        made.check_shapes(DitConfig(), TextEncoderConfig())


def test_one_map_is_for_any_number_of_cards() -> None:
    assert role_map("all", 4).places == ROLE_MAPS["four"].places
    assert role_map("all", 2).places == {
        "dit": (0, 1),
        "text_encoder": (0, 1),
        "video_vae": (0, 1),
        "audio_vae": (1,),
    }
    with pytest.raises(SettingsError, match="attention heads"):
        role_map("all", 3).check_shapes(DitConfig(), TextEncoderConfig())


def test_two_sparks_hold_what_is_predicted_for_each() -> None:
    found = loads(hosting(role_map("all", 2)), 2, ModelShapes(), load_recipe("fp8"))
    alone = loads(hosting(role_map("one", 1)), 1, ModelShapes(), load_recipe("fp8"))[0].parts
    # A whole DiT and half a text encoder on each.
    assert all(load.parts["dit"] == alone["dit"] for load in found)
    assert all(load.parts["text_encoder"] < 0.7 * alone["text_encoder"] for load in found)
    assert all(20 * GIB < load.nbytes < 112 * GIB for load in found)


def test_a_map_by_hand_is_the_published_one_if_it_says_the_same() -> None:
    by_hand = role_map(GOOD, 2)
    assert by_hand.places == ROLE_MAPS["two-resident"].places and by_hand.on(1) == ("text_encoder",)


@pytest.mark.parametrize("part", GOOD)
def test_a_part_that_is_left_out_is_named(part: str) -> None:
    for places in ({k: v for k, v in GOOD.items() if k != part}, {**GOOD, part: ()}):
        error = refused(places)
        assert f"leaves {part} out" in error.what and f"{part} = [CARD]" in error.fix


def test_an_unknown_part_is_named_with_the_nearest() -> None:
    assert "Did you mean video_vae?" in refused({**GOOD, "vidoe_vae": (0,)}).fix


@pytest.mark.parametrize("card", [2, -1])
def test_a_card_that_is_not_configured_is_named(card: int) -> None:
    error = refused({**GOOD, "audio_vae": (card,)})
    assert f"audio_vae is on card {card}" in error.what and "0 to 1" in error.why


def test_a_card_that_is_listed_twice_is_named() -> None:
    assert "dit lists card 0 twice" in refused({**GOOD, "dit": (0, 0)}).what


def test_a_card_without_a_part_is_named() -> None:
    error = refused(GOOD, cards=4)
    assert "nothing is on card 2, 3" in error.what and "2 cards" in error.fix


def test_a_vae_is_on_one_card_or_its_tiles_on_all() -> None:
    four = dict(ROLE_MAPS["four"].places)
    assert "video_vae is on 2 of 4 cards" in refused({**four, "video_vae": (0, 1)}, 4).what
    assert "audio_vae is on 2 cards" in refused({**four, "audio_vae": (0, 1)}, 4).what


def test_heads_that_do_not_divide_are_named_with_what_does() -> None:
    six = {"dit": tuple(range(6)), "text_encoder": (0,), "video_vae": (0,), "audio_vae": (0,)}
    with pytest.raises(SettingsError) as caught:
        RoleMap.of("mine", 6, six).check_shapes(DitConfig(), TextEncoderConfig())
    assert "DiT is on 6 cards" in caught.value.what and "56 attention heads" in caught.value.why
    assert "1, 2, 4, 7, 8" in caught.value.fix
    three = {"dit": (0, 1, 2, 3), "text_encoder": (0, 1, 2), "video_vae": (0,), "audio_vae": (0,)}
    with pytest.raises(SettingsError, match=r"on 3 cards: they do not divide its 64 attention heads and 8.*1, 2, 4, 8"):
        RoleMap.of("mine", 4, three).check_shapes(DitConfig(), TextEncoderConfig())


def test_an_unknown_name_and_a_map_for_another_count_are_refused() -> None:
    with pytest.raises(SettingsError, match="Did you mean two-resident"):
        role_map("two-residnt", 2)
    with pytest.raises(SettingsError) as caught:
        role_map("four", 2)
    assert "is for 4 cards and the profile configures 2" in caught.value.what
    assert "devices = 4" in caught.value.fix and "two or two-resident" in caught.value.fix


# What the host makes of them.


def test_one_card_needs_no_option_and_two_no_second_rank() -> None:
    assert (hosting(ROLE_MAPS["one"]).options(), hosting(ROLE_MAPS["one"]).elsewhere) == ((), {})
    for name, elsewhere in (("two", {"audio_vae": 1}), ("two-resident", {"text_encoder": 1})):
        placed = hosting(ROLE_MAPS[name])
        assert (placed.ranks, placed.options(), placed.elsewhere, placed.departures) == (1, (), elsewhere, ())
        assert placed.resident_on(1) == tuple(elsewhere) and not set(elsewhere) & set(placed.resident_on(0))


def test_four_cards_become_options_and_say_where_the_host_departs() -> None:
    placed = hosting(ROLE_MAPS["four"])
    assert placed.options() == (
        "--usp", "4", "--text-encoder-tp-size", "4", "--vae-patch-parallel-size", "4",
    )  # fmt: skip
    assert "audio VAE on all 4 cards" in placed.departures[-1] and "card 3" in placed.departures[-1]
    assert placed.resident_on(3) == ("dit", "text_encoder", "video_vae", "audio_vae")


@pytest.mark.parametrize(
    ("cards", "change", "what", "fix"),
    [
        (2, {"dit": (1,), "text_encoder": (0,)}, "the DiT is on cards 1", "cards 0"),
        (2, {"text_encoder": (0, 1)}, "text_encoder is on cards 0, 1 and the DiT on card 0 alone", "the DiT all"),
        (2, {"text_encoder": (0,), "video_vae": (1,)}, "video_vae is on card 1 and the DiT on card 0", "card 0"),
        (3, {"dit": (0, 1), "text_encoder": (2,)}, "the DiT is on 2 of 3 cards", "all 3 cards"),
        (2, {"dit": (0, 1), "text_encoder": (1,)}, "the text encoder is on cards 1", "card 0"),
        (
            4,
            {"dit": (0, 1, 2, 3), "text_encoder": (0, 2)},
            "the text encoder is on cards 0, 2",
            "card 0 alone, or on all 4",
        ),
        (4, {"dit": (0, 1, 2, 3), "text_encoder": (0, 1)}, "the text encoder is on 2 of 4 cards", "all 4 cards"),
    ],
)
def test_a_map_that_cannot_be_run_says_what_can(cards: int, change: dict, what: str, fix: str) -> None:
    with pytest.raises(SettingsError) as caught:
        hosting(RoleMap.of("mine", cards, {**GOOD, **change}))
    assert f"role map mine cannot be run: {what}" in caught.value.what
    assert caught.value.why and fix in caught.value.fix


# What lies on each card.


def sizes(name: str, recipe: str) -> list[float]:
    roles = ROLE_MAPS[name]
    return [
        round(load.nbytes / GIB, 1) for load in loads(hosting(roles), roles.cards, ModelShapes(), load_recipe(recipe))
    ]


def test_predicted_bytes_follow_the_parts() -> None:
    resident = sizes("two-resident", "int8")
    assert sum(resident) == pytest.approx(sizes("one", "int8")[0], abs=0.5), "one copy of every part"
    assert resident[1] == pytest.approx(47.97 + 0.4, abs=0.1), "the text encoder, and its own activations"
    four = sizes("four", "int8")
    assert len(set(four)) == 1 and four[0] < resident[0] + 47.97 / 3
    vaes = ModelShapes(vaes={"video_vae": 9 * GIB, "audio_vae": GIB})
    placed = loads(hosting(ROLE_MAPS["two"]), 2, vaes, load_recipe("int8-text"))
    assert placed[1].parts == {"audio_vae": GIB} and placed[0].parts["video_vae"] == 9 * GIB


@pytest.mark.parametrize(("name", "recipe"), [("one", "int8-text"), ("two-resident", "int8"), ("four", "int8")])
def test_what_the_profiles_use_fits_on_cards_of_64_gib(name: str, recipe: str) -> None:
    roles = ROLE_MAPS[name]
    assert len(check_fit(hosting(roles), roles.cards, ModelShapes(), load_recipe(recipe), 64)) == roles.cards


def test_what_does_not_fit_is_refused_with_the_numbers_and_the_recipe_that_would() -> None:
    roles = ROLE_MAPS["one"]
    with pytest.raises(RecipeError) as caught:
        check_fit(hosting(roles), 1, ModelShapes(), load_recipe("int8"), 64)
    assert "recipe int8 does not fit on card 0 of 64 GiB" in caught.value.what
    assert "card 0: 80.3 GiB (dit 19.7 + text_encoder 48.0 + video_vae 10.2 + decode 2.4)" in caught.value.why
    assert "Recipe int8-text fits" in caught.value.fix
    with pytest.raises(RecipeError, match="No recipe of this kind fits: use more cards"):
        check_fit(hosting(roles), 1, ModelShapes(), load_recipe("int8"), 32)
    check_fit(hosting(roles), 1, ModelShapes(), load_recipe("int8"), 96)


def test_maps_are_values() -> None:
    assert replace(ROLE_MAPS["one"], name="one") == ROLE_MAPS["one"]


def test_stages_that_take_turns_need_all_weights_at_the_load_and_are_named_where_they_fit() -> None:
    """The host makes every part on the card: turns save the phase that comes on top, and not the load."""
    roles, shapes, recipe = ROLE_MAPS["one"], ModelShapes(), load_recipe("int8-text")
    (both,) = loads(hosting(roles), 1, shapes, recipe)
    (turns,) = loads(hosting(roles), 1, shapes, recipe, stages=True)
    assert turns.nbytes == sum(turns.parts.values()) == both.nbytes - both.phase[1]
    between = (turns.nbytes + both.nbytes) / 2 / GIB
    check_fit(hosting(roles), 1, shapes, recipe, between, stages=True)
    with pytest.raises(RecipeError, match="does not fit on card 0") as caught:
        check_fit(hosting(roles), 1, shapes, recipe, between)
    assert "--resident stage" in caught.value.fix
    with pytest.raises(RecipeError) as caught:
        check_fit(hosting(roles), 1, shapes, recipe, 32, stages=True)
    assert "--resident" not in caught.value.fix
