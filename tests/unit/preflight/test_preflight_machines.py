# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 preflight`` on one good machine and on every bad one: what fails, what is left out, and the way out."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.preflight.preflight_machine import (
    ASCEND_FILES,
    DOCKER_INFO,
    GIB,
    IMAGE,
    NPU_SMI_BUSY,
    NPU_SMI_IDLE,
    PINNED,
    SPARK_GPU,
    MadeMachine,
    Preflight,
    docker_info,
    manifest,
)
from vllm_h3_plugin.cli.main import main
from vllm_h3_plugin.preflight.check import Unknown
from vllm_h3_plugin.preflight.machine import Kernel, Ran

ROOT = Path(__file__).resolve().parents[3]
H200 = "0, NVIDIA H200, 580.95.05, 9.0, 143771, 143000\n"


def test_a_spark_in_good_order_is_ready(preflight: Preflight) -> None:
    done = preflight()
    assert (done.code, done.failed, done.warned, done.answer["ok"]) == (0, [], [], True)
    assert set(done.states) == {
        *("architecture", "system", "clock", ".env", "settings", "licence", "docker", "compose", "NVIDIA runtime"),
        *("image", "GPU", "driver", "other processes", "checkpoint", "recipe", "memory", "memory limit", "swap"),
        *("/dev/shm", "disk", "port", "access", "buildx", "checkpoint in the container"),
    }
    assert "this machine is ready for profile spark" in done.out


def test_memory_that_nvidia_smi_calls_not_available_is_normal_on_a_spark(preflight: Preflight) -> None:
    assert "nvidia-smi says N/A, as it should" in preflight().check("GPU")["detail"]


def test_nothing_is_run_that_could_change_the_machine(preflight: Preflight, machine: MadeMachine) -> None:
    preflight()
    docker = (
        "info",
        "compose version",
        "image inspect",
        "volume inspect",
        "buildx imagetools inspect",
        "buildx version",
    )
    queries = (*(f"docker {words}" for words in docker), "nvidia-smi --query", "timedatectl show")
    assert machine.asked
    for line in machine.asked:
        assert line.startswith(queries), line


def test_an_x86_machine_is_no_spark_and_its_image_is_not_asked_for(preflight: Preflight, machine: MadeMachine) -> None:
    machine.uname = Kernel("Linux", "6.8.0", "x86_64")
    done = preflight()
    assert (done.code, done.failed) == (1, ["architecture"])
    assert "x86_64" in done.check("architecture")["detail"]
    assert "--profile" in done.check("architecture")["remedy"]
    assert done.answer["skipped"] == {"image": "architecture"}


def test_an_x86_machine_with_an_h200_is_fine_with_a_note(preflight: Preflight, machine: MadeMachine) -> None:
    machine.uname = Kernel("Linux", "6.8.0", "x86_64")
    machine.commands["nvidia-smi --query-gpu"] = Ran(0, H200)
    done = preflight("--profile", "h200")
    assert (done.code, done.failed) == (0, [])
    assert "no Spark" in done.check("architecture")["detail"]
    assert "the GPU has 139.6 GiB free" in done.check("memory")["detail"]


def test_60_gib_free_is_too_little_and_the_holders_are_named(preflight: Preflight, machine: MadeMachine) -> None:
    machine.main_memory = replace(
        machine.main_memory, available_bytes=60 * GIB, holders=("VLLM::EngineCore (pid 4711, 51.0 GiB)",)
    )
    done = preflight()
    assert (done.code, done.failed) == (1, ["memory"])
    detail = done.check("memory")["detail"]
    assert "MemAvailable is 60.0 GiB and 63.2 GiB are needed" in detail
    assert "VLLM::EngineCore (pid 4711, 51.0 GiB)" in detail
    assert "make down" in done.check("memory")["remedy"]


def test_memory_for_the_server_but_for_no_usual_clip_is_a_warning(preflight: Preflight, machine: MadeMachine) -> None:
    machine.main_memory = replace(machine.main_memory, available_bytes=64 * GIB)
    done = preflight()
    assert (done.code, done.warned) == (0, ["memory"])


