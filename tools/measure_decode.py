# SPDX-License-Identifier: Apache-2.0
"""Measure the decoding of a clip on this GPU: ``python -m tools.measure_decode``.

Runs ``vllm-h3 bench decode`` in a process of its own, keeps what it says in ``docs/results/decode.json``, and puts its
``vae_decode_speedup`` into ``docs/results/workloads.json``, whose other figures stay. A run that has no such figure, as
on a CPU, changes neither file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.environment import ROOT
from tools.measure_demo import RESULTS
from tools.results import parse_result, set_ratio, write_result

NAME, INTO, RATIO = "decode", "workloads", "vae_decode_speedup"


def keep(outcome: Path, results: Path) -> list[Path]:
    """Take over what the benchmark wrote.

    Args:
        outcome: its ``--output``.
        results: folder of measurements.

    Returns:
        The files that were written; none where the figure is null.

    Raises:
        UsageError: ``workloads.json`` is not there, or keeps no place for the figure.
    """
    result = parse_result(outcome.name, json.loads(outcome.read_text(encoding="utf-8")))
    speedup = result.ratios[RATIO]
    if speedup is None:
        return []
    return [set_ratio(results, INTO, RATIO, speedup), write_result(results, NAME, result)]


def main() -> int:
    """Measure and keep; words on the command line go to the benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder) / "decode.json"
        command = [str(Path(sys.executable).parent / "vllm-h3"), "bench", "decode", "--output", str(outcome)]
        code = subprocess.run([*command, *sys.argv[1:]], cwd=ROOT, check=False).returncode
        if code:
            return code
        kept = keep(outcome, RESULTS)
    for path in kept:
        print(path.relative_to(ROOT))
    if not kept:
        print(f"nothing kept: this run has no {RATIO}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
