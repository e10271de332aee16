# SPDX-License-Identifier: Apache-2.0
"""Settings: typed, named on error, and no typo means "default"."""

from __future__ import annotations

import pickle

import pytest

from vllm_h3_plugin import errors, settings
from vllm_h3_plugin.errors import H3Error, SettingsError


def test_unknown_variable_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(SettingsError) as caught:
        settings.load({"H3_RECIPPE": "fp8"})
    assert "H3_RECIPPE" in caught.value.what
    assert "H3_RECIPE" in caught.value.fix


def test_unknown_variable_without_a_near_name_lists_all() -> None:
    with pytest.raises(SettingsError, match="H3_REFERENCE"):
        settings.load({"H3_ZZZZZZZZZZ": "1"})


def test_wrong_type_names_the_variable_and_the_value() -> None:
    with pytest.raises(SettingsError) as caught:
        settings.load({"H3_REFERENCE": "maybe"})
    assert "H3_REFERENCE='maybe'" in caught.value.what


@pytest.mark.parametrize(("word", "meant"), [("1", True), ("true", True), ("ON", True), ("0", False), ("", False)])
def test_reference_switch(word: str, meant: bool) -> None:
    assert settings.reference_requested({"H3_REFERENCE": word}) is meant


def test_reference_switch_refuses_other_words() -> None:
    with pytest.raises(SettingsError, match="Set it to 1"):
        settings.reference_requested({"H3_REFERENCE": "perhaps"})


def test_empty_variables_are_unset_and_others_are_none_of_our_business() -> None:
    values = settings.load({"H3_RECIPE": "", "PATH": "/bin", "VLLM_PLUGINS": "h3"})
    assert values.recipe is None


def test_every_error_class_has_an_exit_code_of_its_own_or_its_parents() -> None:
    classes = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, H3Error)]
    assert {cls.exit_code for cls in classes} >= set(range(1, 11))
    assert all(cls.exit_code != 0 for cls in classes)
    assert all(400 <= cls.http_status < 600 for cls in classes)
    tree = errors.__doc__ or ""
    for cls in classes:
        assert cls.__name__ in tree, f"{cls.__name__} is missing in the tree"


def test_errors_survive_pickling_because_workers_send_them() -> None:
    sent = errors.LoadError("a", why="b", fix="c", tensor="t")
    got = pickle.loads(pickle.dumps(sent))
    assert (type(got), got.what, got.why, got.fix, got.details) == (errors.LoadError, "a", "b", "c", {"tensor": "t"})


def test_an_error_reads_as_what_why_and_fix() -> None:
    error = errors.CheckpointError("x.safetensors", why="it ends early", fix="Copy it again.")
    assert str(error) == "x.safetensors: it ends early. Copy it again."
    assert error.report().splitlines() == ["error: x.safetensors", "  why: it ends early", "  fix: Copy it again."]
