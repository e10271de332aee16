# SPDX-License-Identifier: Apache-2.0
"""Measure ranks on one base and INT8, and write ``docs/results/ranks.json``: ``python -m tools.measure_ranks``.

Runs in a host's environment, without an accelerator: processes of this machine for the base, the reference backend for
INT8. Minutes on two cores. A figure that could not be measured is null and says why.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from tools.environment import ROOT
from tools.measure_demo import RESULTS, hardware, versions
from tools.results import Cell, Result, write_result

RANKS, MIB, PROMPTS = 4, 512, 20
WIDTHS = (1024, 5376, 14336)
REPEATS = 9
_GIB = 2**30

Figures = dict[str, float | None]

MOST = {
    "bytes_read_over_copy": 1.02,
    "pss_over_copy": 1.1,
    "warm_weight_bytes": 0.0,
    "reload_over_memcpy": 1.5,
    "int8_relative_error": 0.013,
}
LEAST = {"int8_dit_cosine": 0.999}
"""What is asked of each figure."""


def measure_base(folder: Path) -> tuple[Figures, list[dict[str, Cell]]]:
    """Four processes on a base that is not in the page cache: what they read, what they hold, what prompts read."""
    from tools.rank_processes import KEY, drop_from_cache, run_ranks, write_base
    from vllm_h3_plugin.checkpoint.snapshot import open_snapshot

    written = write_base(folder, MIB)
    snapshot = open_snapshot(folder, KEY)
    assert snapshot is not None
    with snapshot:
        nbytes = snapshot.nbytes
    drop_from_cache(written)
    found = run_ranks(folder, RANKS, mib=MIB, prompts=PROMPTS)
    rows: list[dict[str, Cell]] = [
        {
            "What": f"rank {rank.rank}",
            "Read from disk, GiB": round(rank.read_bytes / _GIB, 4),
            "Share of memory, GiB": round(rank.pss / _GIB, 4),
            "of it anonymous, GiB": round(rank.pss_anon / _GIB, 4),
            f"Read in {PROMPTS} prompts, bytes": rank.warm_read_bytes,
        }
        for rank in found
    ]
    rows.append({"What": "one copy", "Read from disk, GiB": round(nbytes / _GIB, 4)})
    figures: Figures = {
        "bytes_read_over_copy": round(sum(rank.read_bytes for rank in found) / nbytes, 4),
        "pss_over_copy": round(sum(rank.pss for rank in found) / nbytes, 4),
        "warm_weight_bytes": sum(rank.warm_read_bytes for rank in found),
    }
    return figures, rows


def measure_reload(folder: Path) -> tuple[Figures, list[dict[str, Cell]]]:
    """A stage that comes back from the base, against a copy of its bytes to memory that is there, one thread each."""
    import torch

    from tools.rank_processes import KEY, WHOLE, write_base
    from vllm_h3_plugin.checkpoint.safetensors_header import TensorRecord
    from vllm_h3_plugin.checkpoint.shared_base import SharedBase
    from vllm_h3_plugin.checkpoint.snapshot import open_snapshot
    from vllm_h3_plugin.memory.hot_cache import HotCache, Source

    class Bytes:
        def __init__(self, base: SharedBase, record: TensorRecord) -> None:
            self.base, self.record = base, record

        def read_into(self, out: torch.Tensor, offset: int) -> None:
            self.base.read_into(WHOLE, self.record, out, offset)

    torch.set_num_threads(1)
    write_base(folder, MIB)
    snapshot = open_snapshot(folder, KEY)
    assert snapshot is not None
    with SharedBase(snapshot) as base:
        records = {record.name: record for record in base.snapshot.file(WHOLE).tensors}
        held = {name: base.read(WHOLE, record) for name, record in records.items()}
        copies = [tensor.reshape(-1).view(torch.uint8).clone() for tensor in held.values()]

        def source(name: str, data: torch.Tensor) -> Source:
            return Bytes(base, records[name])

        targets = [torch.zeros_like(copied) for copied in copies]
        cache = HotCache(("dit",))
        stage = cache.add("dit", held, source)
        before = [tensor.clone() for tensor in held.values()]
        reloads, memcpys = [], []
        for _ in range(REPEATS):
            cache.drop("dit")
            begun = time.perf_counter()
            with cache.use("dit"):
                reloads.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            for target, copied in zip(targets, copies, strict=True):
                target.copy_(copied)
            memcpys.append(time.perf_counter() - begun)
        equal = all(torch.equal(one, other) for one, other in zip(before, held.values(), strict=True))
        assert equal, "a stage came back with other bytes"
        reload_s, memcpy_s = statistics.median(reloads), statistics.median(memcpys)
    rows: list[dict[str, Cell]] = [
        {"What": f"reload of a stage, GiB/s, median of {REPEATS}", "Value": round(stage.nbytes / _GIB / reload_s, 2)},
        {
            "What": "copy of its bytes into memory that is there, GiB/s",
            "Value": round(stage.nbytes / _GIB / memcpy_s, 2),
        },
    ]
    return {"reload_over_memcpy": round(reload_s / memcpy_s, 3)}, rows


def measure_int8_linear() -> tuple[Figures, list[dict[str, Cell]]]:
    """One linear with INT8 weights and activations on Gaussian data, against FP32, by the width of its sums."""
    import torch

    from vllm_h3_plugin.quantization.precision import Precision
    from vllm_h3_plugin.quantization.reference import Reference

    backend = Reference("int8")
    rows: list[dict[str, Cell]] = []
    errors = []
    for width in WIDTHS:
        generator = torch.Generator().manual_seed(width)
        weight = torch.randn(1024, width, generator=generator)
        x = torch.randn(256, width, generator=generator)
        packed = backend.pack(*backend.quantize_weight(weight, Precision.INT8, path="linear"))
        want = x @ weight.T
        got = backend.apply(x, packed, None).float()
        errors.append(float((got - want).norm() / want.norm()))
        rows.append({"What": f"INT8 linear, K = {width}: relative error", "Value": float(f"{errors[-1]:.4g}")})
    return {"int8_relative_error": float(f"{max(errors):.4g}")}, rows


def measure_int8_dit() -> tuple[Figures, list[dict[str, Cell]]]:
    """One forward of the host's DiT in INT8 against BF16, synthetic weights; the smaller cosine of video and audio."""
    from tests.contract import dit_inputs as h3
    from vllm_h3_plugin.checkpoint.synthetic import tiny_dit
    from vllm_h3_plugin.host.register import register
    from vllm_h3_plugin.host.standalone import single_rank

    config = tiny_dit(layers=8, refiner_layers=2, hidden=512, heads=8, head_dim=64, ffn=1024)
    weights = h3.random_weights(config)
    register()
    with single_rank() as device:
        request = h3.make_request("fl2va", device)
        inputs = h3.forward_inputs(request, 0.4, 0.3)
        want = h3.host_velocity(h3.host_dit(config, weights, device), request, inputs)
        int8 = h3.host_dit(config, weights, device, h3.precision_plan("int8", config))
        got = h3.host_velocity(int8, request, inputs)
    found = {part: h3.cosine(*pair) for part, pair in zip(("video", "audio"), zip(got, want, strict=True), strict=True)}
    rows: list[dict[str, Cell]] = [
        {"What": f"INT8 DiT forward against BF16, {part}: cosine", "Value": f"{value:.6f}"}
        for part, value in found.items()
    ]
    return {"int8_dit_cosine": float(f"{min(found.values()):.6f}")}, rows


