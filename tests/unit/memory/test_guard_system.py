# SPDX-License-Identifier: Apache-2.0
"""The facts that the memory guard reads from the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from vllm_h3_plugin.memory import system
from vllm_h3_plugin.memory.system import AVAILABLE_HOOK, GIB, Holder, MemorySystem, guard_active, probe


def made(*, unified: bool, reference: bool = False) -> MemorySystem:
    return MemorySystem(unified, "MemAvailable", GIB, lambda: GIB, tuple, reference)


@pytest.mark.parametrize(
    ("mode", "unified", "reference", "active"),
    [
        ("auto", True, False, True),
        ("auto", False, False, False),
        ("auto", True, True, False),
        ("on", False, False, True),
        ("on", True, True, True),
        ("off", True, False, False),
    ],
)
def test_guard_is_on_by_itself_only_where_memory_is_unified(
    mode: str, unified: bool, reference: bool, active: bool
) -> None:
    assert guard_active(mode, made(unified=unified, reference=reference)) is active


def test_available_is_memavailable_of_the_kernel() -> None:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    kernel = int(lines["MemAvailable"].split()[0]) * 1024
    assert abs(probe("cpu").available() - kernel) < GIB


def test_hook_is_honoured_on_the_reference_platform_only_and_while_it_exists(tmp_path: Path) -> None:
    hook = tmp_path / AVAILABLE_HOOK
    reference, real = probe("cpu", reference=True, run_dir=tmp_path), probe("cpu", run_dir=tmp_path)
    hook.write_text("12345")
    assert reference.available() == 12345
    assert real.available() != 12345
    hook.unlink()
    assert reference.available() != 12345


def test_reference_platform_counts_as_unified() -> None:
    assert probe("cpu", reference=True).unified
    assert not probe("cpu").unified


@pytest.mark.parametrize("integrated", [0, 1])
def test_integrated_device_shares_memory_and_a_discrete_one_has_its_own(
    integrated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    properties = SimpleNamespace(is_integrated=integrated, name="H200", total_memory=139 * GIB)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (device * 7 * GIB, 139 * GIB))
    found = probe("cuda")
    assert found.unified is bool(integrated)
    if not integrated:
        assert (found.name, found.total_bytes, found.available()) == ("free memory of H200", 139 * GIB, 7 * GIB)
    else:
        assert found.name == "MemAvailable" and found.total_bytes == psutil.virtual_memory().total


def test_a_large_process_is_named_first() -> None:
    code = "import sys; hold = b'x' * (400 << 20); print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        found = {holder.pid: holder for holder in system.largest_processes(10_000)}
        assert found[child.pid].held_bytes > 400 << 20
        sizes = [holder.held_bytes for holder in system.largest_processes(10_000)]
        assert sizes == sorted(sizes, reverse=True)
        assert psutil.Process().pid not in found
    finally:
        child.communicate()


def test_processes_on_a_device_are_read_from_nvidia_smi() -> None:
    text = "12, /usr/bin/small, 100\n7, /opt/a, b/python3, 2048\n9, /usr/bin/gb10, [N/A]\n\n"
    assert system.parse_compute_apps(text) == (Holder(7, "python3", 2 * GIB), Holder(12, "small", 100 << 20))


def test_a_machine_without_nvidia_smi_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert system.device_holders() == ()
