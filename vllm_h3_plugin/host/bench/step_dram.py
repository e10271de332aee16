# SPDX-License-Identifier: Apache-2.0
"""Bytes that a block moves through the device's memory, kernel by kernel, as NVIDIA's ``ncu`` counts them.

``ncu`` has to start the process that it looks into, so one column at one size is run by this module as a program.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_h3_plugin.errors import ToolMissingError
from vllm_h3_plugin.host.bench.clock import reason_of
from vllm_h3_plugin.host.bench.step_cells import PLUGIN, STOCK_FP8, Found, clip_of
from vllm_h3_plugin.host.bench.step_profile import by_group
from vllm_h3_plugin.memory.requests import RequestSize

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
LAYERS = 2
_TIMEOUT_S = 600
_USUAL_PLACE = "/usr/local/cuda/bin"


def find_ncu() -> str:
    """Path of ``ncu``.

    Raises:
        ToolMissingError: there is none.
    """
    found = shutil.which("ncu") or shutil.which("ncu", path=_USUAL_PLACE)
    if found is None:
        raise ToolMissingError(
            "ncu was not found",
            why=f"it is neither on PATH nor in {_USUAL_PLACE}",
            fix="Install NVIDIA Nsight Compute, or leave --dram out.",
        )
    return found


def command(ncu: str, log: Path, column: str, clip: tuple[int, int, int], text_tokens: int) -> list[str]:
    """How one column is run under ``ncu``; caches and clocks are left as they are in a step."""
    return [
        *(ncu, "--csv", "--log-file", str(log), "--print-units", "base", "--metrics", ",".join(METRICS)),
        *("--profile-from-start", "off", "--cache-control", "none", "--clock-control", "none"),
        *(sys.executable, "-m", __name__, column, *map(str, clip), str(text_tokens)),
    ]


def bytes_a_block(column: str, clip: tuple[int, int, int], text_tokens: int) -> float:
    """Bytes read and written a block outside of matrix multiplications and attention.

    Raises:
        ToolMissingError: no ``ncu``, or it may not count here; says what it said.
    """
    ncu = find_ncu()
    with TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        try:
            done = subprocess.run(
                command(ncu, log, column, clip, text_tokens), capture_output=True, text=True, timeout=_TIMEOUT_S
            )
        except subprocess.TimeoutExpired as exc:
            raise ToolMissingError(f"ncu did not end within {_TIMEOUT_S} s") from exc
        said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        groups = by_group(parse(said.splitlines()))
    outside = sum(value for group, value in groups.items() if group not in ("GEMM", "attention"))
    if done.returncode != 0 or not any(groups.values()):
        raise ToolMissingError(f"ncu counted nothing for {column}", why=_complaint(said, done.stdout, done.stderr))
    return outside / LAYERS


def measure_dram(found: Found, size: RequestSize, *, starts: Callable[[str], None] = lambda words: None) -> None:
    """Count for the plugin and for the stock host's FP8, into ``found``; what cannot be counted says why there."""
    found.dram_reason = ""
    for column in (PLUGIN, STOCK_FP8):
        starts(f"bytes of device memory: {column}")
        try:
            found.dram[column] = bytes_a_block(column, clip_of(size), size.text_tokens)
        except ToolMissingError as exc:
            found.dram_reason = reason_of(exc)
            return


def parse(lines: Sequence[str]) -> Iterator[tuple[str, float]]:
    """(kernel, bytes) of every line of ``ncu --csv`` that is about one of :data:`METRICS`."""
    start = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    for row in csv.DictReader(lines[start:]):
        if row.get("Metric Name") in METRICS:
            yield row["Kernel Name"], float(row["Metric Value"].replace(",", ""))


def _complaint(*texts: str) -> str:
    """The line in which ncu says what is wrong, or the last one."""
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "==ERROR==" in line), lines[-1] if lines else "it said nothing")


def main(arguments: Sequence[str]) -> None:
    """Run the blocks of one column once between the marks that ``ncu`` waits for."""
    import torch

    from vllm_h3_plugin.checkpoint.configs import DitConfig
    from vllm_h3_plugin.host.bench.step_models import RandomWeights, Request, build_plugin, build_stock
    from vllm_h3_plugin.host.register import register
    from vllm_h3_plugin.host.standalone import single_rank

    column, *numbers = arguments
    width, height, frames, text_tokens = map(int, numbers)
    register()
    with single_rank() as device, torch.inference_mode():
        weights = RandomWeights(DitConfig(num_layers=LAYERS), device)
        model = build_plugin(weights) if column == PLUGIN else build_stock(weights, fp8=True, eager=False)
        request = Request(model, RequestSize(width, height, frames, text_tokens=text_tokens), device)
        for _ in range(2):
            request.blocks()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        request.blocks()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main(sys.argv[1:])