def missed(figures: Mapping[str, float | None]) -> str:
    """Which figures are not what is asked, in a sentence; empty if all are, or were not measured."""
    words = [
        f"`{name}` ({value}, asked {sign} {asked:g})"
        for bounds, sign in ((MOST, "<="), (LEAST, ">="))
        for name, asked in bounds.items()
        if (value := figures.get(name)) is not None and (value > asked if sign == "<=" else value < asked)
    ]
    return f" Missed: {', '.join(words)}." if words else ""


def main() -> int:
    """Measure each, print it, and write all."""
    os.environ["H3_REFERENCE"] = "1"  # before vLLM is imported: it discovers its platform once
    figures: Figures = {}
    rows: list[dict[str, Cell]] = []
    reasons: dict[str, str] = {}
    scratch = ROOT / ".cache"
    scratch.mkdir(exist_ok=True)
    # Temporary files of the system may lie in memory, where nothing is ever read from a disk.
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        measurements: list[tuple[tuple[str, ...], Callable[[], Any]]] = [
            (("bytes_read_over_copy", "pss_over_copy", "warm_weight_bytes"), lambda: measure_base(Path(folder, "a"))),
            (("reload_over_memcpy",), lambda: measure_reload(Path(folder, "b"))),
            (("int8_relative_error",), measure_int8_linear),
            (("int8_dit_cosine",), measure_int8_dit),
        ]
        for names, measure in measurements:
            try:
                found, more = measure()
            except Exception as exc:  # noqa: BLE001 -- a failure is a row that says so
                found, more = dict.fromkeys(names), []
                reasons |= dict.fromkeys(names, f"the measurement failed: {type(exc).__name__}: {exc}"[:300])
            print(found, file=sys.stderr, flush=True)
            figures |= found
            rows += more
    result = Result(
        title="Ranks on one read-only base, a stage's way back, and INT8",
        command="python -m tools.measure_ranks",
        date=date.today().isoformat(),
        hardware=hardware(),
        versions=versions(),
        rows=rows,
        ratios=figures,
        reasons=reasons,
        notes=f"{RANKS} processes of one machine and a base of {MIB} MiB of random INT8 weights, its pages dropped "
        "first: three quarters are taken whole, as views, one quarter is cut between the ranks and copied, as the text "
        "encoder is. Bytes read are `/proc/PID/io`'s; a rank's share of memory is its share of the mapped files "
        "(`smaps`) and the growth of its anonymous memory, which is the interpreter's own to some MiB. A prompt reads "
        "every weight once. Reload: from the base into new memory of the CPU, which stands for the card and needs "
        "no slot; no accelerator was used, so the slot and the copy to a card are not in it. INT8 linear: 256 rows, "
        "1024 columns, Gaussian, against FP32; the figure is that of the widest sums, the FFN's, which are the worst: "
        "the wider a row of Gaussian numbers, the larger its largest one, and with it the step. INT8 DiT: 8 "
        "blocks of width 512, first and last frame given, one forward." + missed(figures),
    )
    print(write_result(RESULTS, "ranks", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
