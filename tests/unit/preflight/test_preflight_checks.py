# SPDX-License-Identifier: Apache-2.0
"""Each check by itself: thresholds, what it says and the way out; and the layer that asks a real machine."""

from __future__ import annotations

import os
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.unit.preflight.preflight_machine import GIB, MadeMachine, Preflight
from vllm_h3_plugin.preflight import probe
from vllm_h3_plugin.preflight.check import Check, State, Unknown
from vllm_h3_plugin.preflight.checks import accelerators, room, system
from vllm_h3_plugin.preflight.expected import Kind, expected_of
from vllm_h3_plugin.preflight.facts import Clock, Gpu, Room, System
from vllm_h3_plugin.preflight.machine import Disk, Kernel, LocalMachine, Memory, Ran
from vllm_h3_plugin.preflight.need import Need, need_of
from vllm_h3_plugin.preflight.wanted import size_bytes
from vllm_h3_plugin.serving.profile import Profile, load_profile

SPARK = expected_of("spark", load_profile("spark"))
GB10 = Gpu(0, "NVIDIA GB10", "580.173.02", "12.1", None, None)


@pytest.fixture(scope="module")
def need() -> Need:
    """Of the real model with the default recipe."""
    return need_of("fp8", None)


def _is(check: Check, state: State, *words: str) -> None:
    assert check.state is state, check
    for word in words:
        assert word in f"{check.detail} {check.remedy}"
    assert bool(check.remedy) is (state is not State.PASS)


@pytest.mark.parametrize(
    ("name", "kind", "capability"),
    [
        ("spark", Kind.SPARK, "12.1"),
        ("/etc/h3/spark-long.toml", Kind.SPARK, "12.1"),
        ("h200", Kind.NVIDIA, "9.0"),
        ("mine.toml", Kind.NVIDIA, None),
        ("ascend-4", Kind.ASCEND, None),
        ("reference", Kind.REFERENCE, None),
    ],
)
def test_a_profiles_name_says_what_machine_it_is_for(name: str, kind: Kind, capability: str | None) -> None:
    found = expected_of(name, Profile(description="x", devices=2))
    assert (found.kind, found.capability) == (kind, capability)
    assert found.cards == (0 if kind is Kind.REFERENCE else 2)


def test_a_gpu_that_cannot_be_seen_is_too_few_or_of_another_generation() -> None:
    _is(accelerators.gpu(Unknown("nvidia-smi is not installed"), SPARK), State.FAIL, "Install the NVIDIA driver")
    two = expected_of("h200", Profile(description="x", devices=2))
    _is(accelerators.gpu((Gpu(0, "H200", "580.1", "9.0", GIB, GIB),), two), State.FAIL, "1 visible and 2 configured")
    other = Gpu(0, "NVIDIA RTX 5090", "580.1", "12.0", 32 * GIB, 32 * GIB)
    _is(accelerators.gpu((GB10,), SPARK), State.PASS, "GB10")
    _is(accelerators.gpu((other,), SPARK), State.FAIL, "RTX 5090", "12.0", "12.1", "--profile")


@pytest.mark.parametrize(
    ("version", "state"), [("580.173.02", State.PASS), ("575.51", State.FAIL), ("N/A", State.WARN)]
)
def test_the_driver_must_be_new_enough_for_the_hosts_cuda(version: str, state: State) -> None:
    found = Gpu(0, "NVIDIA GB10", version, "12.1", None, None)
    _is(accelerators.driver((found,), SPARK), state, version)


@pytest.mark.parametrize(
    ("available", "state"),
    [(63.1, State.FAIL), (63.3, State.WARN), (66.0, State.PASS), (110.0, State.PASS)],
)
def test_unified_memory_is_held_against_the_recipes_need(need: Need, available: float, state: State) -> None:
    memory = Memory(119 * GIB, int(available * GIB), 0, 0)
    _is(room.unified_memory(memory, need, 6 * GIB), state, "recipe fp8 (true size)")


def test_a_model_that_never_fits_is_told_apart_from_one_that_does_not_fit_now() -> None:
    memory = Memory(119 * GIB, 110 * GIB, 0, 0)
    _is(room.unified_memory(memory, need_of("bf16", None), 6 * GIB), State.FAIL, "the machine has", "--recipe")


@pytest.mark.parametrize(("free", "state"), [(50, State.FAIL), (58, State.WARN), (80, State.PASS)])
def test_a_gpu_with_its_own_memory_is_held_against_the_load(need: Need, free: int, state: State) -> None:
    found = (Gpu(0, "GPU", "580.1", "9.0", 141 * GIB, free * GIB), Gpu(1, "GPU", "580.1", "9.0", 141 * GIB, 139 * GIB))
    _is(room.device_memory(found, need), state, f"{free}.0 GiB free")


def test_swap_in_use_and_a_small_shm_are_named() -> None:
    _is(room.swap(Memory(119 * GIB, 100 * GIB, 16 * GIB, 3 * GIB)), State.WARN, "3.0 GiB of 16.0 GiB", "swapoff")
    _is(room.swap(Memory(119 * GIB, 100 * GIB, 16 * GIB, 0)), State.PASS)
    _is(room.swap(Memory(119 * GIB, 100 * GIB, 0, 0)), State.PASS, "none")
    small = Disk("/dev/shm", 2, 64 * 2**20, 64 * 2**20)
    _is(room.shared_memory(small), State.FAIL, "bus error", "--shm-size")
    _is(room.shared_memory(Disk("/dev/shm", 2, 2 * GIB, 2 * GIB)), State.WARN, "4.2 GiB")
    _is(room.shared_memory(Disk("/dev", 2, GIB, GIB)), State.FAIL, "tmpfs")


