# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 doctor``: is this environment, as it is, fit to serve H3?"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import typer

from vllm_h3_plugin.errors import H3Error, one_line

if TYPE_CHECKING:
    from vllm_h3_plugin.quantization.precision import Method


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    check: str
    ok: bool
    detail: str
    fix: str = ""


def doctor(
    reference: bool = typer.Option(
        False, "--reference", help="Check on the CPU reference platform. [default: as H3_REFERENCE says]"
    ),
    as_json: bool = typer.Option(False, "--json", help="End with one JSON line."),
) -> None:
    """Check host, plugin and the five contracts in this environment.

    Runs without a checkpoint: versions against launch/image.lock, the plugin's entry points as the host loads them,
    ffmpeg, the kernels that FP8 (on Ascend INT8) needs on this device, on Ascend torch_npu's operators as they are
    declared, those of a step (each compiled and held to its twin; one that fails is replaced by the host's, which is no
    fault), and the five loading contracts (qkv_layout, loader_contract, fc1_layout, fp8_quantizer, adaln_bf16) on a
    small real host model. Exit code 0 only if all hold.

    \b
    vllm-h3 doctor
    vllm-h3 doctor --reference --json
    """
    from vllm_h3_plugin.cli.console import emit_json, stderr, stdout
    from vllm_h3_plugin.serving.command import HOST_ENVIRONMENT

    if reference:
        os.environ["H3_REFERENCE"] = "1"
    for name, value in HOST_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # The host logs to stdout unless told otherwise; stdout is for the result.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    findings: list[Finding] = []
    with stderr().status("checking versions, plugin and kernels"):
        for name, check in _CHECKS.items():
            findings.append(_find(name, check))
            if not findings[-1].ok and name in ("settings", "host", "plugin"):
                break  # what follows would only repeat it
        else:
            findings.extend(_contracts())
    stdout().print(_table(findings))
    healthy = all(finding.ok for finding in findings)
    if as_json:
        emit_json(healthy, findings=[asdict(finding) for finding in findings])
    sys.exit(0 if healthy else 1)


def _find(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, check())
    except H3Error as exc:
        return Finding(name, False, f"{exc.what}: {exc.why}" if exc.why else exc.what, exc.fix)
    except Exception as exc:  # noqa: BLE001 - a driver or a package may raise anything; the other checks still say something
        return Finding(name, False, one_line(exc))


def _settings() -> str:
    from vllm_h3_plugin import settings

    found = settings.load()
    return "reference platform" if found.reference else "real platform"


def _host() -> str:
    from vllm_h3_plugin.pins import installed_host

    return str(installed_host())


def _plugin() -> str:
    from vllm_h3_plugin import __version__
    from vllm_h3_plugin.host.launch import prove_plugin_loads

    prove_plugin_loads()
    return f"vllm-h3-plugin {__version__} registers and the host resolves H3 to it"


def _platform() -> str:
    import torch

    from vllm_h3_plugin.host.standalone import describe_platform

    return f"{describe_platform()}, torch {torch.__version__}"


def _kernels() -> str:
    from vllm_h3_plugin.host.standalone import platform_device
    from vllm_h3_plugin.quantization.contract import choose_backend_name
    from vllm_h3_plugin.quantization.cutlass_fp8 import system_facts

    device = platform_device()
    name, reason = choose_backend_name(None, system_facts(device), _method(device.type))
    return f"{name}: {reason}"


def _method(device_type: str) -> Method:
    """What the default recipe of a kind of device quantizes by."""
    return "int8" if device_type == "npu" else "fp8"


def _operators() -> str:
    from vllm_h3_plugin.host.standalone import platform_device
    from vllm_h3_plugin.quantization.npu_operators import OPERATORS, check_operators, loaded_schema

    device = platform_device()
    if device.type != "npu":
        return f"not applicable: {', '.join(OPERATORS)} are Ascend's and this device is {device.type}"
    return check_operators(loaded_schema)


def _step() -> str:
    from vllm_h3_plugin.host.standalone import platform_device
    from vllm_h3_plugin.host.step_kernels import choose_kernels
    from vllm_h3_plugin.quantization.contract import choose_backend
    from vllm_h3_plugin.quantization.cutlass_fp8 import system_facts

    device = platform_device()
    return choose_kernels(device, choose_backend(None, system_facts(device), _method(device.type))[0]).describe()


def _attention() -> str:
    from vllm_h3_plugin.host.standalone import platform_device

    device = platform_device()
    if device.type != "cuda":
        return f"the host's own: the plugin chooses a kernel on CUDA, and this device is {device.type}"
    from vllm_h3_plugin.attention.device import device_capability, device_facts, find_flash
    from vllm_h3_plugin.attention.preference import availability, explain

    facts = device_facts(device, find_flash(device_capability(device)))
    return explain(facts.capability, availability(facts.capability, facts.cudnn, facts.flash))


def _ffmpeg() -> str:
    from vllm_h3_plugin.video.tools import find_ffmpeg

    return str(find_ffmpeg())


_CHECKS: dict[str, Callable[[], str]] = {
    "settings": _settings,
    "host": _host,
    "plugin": _plugin,
    "platform": _platform,
    "kernels": _kernels,
    "operators": _operators,
    "step": _step,
    "attention": _attention,
    "ffmpeg": _ffmpeg,
}


def _contracts() -> list[Finding]:
    from vllm_h3_plugin.host.contracts import run_contracts

    return [Finding(outcome.name, outcome.ok, outcome.detail) for outcome in run_contracts()]


def _table(findings: list[Finding]):  # type: ignore[no-untyped-def]
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("check", "", "detail", "fix"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(finding.check, "ok" if finding.ok else "FAIL", finding.detail, finding.fix)
    return table