def test_a_recipe_with_resident_adaln_weights_keeps_the_classic_gate(
    preflight: Preflight, machine: MadeMachine
) -> None:
    machine.main_memory = replace(machine.main_memory, available_bytes=104 * GIB)
    assert preflight("--recipe", "fp8").failed == []
    done = preflight("--recipe", "fp8-tensor")
    assert done.failed == ["memory"]
    assert "105.0 GiB" in done.check("memory")["detail"]


def test_a_busy_gpu_names_who_is_on_it(preflight: Preflight, machine: MadeMachine) -> None:
    machine.commands["nvidia-smi --query-compute-apps"] = Ran(0, "4711, /usr/bin/python3, [N/A]\n")
    done = preflight()
    assert (done.code, done.failed) == (1, ["other processes"])
    assert "python3 (pid 4711)" in done.check("other processes")["detail"]
    assert "End them" in done.check("other processes")["remedy"]


def test_a_desktop_on_the_gpu_is_no_reason_to_stop(preflight: Preflight, machine: MadeMachine) -> None:
    machine.commands["nvidia-smi --query-compute-apps"] = Ran(0, "99, /usr/bin/gnome-shell, 120\n")
    done = preflight()
    assert (done.code, done.warned) == (0, ["other processes"])
    machine.commands["nvidia-smi --query-compute-apps"] = Ran(0, "99, gnome-shell, 120\n4711, python3, 51000\n")
    assert preflight().failed == ["other processes"]


def test_a_docker_without_a_way_to_the_gpu(preflight: Preflight, machine: MadeMachine) -> None:
    machine.commands["docker info"] = docker_info(Runtimes={"runc": {}})
    done = preflight()
    assert (done.code, done.failed) == (1, ["NVIDIA runtime"])
    assert "no runtime `nvidia`" in done.check("NVIDIA runtime")["detail"]
    assert "nvidia-ctk runtime configure" in done.check("NVIDIA runtime")["remedy"]


def test_a_gpu_that_docker_knows_by_cdi_needs_no_runtime(preflight: Preflight, machine: MadeMachine) -> None:
    devices = [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}]
    machine.commands["docker info"] = docker_info(Runtimes={"runc": {}}, DiscoveredDevices=devices)
    assert preflight().failed == []


@pytest.mark.parametrize(
    ("answer", "remedy"),
    [
        (Unknown("docker is not installed, or not on PATH"), "--without-docker"),
        (Ran(1, "", "permission denied while trying to connect to the Docker daemon socket"), "usermod -aG docker"),
        (docker_info(ServerErrors=["Cannot connect to the Docker daemon"]), "systemctl start docker"),
    ],
)
def test_without_an_engine_what_stands_on_it_is_left_out(
    preflight: Preflight, machine: MadeMachine, answer: Ran | Unknown, remedy: str
) -> None:
    machine.commands["docker info"] = answer
    done = preflight()
    assert (done.code, done.failed) == (1, ["docker"])
    assert remedy in done.check("docker")["remedy"]
    assert set(done.answer["skipped"]) == {"compose", "buildx", "NVIDIA runtime", "image", "disk"}
    assert "not looked at until docker is right: compose, buildx, NVIDIA runtime, image, disk" in done.out
    assert not any("imagetools" in line for line in machine.asked)


def test_a_server_without_a_container_asks_for_no_engine(preflight: Preflight, machine: MadeMachine) -> None:
    machine.commands["docker info"] = Unknown("docker is not installed, or not on PATH")
    done = preflight("--without-docker")
    assert (done.code, done.failed) == (0, [])
    assert not any(line.startswith("docker") for line in machine.asked)


def test_compose_1_is_too_old(preflight: Preflight, machine: MadeMachine) -> None:
    machine.commands["docker compose version"] = Ran(0, "1.29.2\n")
    assert "docker-compose-plugin" in preflight().check("compose")["remedy"]