@pytest.mark.parametrize(
    ("text", "size", "state"),
    [
        ("8g", 8 * GIB, State.PASS),
        ("512m", GIB // 2, State.WARN),
        ("8 GB", 8 * GIB, State.PASS),
        ("big", None, State.FAIL),
    ],
)
def test_the_containers_shm_is_as_compose_sizes_it(text: str, size: int | None, state: State) -> None:
    assert size_bytes(text) == size
    _is(room.container_shared_memory(text, size), state, text)


def _disk(need: Need, images: int, cache: int, *, same: bool, snapshot: bool = False, here: bool = False) -> Check:
    first = Disk("/var/lib/docker", 1, 999 * GIB, images * GIB)
    second = first if same else Disk("/cache", 2, 999 * GIB, cache * GIB)
    found = Room(first, second, snapshot)
    return room.disk(found, need, containers=True, image_here=here, snapshots=True, tables=20 * GIB)


def test_disk_needs_are_added_up_where_they_share_a_file_system(need: Need) -> None:
    _is(_disk(need, 50, 50, same=False), State.PASS, "/var/lib/docker", "/cache", "needed 30.0 GiB")
    _is(_disk(need, 50, 50, same=True), State.FAIL, "quantized snapshot 43.0 GiB", "H3_CACHE_DIR")
    _is(_disk(need, 50, 50, same=True, here=True), State.PASS, "needed 43.9 GiB")
    _is(_disk(need, 31, 1, same=False, snapshot=True), State.PASS, "AdaLN table")
    unknown = Room(Unknown("no docker root"), Disk("/", 1, GIB, GIB), True)
    found = room.disk(unknown, need, containers=True, image_here=False, snapshots=True, tables=0)
    _is(found, State.WARN, "no docker root", "df -h")


def test_other_systems_and_clocks() -> None:
    linux = System("Linux", "6.14", "aarch64", "Ubuntu 24.04")
    _is(system.operating_system(linux), State.PASS, "Ubuntu 24.04, kernel 6.14")
    _is(system.operating_system(System("Darwin", "24", "arm64", Unknown("x"))), State.FAIL, "Linux machine")
    wsl = System("Linux", "5.15-microsoft-standard-WSL2", "x86_64", "Ubuntu")
    _is(system.operating_system(wsl), State.WARN, "Windows")
    now = datetime(2026, 12, 1, tzinfo=UTC).timestamp()
    _is(system.clock(Clock(0.0, True)), State.FAIL, "1970-01-01", "timedatectl set-ntp true")
    _is(system.clock(Clock(now, False)), State.WARN, "no time server")
    _is(system.clock(Clock(now, Unknown("no timedatectl"))), State.PASS, "no timedatectl")


def test_answers_that_are_not_understood_become_reasons(machine: MadeMachine) -> None:
    machine.commands["nvidia-smi --query-gpu"] = Ran(0, "GB10\n")
    assert probe.gpus(machine) == Unknown("nvidia-smi answered with a line that is not understood")
    machine.commands["nvidia-smi --query-gpu"] = Ran(9, "", "NVIDIA-SMI has failed: no driver\n")
    assert probe.gpus(machine) == Unknown("NVIDIA-SMI has failed: no driver")
    machine.commands["docker info"] = Ran(0, "not json")
    assert probe.docker(machine) == Unknown("not json")
    machine.commands["timedatectl show"] = Ran(1, "")
    assert isinstance(probe.clock(machine).synchronized, Unknown)


def test_the_local_machine_answers_without_changing_anything(tmp_path: Path) -> None:
    local = LocalMachine()
    assert local.run((sys.executable, "-c", "print('x')")) == Ran(0, "x\n")
    missing = local.run(("no-such-program-here",))
    assert missing == Unknown("no-such-program-here is not installed, or not on PATH")
    slow = local.run((sys.executable, "-c", "import time; time.sleep(9)"), 0.2)
    assert isinstance(slow, Unknown) and "no answer in 0.2 s" in slow.reason
    (tmp_path / "a").write_bytes(b"x")
    assert local.read(tmp_path / "a") == b"x"
    assert local.read(tmp_path) == Unknown(f"{tmp_path} is no file")
    assert local.read(tmp_path / "b") == Unknown(f"{tmp_path / 'b'} is not there")
    os.mkfifo(tmp_path / "pipe")
    assert isinstance(local.read(tmp_path / "pipe"), Unknown)
    room_there = local.disk(tmp_path / "not" / "yet")
    assert isinstance(room_there, Disk) and room_there.path == str(tmp_path) and room_there.free_bytes > 0
    assert local.names(tmp_path) == ("a", "pipe")
    assert local.kernel().system == "Linux"
    assert local.memory().total_bytes > local.memory().available_bytes > 0
    assert isinstance(local.kernel(), Kernel)


def test_the_local_machine_sees_a_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert LocalMachine().bind("127.0.0.1", number) == "Address already in use"
    assert LocalMachine().bind("127.0.0.1", number) == ""


def test_no_check_warns_or_fails_without_a_remedy(preflight: Preflight, machine: MadeMachine) -> None:
    machine.environ = {}
    machine.commands = {start: Unknown(f"{start} is not installed") for start in machine.commands}
    machine.uname = Kernel("FreeBSD", "14", "riscv64")
    machine.main_memory = Memory(GIB, GIB, GIB, GIB)
    machine.shm = machine.free_disk = 0
    machine.ports_taken = (8000,)
    machine.time = 0.0
    done = preflight(where=None)
    assert len(done.failed) >= 9
    for check in done.answer["checks"]:
        assert bool(check["remedy"]) is (check["state"] != "pass"), check
