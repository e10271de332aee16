# SPDX-License-Identifier: Apache-2.0
"""What stays on the device between stages is a key of the profile, a flag, and a variable of the server's."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_h3_plugin import settings
from vllm_h3_plugin.errors import SettingsError, UsageError
from vllm_h3_plugin.serving.command import server_command
from vllm_h3_plugin.serving.profile import Profile, load_profile, profile_names


def environment(profile: Profile) -> dict[str, str]:
    command = server_command(profile, Path("/models/FL2VA"), run_dir=None, environ={})
    return dict(command.environment)


def test_every_profile_keeps_all_unless_it_is_told_otherwise() -> None:
    assert {load_profile(name).resident for name in profile_names()} == {"all"}
    profile = load_profile("reference")
    assert "H3_RESIDENT" not in environment(profile)
    assert environment(profile.with_flags({"resident": "stage"}))["H3_RESIDENT"] == "stage"


def test_another_word_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match="--resident half") as caught:
        load_profile("reference").with_flags({"resident": "half"})
    assert "'all' or 'stage'" in caught.value.why and "stage that runs" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "value"), [("H3_RESIDENT", "half"), ("H3_RESIDENT_GIB", "0"), ("H3_SHARED_BASE", "2")]
)
def test_a_wrong_value_of_a_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}='{value}'") as caught:
        settings.load({name: value})
    assert caught.value.fix