def test_a_registry_that_answers_with_another_digest_is_not_trusted(preflight: Preflight, machine: MadeMachine) -> None:
    other = "sha256:" + "0" * 64
    machine.commands["docker buildx imagetools inspect"] = Ran(0, manifest(other))
    done = preflight()
    assert (done.code, done.failed) == (1, ["image"])
    detail = done.check("image")["detail"]
    assert "digest mismatch" in detail and PINNED in detail and other in detail
    assert "Do not build" in done.check("image")["remedy"]


def test_a_digest_that_the_registry_does_not_have(preflight: Preflight, machine: MadeMachine) -> None:
    machine.commands["docker buildx imagetools inspect"] = Ran(1, "", f"ERROR: {IMAGE.pinned}: not found")
    done = preflight()
    assert done.failed == ["image"]
    assert "launch/image.lock" in done.check("image")["remedy"]


def test_an_image_without_this_architecture(preflight: Preflight, machine: MadeMachine) -> None:
    machine.commands["docker buildx imagetools inspect"] = Ran(0, manifest(PINNED, "amd64"))
    done = preflight()
    assert done.failed == ["image"]
    assert "no arm64 image; it has amd64" in done.check("image")["detail"]


def test_a_tag_that_has_moved_is_told_and_stops_nobody(preflight: Preflight, machine: MadeMachine) -> None:
    pinned = f"docker buildx imagetools inspect --format {{{{json .Manifest}}}} {IMAGE.pinned}"
    moved = Ran(0, manifest("sha256:" + "1" * 64))
    machine.commands = {pinned: Ran(0, manifest()), **machine.commands, "docker buildx imagetools inspect": moved}
    done = preflight()
    assert (done.code, done.warned) == (0, ["image"])
    assert "moved on" in done.check("image")["detail"]


def test_a_machine_without_a_network_is_warned(preflight: Preflight, machine: MadeMachine) -> None:
    machine.commands["docker buildx imagetools inspect"] = Unknown("no answer in 25 s")
    done = preflight()
    assert (done.code, done.warned) == (0, ["image"])
    assert f"docker pull {IMAGE.pinned}" in done.check("image")["remedy"]
    machine.commands["docker image inspect"] = Ran(0, "sha256:abc")
    assert preflight().warned == []


def test_the_licence_must_be_accepted_by_name(preflight: Preflight, machine: MadeMachine) -> None:
    machine.environ = {}
    done = preflight()
    assert (done.code, done.failed) == (1, ["licence"])
    text = done.check("licence")["detail"]
    for place in ("United States", "European Union", "United Kingdom", "Republic of Korea", "showing its outputs"):
        assert place in text
    assert "H3_ACCEPT_LICENSE=yes" in done.check("licence")["remedy"]


def test_the_licence_may_be_accepted_in_the_env_file(preflight: Preflight, machine: MadeMachine) -> None:
    machine.environ = {}
    Path(".env").write_text("H3_ACCEPT_LICENSE=yes\n")
    assert preflight().failed == []


def test_a_taken_port(preflight: Preflight, machine: MadeMachine) -> None:
    machine.ports_taken = (8123,)
    assert preflight().failed == []
    done = preflight("--port", "8123")
    assert (done.code, done.failed) == (1, ["port"])
    assert "127.0.0.1:8123" in done.check("port")["detail"]
    assert "ss -ltnp" in done.check("port")["remedy"]


def test_an_env_file_from_windows(preflight: Preflight, machine: MadeMachine) -> None:
    machine.environ = {}
    Path(".env").write_bytes(b"H3_ACCEPT_LICENSE=yes\r\nH3_RECIPE=fp8\r\nVLLM_API_KEY=hunter2\r\n")
    done = preflight()
    assert (done.code, done.failed) == (1, [".env"])  # read as compose reads it: the licence is accepted
    assert "lines 1 to 3 (3) end in CRLF" in done.check(".env")["detail"]
    assert "sed -i 's/\\r$//' .env" in done.check(".env")["remedy"]
    assert "hunter2" not in done.out
    assert preflight("--env-file", "my env").check(".env")["detail"] == "my env is not there"
    Path("my env").write_bytes(b"export A=1\r\n")
    elsewhere = preflight("--env-file", "my env").check(".env")
    assert "sed -i 's/\\r$//' 'my env'" in elsewhere["remedy"]
    assert "`export`" in elsewhere["detail"]


