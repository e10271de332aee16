# SPDX-License-Identifier: Apache-2.0
"""Launch profiles and the command they become."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from vllm_h3_plugin.errors import RecipeError, SettingsError, UsageError
from vllm_h3_plugin.serving.command import server_command
from vllm_h3_plugin.serving.profile import Profile, load_profile, profile_names
from vllm_h3_plugin.serving.rules.ratios import ratio_name


@pytest.mark.parametrize("name", profile_names())
def test_every_packaged_profile_loads(name: str) -> None:
    assert load_profile(name).description


def test_unknown_profile_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean spark"):
        load_profile("spork")


def test_unknown_key_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('description = "x"\nprot = 8000\n')
    with pytest.raises(SettingsError) as caught:
        load_profile(str(path))
    assert "prot" in caught.value.what and "port" in caught.value.fix


def test_malformed_toml_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("description = \n")
    with pytest.raises(SettingsError, match=r"mine\.toml is not valid TOML"):
        load_profile(str(path))


def test_wrong_value_names_file_and_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('description = "x"\nport = 99999\n')
    with pytest.raises(SettingsError, match=r"mine\.toml: port"):
        load_profile(str(path))


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ("roles = 1", "1 is neither the name of a map nor a table"),
        ("[roles]\ndit = 0", "dit is 0, and a part has a list of card numbers, such as dit = [0]"),
        ('[roles]\ndit = ["0"]', "dit is ['0']"),
        ("[roles]\ndit = [true]", "dit is [True]"),
        ("[roles]\ndit = [0.5]", "dit is [0.5]"),
        ('[roles]\ndit = "01"', "dit is '01'"),
        ("[roles.dit]\ncards = [0]", "dit is {'cards': [0]}"),
    ],
)
def test_roles_that_are_no_lists_of_numbers_are_named(tmp_path: Path, roles: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'description = "x"\n{roles}\n')
    with pytest.raises(SettingsError) as caught:
        load_profile(str(path))
    assert f"{path}: roles" in caught.value.what and said in caught.value.why
    assert "two-resident" in caught.value.fix and "[roles]" in caught.value.fix


def test_a_profile_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b'description = "\xff"\n')
    with pytest.raises(SettingsError, match=r"mine\.toml is not valid TOML"):
        load_profile(str(path))


def _command(tmp_path: Path, environ: dict[str, str] | None = None, **keys: object) -> list[str]:
    profile = Profile.model_validate({"description": "x", **keys})
    command = server_command(profile, Path("/ckpt/FL2VA"), run_dir=tmp_path, environ=environ or {})
    return [*command.argv, *(f"{k}={v}" for k, v in command.environment.items())]


def test_the_command_is_vllm_serve_omni_behind_the_launcher(tmp_path: Path) -> None:
    words = _command(tmp_path)
    assert words[:6] == [sys.executable, "-m", "vllm_h3_plugin.host.launch", "serve", "/ckpt/FL2VA", "--omni"]
    assert "--trust-remote-code" in words
    assert words[words.index("--host") + 1] == "127.0.0.1"


@pytest.mark.parametrize(("recipe", "flag"), [("fp8", True), ("fp8-tensor", True), ("bf16", False)])
def test_the_recipe_decides_the_quantization_flag(tmp_path: Path, recipe: str, flag: bool) -> None:
    words = _command(tmp_path, recipe=recipe)
    assert ("--quantization" in words) is flag
    assert f"H3_RECIPE={recipe}" in words


def test_every_key_that_has_a_flag_reaches_the_command(tmp_path: Path) -> None:
    words = _command(tmp_path, task="ref2va", executor="mp", devices=2, attention="TORCH_SDPA", eager=True)
    text = " ".join(words)
    for part in (
        "--task-type ref2va",
        "--distributed-executor-backend mp",
        "--num-gpus 2 --usp 2 --text-encoder-tp-size 2 --vae-patch-parallel-size 2",
        "--diffusion-attention-backend TORCH_SDPA",
        "--enforce-eager",
    ):
        assert part in text


def test_ranks_on_several_machines_are_the_plugins_executor_with_everything_cut_between_them(tmp_path: Path) -> None:
    spark = load_profile("spark-2").model_dump(exclude={"description"})
    text = " ".join(_command(tmp_path, **spark))
    assert "--distributed-executor-backend vllm_h3_plugin.host.cluster.executor.RayDiffusionExecutor" in text
    assert "--num-gpus 2 --usp 2 --text-encoder-tp-size 2 --vae-patch-parallel-size 2" in text
    text = " ".join(_command(tmp_path, **{**spark, "devices": 4}))
    assert "--num-gpus 4 --usp 4 --text-encoder-tp-size 4 --vae-patch-parallel-size 4" in text


def test_plugins_of_the_caller_are_kept_and_the_hosts_own_is_named(tmp_path: Path) -> None:
    words = _command(tmp_path, {"VLLM_PLUGINS": "mine,h3"})
    assert "VLLM_PLUGINS=mine,h3,h3_reference,vllm_omni_register_models" in words


def test_the_callers_environment_wins_over_defaults(tmp_path: Path) -> None:
    assert "HF_HUB_OFFLINE=0" in _command(tmp_path, {"HF_HUB_OFFLINE": "0"})


def test_the_hosts_deadlines_are_the_profiles_unless_the_caller_set_them(tmp_path: Path) -> None:
    # Compose passes a variable that nobody set as an empty one.
    words = _command(tmp_path, {"VLLM_OMNI_VIDEO_SYNC_TIMEOUT": "", "VLLM_OMNI_DLO_DP_WAVE_TIMEOUT": "90"})
    assert {"VLLM_OMNI_VIDEO_SYNC_TIMEOUT=3600", "VLLM_OMNI_DLO_DP_WAVE_TIMEOUT=90"} <= set(words)
    assert "VLLM_OMNI_VIDEO_SYNC_TIMEOUT=21600" in _command(tmp_path, request_timeout_s=21600)
    # A job is stopped before its worker would be ended.
    assert "VLLM_OMNI_DLO_DP_WAVE_TIMEOUT=604800" in _command(tmp_path)
    assert "VLLM_OMNI_DLO_DP_WAVE_TIMEOUT=7800" in _command(tmp_path, {"H3_JOB_TIMEOUT_S": "7200"})
    assert load_profile("spark-long").request_timeout_s > load_profile("spark").request_timeout_s > 600


def test_unknown_recipe_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="fp9"):
        _command(tmp_path, recipe="fp9")


def test_a_wildcard_address_is_reached_on_loopback(tmp_path: Path) -> None:
    profile = Profile(description="x", address="0.0.0.0", port=8123)
    assert server_command(profile, Path("c"), run_dir=tmp_path, environ={}).url == "http://127.0.0.1:8123"


@pytest.mark.parametrize(
    ("extra", "environ", "key"),
    [
        (["--api-key", "s3cret-a"], {}, "s3cret-a"),
        (["--api-key=s3cret-b"], {"VLLM_API_KEY": "s3cret-c"}, "s3cret-b"),
        ([], {"VLLM_API_KEY": "s3cret-c"}, "s3cret-c"),
        ([], {}, None),
    ],
)
def test_the_launcher_knows_the_key_that_guards_its_own_proof(
    tmp_path: Path, extra: list[str], environ: dict[str, str], key: str | None
) -> None:
    command = server_command(Profile(description="x"), Path("c"), run_dir=tmp_path, environ=environ, extra=extra)
    assert command.api_key == key
    assert key is None or key not in str(command)


@pytest.mark.parametrize(
    ("size", "name"), [((768, 448), "16:9"), ((1344, 768), "16:9"), ((64, 64), "1:1"), ((448, 768), "9:16")]
)
def test_a_size_names_the_nearest_ratio_that_the_host_takes(size: tuple[int, int], name: str) -> None:
    assert ratio_name(*size) == name


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "mine.toml")
    with pytest.raises(UsageError, match="is no file"):
        load_profile(str(tmp_path / "mine.toml"))
