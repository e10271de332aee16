# SPDX-License-Identifier: Apache-2.0
"""Order of the checks. A check whose ground has failed is left out: it would only say the same again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_h3_plugin.preflight import probe
from vllm_h3_plugin.preflight.check import Check, State
from vllm_h3_plugin.preflight.checks import accelerators, containers, files, room, system
from vllm_h3_plugin.preflight.expected import CONTAINER_USER, Expected, Kind
from vllm_h3_plugin.preflight.facts import Docker
from vllm_h3_plugin.preflight.need import GIB
from vllm_h3_plugin.preflight.survey import Survey, readable_by
from vllm_h3_plugin.preflight.wanted import size_bytes


@dataclass(frozen=True)
class Step:
    """One check in the order.

    Attributes:
        name: as in the check that it makes.
        make: asks the survey and judges.
        ground: checks that must not have failed.
        applies: whether the profile has any use for it.
    """

    name: str
    make: Callable[[Survey], Check]
    ground: tuple[str, ...] = ()
    applies: Callable[[Expected], bool] = lambda expected: True


@dataclass(frozen=True)
class Report:
    """What preflight found.

    Attributes:
        skipped: check that was left out -> the failed one that it stands on.
    """

    checks: tuple[Check, ...]
    skipped: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not any(check.state is State.FAIL for check in self.checks)

    def count(self, state: State) -> int:
        """Checks that ended in a state."""
        return sum(check.state is state for check in self.checks)


def run_preflight(survey: Survey, *, deep: bool = False, on_step: Callable[[str], None] = lambda name: None) -> Report:
    """Run all checks that apply.

    Args:
        deep: read every shard and compare its checksum, last.
        on_step: told the name of each check before it is made.
    """
    checks: list[Check] = []
    stopped: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for step in STEPS:
        if not step.applies(survey.wanted.expected) or (step.name == "checksums" and not deep):
            continue
        cause = next((stopped[ground] for ground in step.ground if ground in stopped), None)
        if cause is not None:
            skipped[step.name] = stopped[step.name] = cause
            continue
        on_step(step.name)
        check = step.make(survey)
        checks.append(check)
        if check.state is State.FAIL:
            stopped[step.name] = step.name
    return Report(tuple(checks), skipped)


def _containers(expected: Expected) -> bool:
    return expected.containers


def _cuda(expected: Expected) -> bool:
    return expected.cuda


def _ascend(expected: Expected) -> bool:
    return expected.kind is Kind.ASCEND


def _real(expected: Expected) -> bool:
    return expected.kind is not Kind.REFERENCE


def _unified_memory(survey: Survey) -> Check:
    floor = int(survey.values.memory_floor_gib * GIB)
    return room.unified_memory(survey.memory, survey.sound_need, floor)


def _device_memory(survey: Survey) -> Check:
    if all(device.unified for device in survey.devices):
        return _unified_memory(survey)
    return room.device_memory(survey.devices, survey.sound_need)


def _nvidia_runtime(survey: Survey) -> Check:
    assert isinstance(survey.docker, Docker)
    return containers.nvidia_runtime(survey.docker)


def _disk(survey: Survey) -> Check:
    values, containers_used = survey.values, survey.wanted.expected.containers
    return room.disk(
        survey.room(),
        survey.sound_need,
        containers=containers_used,
        image_here=containers_used and survey.image.local,
        snapshots=values.snapshot != "off",
        tables=int(values.adaln_disk_gib * GIB),
    )


def _port(survey: Survey) -> Check:
    profile = survey.wanted.profile
    return system.port(profile.address, profile.port, survey.machine.bind(profile.address, profile.port))


def _mounted_checkpoint(survey: Survey) -> Check:
    root, leading_out, unreadable = survey.as_mounted(CONTAINER_USER)
    return files.mounted_checkpoint(root, leading_out, unreadable, CONTAINER_USER)


def _memory_limit(survey: Survey) -> Check:
    text = survey.wanted.memory_limit
    unified = survey.wanted.expected.kind is Kind.SPARK
    return room.container_memory(text, size_bytes(text or ""), survey.memory, survey.sound_need, unified=unified)


def _access(survey: Survey) -> Check:
    contained = survey.wanted.expected.containers
    file = survey.wanted.key_file if contained else survey.values.api_key_file
    key = None
    if file is not None:
        key = survey.machine.read(file) if survey.machine.exists(file) else b""
    readable = file is None or readable_by(file, CONTAINER_USER)
    return system.access(survey.wanted.profile.address, file, key, contained=contained, readable=readable)


def _shared_memory(survey: Survey) -> Check:
    if survey.wanted.expected.containers:
        text = survey.wanted.shm_size
        return room.container_shared_memory(text, size_bytes(text))
    return room.shared_memory(survey.machine.disk(Path("/dev/shm")))


def _cards(survey: Survey) -> Check:
    found, wanted = probe.ascend(survey.machine), survey.wanted
    if wanted.expected.containers:
        return accelerators.passed_cards(found, wanted.expected, wanted.cards)
    return accelerators.cards(found, wanted.expected)


STEPS: tuple[Step, ...] = (
    Step("architecture", lambda s: system.architecture(probe.system(s.machine), s.wanted.expected)),
    Step("system", lambda s: system.operating_system(probe.system(s.machine))),
    Step("clock", lambda s: system.clock(probe.clock(s.machine))),
    Step(".env", lambda s: files.env_file(s.wanted.env_file, s.wanted.env_path, s.wanted.known)),
    Step("settings", lambda s: files.settings(s.settings)),
    Step("licence", lambda s: files.licence(s.values), ("settings",), _real),
    Step("docker", lambda s: containers.engine(s.docker), (), _containers),
    Step("compose", lambda s: containers.compose(probe.compose(s.machine)), ("docker",), _containers),
    Step("buildx", lambda s: containers.buildx(probe.buildx(s.machine)), ("docker",), _containers),
    Step("NVIDIA runtime", _nvidia_runtime, ("docker",), lambda e: e.containers and e.cuda),
    Step(
        "image",
        lambda s: containers.image(s.image, probe.system(s.machine).architecture),
        ("architecture", "docker"),
        _containers,
    ),
    Step("GPU", lambda s: accelerators.gpu(s.gpus, s.wanted.expected), (), _cuda),
    Step("driver", lambda s: accelerators.driver(s.devices, s.wanted.expected), ("GPU",), _cuda),
    Step("driver", lambda s: accelerators.ascend_driver(probe.ascend(s.machine)), (), _ascend),
    Step("cards", _cards, (), _ascend),
    Step(
        "other processes",
        lambda s: accelerators.processes(probe.gpu_processes(s.machine), s.wanted.expected.kind),
        ("GPU",),
        _cuda,
    ),
    Step(
        "other processes",
        lambda s: accelerators.processes(probe.ascend(s.machine).processes, s.wanted.expected.kind),
        ("driver",),
        _ascend,
    ),
    Step("checkpoint", lambda s: files.checkpoint(s.inventory, s.checkpoint, s.served[1] if s.checkpoint else None)),
    Step("checkpoint in the container", _mounted_checkpoint, ("checkpoint",), _containers),
    Step("recipe", lambda s: files.recipe(s.need), ("settings",)),
    Step("memory", _unified_memory, ("settings", "recipe"), lambda e: e.kind is Kind.SPARK),
    Step("memory", _device_memory, ("GPU", "settings", "recipe"), lambda e: e.kind is Kind.NVIDIA),
    Step(
        "memory limit", _memory_limit, ("settings", "recipe"), lambda e: e.containers and e.kind is not Kind.REFERENCE
    ),
    Step("swap", lambda s: room.swap(s.memory), (), _real),
    Step("/dev/shm", _shared_memory, (), _real),
    Step("disk", _disk, ("settings", "recipe", "docker"), _real),
    Step("port", _port),
    Step("access", _access, ("settings",)),
    Step("checksums", lambda s: files.checksums(s.checksums()), ("settings", "checkpoint")),
)
"""Every check, in order: what costs nothing first, so that a wrong machine is known at once."""