def test_a_misspelt_setting_in_the_env_file(preflight: Preflight) -> None:
    Path(".env").write_text("# mine\nH3_RECIPPE=fp8\nH3_HOUSE=1\nVLLM_H3_PROT=1\n")
    Path("compose.yaml").write_text("services:\n  h3:\n    ports: ['${H3_HOUSE:?say which}:8000']\n")
    done = preflight()
    assert done.failed == [".env"]
    assert "line 2: nothing reads H3_RECIPPE" in done.check(".env")["detail"]
    assert "Did you mean H3_RECIPE?" in done.check(".env")["remedy"]
    assert "Did you mean VLLM_H3_PORT?" in done.check(".env")["remedy"]
    assert "H3_HOUSE" not in done.check(".env")["detail"]


def test_a_setting_with_a_value_that_it_cannot_take(preflight: Preflight) -> None:
    Path(".env").write_text("H3_SNAPSHOT=perhaps\n")
    done = preflight()
    assert done.failed == ["settings"]
    assert "H3_SNAPSHOT" in done.check("settings")["detail"]
    assert {"licence", "recipe", "memory", "disk"} <= set(done.answer["skipped"])


def test_an_env_file_that_was_named_must_be_there(preflight: Preflight) -> None:
    done = preflight("--env-file", "my.env")
    assert done.failed == [".env"]
    assert "my.env is not there" in done.check(".env")["detail"]


def test_a_checkpoint_one_folder_too_deep_and_too_high(preflight: Preflight, checkpoint: Path) -> None:
    deep = preflight(where=checkpoint / "transformer")
    assert deep.failed == ["checkpoint"]
    assert "it is a part of the checkpoint" in deep.check("checkpoint")["detail"]
    nested = checkpoint.parent.parent
    high = preflight(where=nested)
    assert (high.code, high.failed) == (1, ["checkpoint"])
    assert "FL2VA" in high.check("checkpoint")["remedy"]


def test_a_checkpoint_that_is_one_shard_short(preflight: Preflight, checkpoint: Path) -> None:
    shard = sorted((checkpoint / "transformer").glob("*.safetensors"))[1]
    shard.unlink()
    done = preflight()
    assert (done.code, done.failed) == (1, ["checkpoint"])
    assert shard.name in done.check("checkpoint")["detail"]
    assert "ownload" in done.check("checkpoint")["remedy"]


def test_the_env_file_alone_says_what_is_started(preflight: Preflight, machine: MadeMachine, checkpoint: Path) -> None:
    Path("api-key").write_text("s3cret\n")
    Path(".env").write_text(
        f"VLLM_H3_CHECKPOINT={checkpoint.parent}\nVLLM_H3_PORT=8123\nVLLM_H3_BIND=0.0.0.0\n"
        "VLLM_H3_API_KEY_FILE=./api-key\nVLLM_H3_PROFILE=spark\nVLLM_H3_SHM_SIZE=2g\n"
    )
    machine.ports_taken = (8123,)
    done = preflight(where=None)
    assert (done.failed, done.warned) == (["port"], ["/dev/shm"])
    assert "0.0.0.0:8123" in done.check("port")["detail"]
    assert "api-key" in done.check("access")["detail"] and "s3cret" not in done.out
    machine.environ = {**machine.environ, "VLLM_H3_PORT": "8124"}  # a variable of the shell wins
    assert preflight(where=None).failed == []


def test_a_server_open_to_others_without_a_key_and_with_an_empty_one(preflight: Preflight) -> None:
    Path(".env").write_text("VLLM_H3_BIND=0.0.0.0\n")
    done = preflight()
    assert (done.code, done.warned) == (0, ["access"])
    assert "VLLM_H3_API_KEY_FILE" in done.check("access")["remedy"]
    Path(".env").write_text("VLLM_H3_BIND=0.0.0.0\nVLLM_H3_API_KEY_FILE=key\n")
    Path("key").write_text("\n")
    assert preflight().failed == ["access"]
    Path("key").unlink()
    assert "openssl rand" in preflight().check("access")["remedy"]


