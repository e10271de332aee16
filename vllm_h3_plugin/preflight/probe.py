# SPDX-License-Identifier: Apache-2.0
"""The one layer that asks the machine: from commands and files to the values of ``facts``.

Commands: docker, nvidia-smi, npu-smi, timedatectl; each only queries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_h3_plugin.preflight.check import Unknown, is_number
from vllm_h3_plugin.preflight.facts import (
    Ascend,
    Clock,
    DeviceProcess,
    Docker,
    Gpu,
    Image,
    ImageManifest,
    System,
)
from vllm_h3_plugin.preflight.machine import Machine, Ran

_GPU_FIELDS = ("index", "name", "driver_version", "compute_cap", "memory.total", "memory.free")
_REGISTRY_TIMEOUT_S = 25.0

# Everything that a container on an Ascend machine is given of the driver.
_ASCEND_FILES = (
    "/dev/davinci_manager",
    "/dev/devmm_svm",
    "/dev/hisi_hdc",
    "/usr/local/dcmi",
    "/usr/local/Ascend/driver/lib64",
    "/usr/local/Ascend/driver/version.info",
    "/etc/ascend_install.info",
)
_CARD_VARIABLES = ("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES")


def system(machine: Machine) -> System:
    """From ``uname`` and /etc/os-release."""
    kernel = machine.kernel()
    raw = machine.read(Path("/etc/os-release"))
    name: str | Unknown = raw if isinstance(raw, Unknown) else Unknown("/etc/os-release has no PRETTY_NAME")
    if not isinstance(raw, Unknown):
        match = re.search(r'^PRETTY_NAME="?([^"\n]*)', raw.decode("utf-8", "replace"), re.MULTILINE)
        name = match[1] if match else name
    return System(kernel.system, kernel.release, kernel.architecture, name)


def clock(machine: Machine) -> Clock:
    """The time, and whether ``timedatectl`` says that it is kept."""
    answer = machine.run(("timedatectl", "show", "--property=NTPSynchronized", "--value"))
    synchronized: bool | Unknown
    if isinstance(answer, Unknown):
        synchronized = answer
    elif answer.code == 0 and answer.stdout.strip() in ("yes", "no"):
        synchronized = answer.stdout.strip() == "yes"
    else:
        synchronized = Unknown(_said(answer, "timedatectl"))
    return Clock(machine.now(), synchronized)


def docker(machine: Machine) -> Docker | Unknown:
    """From ``docker info``."""
    answer = machine.run(("docker", "info", "--format", "{{json .}}"))
    if isinstance(answer, Unknown):
        return answer
    info = _json_object(answer.stdout)
    faults = _list((info or {}).get("ServerErrors"))
    if info is None or answer.code or faults:
        return Unknown(str(faults[0]) if faults else _said(answer, "docker info"))
    runtimes, devices = info.get("Runtimes"), _list(info.get("DiscoveredDevices"))
    return Docker(
        version=str(info.get("ServerVersion", "")),
        runtimes=tuple(sorted(runtimes)) if isinstance(runtimes, dict) else (),
        cdi_devices=tuple(
            str(device.get("ID", ""))
            for device in devices
            if isinstance(device, dict) and device.get("Source") == "cdi"
        ),
        architecture=str(info.get("Architecture", "")),
        root=str(info.get("DockerRootDir", "/var/lib/docker")),
    )


def compose(machine: Machine) -> str | Unknown:
    """Version of the compose plugin."""
    told = _told(machine, "docker compose", ("docker", "compose", "version", "--short"))
    return told if isinstance(told, Unknown) else told.strip()


def buildx(machine: Machine) -> str | Unknown:
    """Version of the buildx plugin, which ``make build`` needs."""
    told = _told(machine, "docker buildx", ("docker", "buildx", "version"))
    return told if isinstance(told, Unknown) else told.strip()


def gpus(machine: Machine) -> tuple[Gpu, ...] | Unknown:
    """From ``nvidia-smi``; memory that it calls N/A is None."""
    told = _nvidia_smi(machine, f"--query-gpu={','.join(_GPU_FIELDS)}")
    if isinstance(told, Unknown):
        return told
    found = []
    for line in filter(str.strip, told.splitlines()):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(_GPU_FIELDS) or not is_number(fields[0]):
            return Unknown("nvidia-smi answered with a line that is not understood")
        index, name, driver, capability, total, free = fields
        found.append(Gpu(int(index), name, driver, capability, _mib(total), _mib(free)))
    return tuple(found)


def gpu_processes(machine: Machine) -> tuple[DeviceProcess, ...] | Unknown:
    """Processes that compute on a device; a desktop that only draws is not among them."""
    told = _nvidia_smi(machine, "--query-compute-apps=pid,process_name,used_memory")
    if isinstance(told, Unknown):
        return told
    found = []
    for line in told.splitlines():
        pid, _, rest = line.partition(",")
        name, _, held = rest.rpartition(",")
        if is_number(pid.strip()):
            found.append(DeviceProcess(int(pid), Path(name.strip()).name or "?", _mib(held)))
    return tuple(found)


def ascend(machine: Machine) -> Ascend:
    """From device nodes, driver files and ``npu-smi info``."""
    nodes = (re.fullmatch(r"davinci(\d+)", name) for name in machine.names(Path("/dev")))
    present = tuple(sorted(int(match[1]) for match in nodes if match))
    cards, hidden_by = present, ""
    for variable in _CARD_VARIABLES:
        wanted = machine.environ.get(variable, "").strip()
        if re.fullmatch(r"\d+(\s*,\s*\d+)*", wanted):
            chosen = {int(number) for number in wanted.split(",")}
            cards = tuple(card for card in cards if card in chosen)
            hidden_by = hidden_by or (variable if cards != present else "")
    info = machine.run(("npu-smi", "info"))
    tool = info.reason if isinstance(info, Unknown) else (_said(info, "npu-smi info") if info.code else "")
    text = "" if isinstance(info, Unknown) else info.stdout
    version = machine.read(Path("/usr/local/Ascend/driver/version.info"))
    match = None if isinstance(version, Unknown) else re.search(rb"^Version=(\S+)", version, re.MULTILINE)
    missing = tuple(path for path in _ASCEND_FILES if not machine.exists(Path(path)))
    driver = match[1].decode("ascii", "replace") if match else ""
    return Ascend(cards, present, hidden_by, missing, driver, tool, _npu_processes(text))


def _npu_processes(text: str) -> tuple[DeviceProcess, ...]:
    """Rows ``| NPU chip | pid | name | MB |`` at the end of ``npu-smi info``."""
    rows = re.findall(r"^\|\s*\d+\s+\d+\s*\|\s*(\d+)\s*\|\s*(\S+)\s*\|\s*(\d+)\s*\|", text, re.MULTILINE)
    return tuple(DeviceProcess(int(pid), name, int(held) * 10**6) for pid, name, held in rows)


def volume_exists(machine: Machine, name: str) -> bool:
    """Whether the engine has a volume of that name."""
    answer = machine.run(("docker", "volume", "inspect", "--format", "{{.Name}}", name))
    return isinstance(answer, Ran) and answer.code == 0


def image(machine: Machine, reference: str, digest: str | None) -> Image:
    """Ask the registry for the digest first, which is what a build takes, and then for the tag."""
    if digest is None:
        return Image(reference, None, Unknown("no digest is pinned"), Unknown("not asked"), False)
    whole = f"{reference}@{digest}"
    local = machine.run(("docker", "image", "inspect", "--format", "{{.Id}}", whole))
    here = isinstance(local, Ran) and local.code == 0
    pinned = _manifest(machine, whole)
    tag = _manifest(machine, reference) if isinstance(pinned, ImageManifest) else Unknown("not asked")
    return Image(whole, digest, pinned, tag, here)


def _manifest(machine: Machine, reference: str) -> ImageManifest | Unknown:
    argv = ("docker", "buildx", "imagetools", "inspect", "--format", "{{json .Manifest}}", reference)
    answer = machine.run(argv, _REGISTRY_TIMEOUT_S)
    if isinstance(answer, Unknown):
        return answer
    found = _json_object(answer.stdout) if answer.code == 0 else None
    if found is None or not isinstance(found.get("digest"), str):
        return Unknown(_said(answer, "docker buildx imagetools"))
    platforms = {
        str(entry["platform"].get("architecture")): str(entry.get("digest"))
        for entry in _list(found.get("manifests"))
        if isinstance(entry, dict)
        and isinstance(entry.get("platform"), dict)
        and entry["platform"].get("os") == "linux"
    }
    return ImageManifest(found["digest"], platforms)


def _json_object(text: str) -> Mapping[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _mib(text: str) -> int | None:
    return int(text) * 2**20 if is_number(text.strip()) else None


def _nvidia_smi(machine: Machine, query: str) -> str | Unknown:
    return _told(machine, "nvidia-smi", ("nvidia-smi", query, "--format=csv,noheader,nounits"))


def _told(machine: Machine, program: str, argv: Sequence[str]) -> str | Unknown:
    """What a command printed, if it ended well; else why not."""
    answer = machine.run(argv)
    if isinstance(answer, Unknown):
        return answer
    return Unknown(_said(answer, program)) if answer.code else answer.stdout


def _said(answer: Ran, program: str) -> str:
    """The last line of what a failed command said."""
    lines = [line.strip() for line in f"{answer.stdout}\n{answer.stderr}".splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"{program} ended with code {answer.code} and said nothing"