def test_without_a_container_the_servers_own_key_file_is_looked_at(preflight: Preflight, machine: MadeMachine) -> None:
    machine.environ = {**machine.environ, "H3_API_KEY_FILE": "missing-key"}
    done = preflight("--without-docker")
    assert done.failed == ["access"] and "missing-key" in done.check("access")["detail"]
    Path("missing-key").write_text("k" * 32)
    assert preflight("--without-docker").failed == []


@pytest.mark.parametrize(
    ("limit", "outcome", "said"),
    [
        ("40g", "fail", "at least 6"),
        ("plenty", "fail", "'plenty' is no size"),
        ("118g", "warn", "at most 111g"),
        ("100g", "pass", "100.0 GiB of 119.0 GiB"),
    ],
)
def test_a_memory_limit_bears_the_server_and_leaves_the_machine_some(
    preflight: Preflight, limit: str, outcome: str, said: str
) -> None:
    Path(".env").write_text(f"VLLM_H3_MEMORY_LIMIT={limit}\n")
    check = preflight().check("memory limit")
    assert check["state"] == outcome and said in check["detail"] + check["remedy"], check


def test_a_port_that_is_none_is_named(preflight: Preflight, capsys: pytest.CaptureFixture[str]) -> None:
    Path(".env").write_text("VLLM_H3_PORT=http\n")
    with pytest.raises(SystemExit) as ended:
        main(["preflight"])
    assert ended.value.code == 2
    assert "VLLM_H3_PORT='http'" in capsys.readouterr().err


def test_a_list_of_checksums_is_found_where_the_container_has_it(preflight: Preflight, checkpoint: Path) -> None:
    Path(".env").write_text("H3_VERIFY_CHECKSUMS=/checkpoint/mine.sha256\n")
    with pytest.raises(SystemExit):
        main(["checksums", str(checkpoint), "--output", str(checkpoint.parent / "mine.sha256")])
    assert preflight("--deep").failed == []


def test_a_full_disk_and_one_that_may_hold_a_snapshot_already(preflight: Preflight, machine: MadeMachine) -> None:
    machine.free_disk = 60 * GIB
    done = preflight()
    assert done.failed == ["disk"]
    assert "image and build (an allowance) 30.0 GiB, quantized snapshot 43.0 GiB" in done.check("disk")["detail"]
    machine.commands["docker volume inspect"] = Ran(0, "vllm-h3_cache\n")
    assert preflight().warned == ["disk"]
    machine.free_disk = 10 * GIB
    assert preflight().failed == ["disk"]


def test_no_checkpoint_was_named(preflight: Preflight) -> None:
    done = preflight(where=None)
    assert done.failed == ["checkpoint"]
    assert "--checkpoint" in done.check("checkpoint")["remedy"]


def _ascend(machine: MadeMachine, cards: int) -> Path:
    profile = Path("ascend-4.toml")
    profile.write_text('description = "four cards"\ndevices = 4\nrecipe = "bf16"\n')
    machine.commands["npu-smi info"] = Ran(0, NPU_SMI_IDLE)
    machine.files["/usr/local/Ascend/driver/version.info"] = b"Version=25.2.0\n"
    machine.present = ASCEND_FILES
    machine.devices = ("davinci_manager", *(f"davinci{number}" for number in range(cards)))
    machine.environ = {**machine.environ, "VLLM_H3_MEMORY_LIMIT": "64g"}
    return profile


def test_a_memory_limit_that_has_no_default_is_asked_for(preflight: Preflight, machine: MadeMachine) -> None:
    profile = str(_ascend(machine, 4))
    machine.environ = {"H3_ACCEPT_LICENSE": "yes"}
    done = preflight("--profile", profile)
    assert done.failed == ["memory limit"] and "VLLM_H3_MEMORY_LIMIT" in done.check("memory limit")["detail"]


def test_four_cards_configured_and_two_visible(preflight: Preflight, machine: MadeMachine) -> None:
    done = preflight("--profile", str(_ascend(machine, 2)))
    assert (done.code, done.failed) == (1, ["cards"])
    assert "4 configured in profile ascend-4 and 2 visible" in done.check("cards")["detail"]
    assert "ASCEND_CARD_0" in done.check("cards")["remedy"]
    outside = preflight("--profile", "ascend-4.toml", "--without-docker")
    assert outside.failed == ["cards"]
    assert "4 configured in profile ascend-4 and 2 visible" in outside.check("cards")["detail"]
    assert "/dev/davinciN" in outside.check("cards")["remedy"]


def test_four_cards_of_which_a_variable_hides_two(preflight: Preflight, machine: MadeMachine) -> None:
    machine.environ = {**machine.environ, "ASCEND_RT_VISIBLE_DEVICES": "0,2"}
    done = preflight("--profile", str(_ascend(machine, 4)), "--without-docker")
    assert done.failed == ["cards"]
    assert "ASCEND_RT_VISIBLE_DEVICES hides the others" in done.check("cards")["detail"]


def test_an_ascend_machine_in_good_order(preflight: Preflight, machine: MadeMachine) -> None:
    done = preflight("--profile", str(_ascend(machine, 4)))
    assert (done.code, done.failed, done.warned) == (0, [], ["image"])  # no digest of that image is known
    assert "25.2.0" in done.check("driver")["detail"]
    assert "NVIDIA runtime" not in done.states


def test_an_ascend_driver_file_is_missing_and_a_card_is_busy(preflight: Preflight, machine: MadeMachine) -> None:
    profile = str(_ascend(machine, 4))
    machine.commands["npu-smi info"] = Ran(0, NPU_SMI_BUSY)
    assert "python3 (pid 4711" in preflight("--profile", profile).check("other processes")["detail"]
    machine.present = ASCEND_FILES[1:]
    done = preflight("--profile", profile)
    assert done.failed == ["driver"]
    assert "/dev/davinci_manager" in done.check("driver")["detail"]
    assert done.answer["skipped"]["other processes"] == "driver"


def test_the_reference_platform_asks_for_no_device_and_no_licence(preflight: Preflight, machine: MadeMachine) -> None:
    machine.environ = {}
    machine.commands = {"timedatectl": Ran(0, "yes")}
    assert preflight("--profile", "reference").failed == []


def test_deep_needs_a_list_and_finds_a_changed_shard(
    preflight: Preflight, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = preflight("--deep")
    assert done.failed == ["checksums"]
    assert f"vllm-h3 checksums {checkpoint}" in done.check("checksums")["remedy"]
    with pytest.raises(SystemExit):
        main(["checksums", str(checkpoint)])
    capsys.readouterr()
    assert preflight("--deep").failed == []
    shard = sorted((checkpoint / "transformer").glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.unlink()
    shard.write_bytes(data)
    assert preflight().failed == []
    bad = preflight("--deep")
    assert bad.failed == ["checksums"]
    assert shard.name in bad.check("checksums")["detail"]


def test_links_that_lead_out_of_the_mounted_folder_are_found_before_a_container_cannot_follow_them(
    preflight: Preflight, checkpoint: Path, tmp_path: Path
) -> None:
    shard = next(checkpoint.rglob("*.safetensors"))
    blob = tmp_path / "blobs" / "ab12"
    blob.parent.mkdir()
    shard.rename(blob)
    shard.symlink_to(blob)
    done = preflight()
    assert done.failed == ["checkpoint in the container"]
    assert str(shard) in done.check("checkpoint in the container")["detail"]
    assert "cp -rL" in done.check("checkpoint in the container")["remedy"]
    assert preflight("--without-docker").failed == []


def test_weights_that_the_containers_user_may_not_read_are_named(preflight: Preflight, checkpoint: Path) -> None:
    checkpoint.chmod(0o700)
    done = preflight()
    assert done.failed == ["checkpoint in the container"]
    assert "10001" in done.check("checkpoint in the container")["detail"]
    assert "chmod -R o+rX" in done.check("checkpoint in the container")["remedy"]


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("H3_API_KEY_FILE=./key", "VLLM_H3_API_KEY_FILE"),
        ("VLLM_API_KEY=abc", "VLLM_H3_API_KEY_FILE"),
        ("H3_CACHE_DIR=/big", "volume"),
    ],
)
def test_a_setting_that_compose_does_not_hand_on_is_no_setting(preflight: Preflight, line: str, instead: str) -> None:
    shutil.copy(ROOT / "compose.yaml", "compose.yaml")
    Path(".env").write_text(f"{line}\n")
    done = preflight()
    assert ".env" in done.failed and instead in done.check(".env")["remedy"]
    assert line.partition("=")[2] not in done.check(".env")["detail"]


def test_a_key_file_that_is_no_key_or_that_the_container_may_not_read(preflight: Preflight) -> None:
    Path(".env").write_text("VLLM_H3_API_KEY_FILE=key\n")
    Path("key").write_text("two words\n")
    done = preflight()
    assert done.failed == ["access"] and "two words" not in done.out
    Path("key").write_text("k" * 32)
    Path("key").chmod(0o600)
    done = preflight()
    assert done.failed == ["access"] and "chown 10001" in done.check("access")["remedy"]
    Path("key").chmod(0o644)
    assert preflight().failed == []


def test_docker_without_buildx_cannot_build(preflight: Preflight, machine: MadeMachine) -> None:
    machine.commands["docker buildx version"] = Ran(1, "", "docker: 'buildx' is not a docker command.")
    done = preflight()
    assert done.failed == ["buildx"] and "docker-buildx-plugin" in done.check("buildx")["remedy"]


ODD_DOCKER = [
    {"Runtimes": [{"a": 1}]},
    {"DiscoveredDevices": ["nvidia.com/gpu=0"]},
    {"ServerErrors": {"a": "b"}},
]


@pytest.mark.parametrize("odd", ODD_DOCKER)
def test_odd_answers_of_docker_are_answers(preflight: Preflight, machine: MadeMachine, odd: dict[str, object]) -> None:
    machine.commands["docker info"] = Ran(0, json.dumps({**DOCKER_INFO, **odd}))
    assert preflight().states


def test_numbers_in_other_scripts_and_values_without_end_are_no_traceback(
    preflight: Preflight, machine: MadeMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.commands["nvidia-smi --query-gpu"] = Ran(0, SPARK_GPU.replace("0, NVIDIA", "\u00b2, NVIDIA"))
    machine.commands["docker compose version"] = Ran(0, "\u00b2.1\n")
    machine.commands["docker buildx imagetools inspect"] = Ran(0, '{"digest": "sha256:ab", "manifests": [null]}')
    assert {"GPU", "compose"} <= set(preflight().failed)
    Path(".env").write_text(f"VLLM_H3_MEMORY_LIMIT={'9' * 400}g\n")
    assert "memory limit" in preflight().failed
    Path(".env").write_text("A0=xx\n" + "".join(f"A{n + 1}=$A{n}$A{n}\n" for n in range(60)))
    assert "grows beyond" in preflight().check(".env")["detail"]
    Path(".env").write_text("VLLM_H3_PORT=\u00b2\n")
    with pytest.raises(SystemExit) as ended:
        main(["preflight"])
    assert ended.value.code == 2 and "VLLM_H3_PORT" in capsys.readouterr().err


def test_an_env_file_that_leads_nowhere_or_is_enormous_is_not_taken_for_none(preflight: Preflight) -> None:
    Path(".env").symlink_to("gone")
    assert "leads nowhere" in preflight().check(".env")["detail"]
    Path(".env").unlink()
    Path(".env").write_bytes(b"#" * (1 << 20))
    assert "larger than 1 MiB" in preflight().check(".env")["detail"]


def test_a_checkpoint_one_folder_too_deep_names_the_one_above(preflight: Preflight, checkpoint: Path) -> None:
    Path(".env").write_text(f"VLLM_H3_CHECKPOINT={checkpoint}\n")
    done = preflight(where=None)
    assert "checkpoint" in done.failed and str(checkpoint.parent) in done.check("checkpoint")["remedy"]
