# SPDX-License-Identifier: Apache-2.0
"""Every matrix multiplication of the model by itself, on each kernel that can compute it, beside a measured roofline.

Operands are given quantized, so a time is that of the multiplication alone. Each is compared with plain torch on a
sample of its rows. Weights are taken in turn from enough copies that no cache holds them, as in the model, where a
weight is read once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from vllm_h3_plugin.checkpoint.configs import DitConfig, TextEncoderConfig
from vllm_h3_plugin.checkpoint.linears import linear_layers
from vllm_h3_plugin.checkpoint.synthetic import tiny_text
from vllm_h3_plugin.errors import BackendError
from vllm_h3_plugin.host.bench.clock import calls_for, device_ms, in_turns, reason_of
from vllm_h3_plugin.host.bench.gemm_kernels import (
    Operands,
    Prepared,
    Shape,
    dtype_of,
    kernels,
    roofline_kernels,
)

_BLOCK = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
BLOCK_LAYERS = tuple(name.rpartition(".")[2] for name in _BLOCK)
"""Names of a block's shapes."""

_TEXT = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
# On the CPU only the code is tried, not the machine.
_BATCH_MS = {"cuda": 20.0, "cpu": 1.0}
_SQUARES = {"cuda": (4096, 8192), "cpu": (128,)}
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 24}


@dataclass(frozen=True)
class Cell:
    """One shape on one kernel.

    Attributes:
        ms: median; None: it failed, and ``failed`` says why.
        error: ``|got - want| / |want|`` on a sample of rows, against the reference in FP32 on the same operands.
    """

    shape: Shape
    kernel: str
    ms: float | None = None
    error: float | None = None
    failed: str = ""

    @property
    def tflops(self) -> float | None:
        """TFLOP/s."""
        return self.shape.flops / self.ms / 1e9 if self.ms else None


@dataclass(frozen=True)
class Roofline:
    """What this device reached in this run.

    Attributes:
        tflops: by dtype, the best of large square multiplications.
        source: by dtype, which one that was.
        gb_s: of a large copy on the device, reads and writes both counted, 10^9 bytes.
        failed: kernels that could not be tried, with the reason.
    """

    tflops: dict[str, float]
    source: dict[str, str]
    gb_s: float
    failed: dict[str, str]

    def bounds_ms(self, cell: Cell) -> tuple[float, float] | None:
        """The least time that arithmetic and that memory takes; None without a peak of the cell's dtype."""
        dtype = dtype_of(cell.kernel)
        if dtype not in self.tflops:
            return None
        element = 1 if dtype == "fp8" else 2
        return cell.shape.flops / self.tflops[dtype] / 1e9, cell.shape.nbytes(element) / self.gb_s / 1e6

    def share(self, cell: Cell) -> float | None:
        """The larger bound over the measured time."""
        bounds = self.bounds_ms(cell)
        return None if bounds is None or not cell.ms else max(bounds) / cell.ms


@dataclass
class Found:
    """What was measured so far.

    Attributes:
        multiprocessors: of the device; None on the CPU.
        architecture: of the device, such as ``SM121``.
    """

    roofline: Roofline
    multiprocessors: int | None
    architecture: str
    cells: list[Cell] = field(default_factory=list)


def shapes(
    dit: DitConfig, rows: Sequence[int], text_rows: int, text: TextEncoderConfig | None = None
) -> tuple[Shape, ...]:
    """Every shape of the DiT: a block's at each number of packed rows, the refiner's at the prompt's.

    Args:
        rows: tokens of the packed sequence, one number a clip size.
        text_rows: tokens of the prompt.
        text: also the text encoder's decoder layers.
    """
    linears = {spec.path: spec for spec in linear_layers(dit, text or tiny_text())}

    def of(prefix: str, names: Iterable[str], m: int, label: str = "") -> list[Shape]:
        specs = [linears[prefix + name] for name in names]
        return [
            Shape(f"{label}{spec.path.rpartition('.')[2]}", m, spec.out_features, spec.in_features) for spec in specs
        ]

    found = [shape for m in rows for shape in of("transformer.blocks.0.", _BLOCK, m)]
    found += of("transformer.token_refiner.blocks.0.", _BLOCK, text_rows, "refiner ")
    found += of("transformer.", ("condition_proj",), text_rows)
    if text is not None:
        found += of("text_encoder.text_model.layers.0.", _TEXT, text_rows, "text ")
    return tuple(found)


@torch.inference_mode()
def measure(
    wanted: Sequence[Shape],
    device: torch.device,
    rounds: int,
    *,
    starts: Callable[[str], None] = lambda words: None,
    ends: Callable[[Found], None] = lambda found: None,
) -> Found:
    """Measure the roofline, then every shape; kernels of one shape take turns.

    Args:
        starts: told what is measured next.
        ends: sees what there is after the roofline and after each shape.
    """
    if device.type == "cuda":
        import vllm._custom_ops  # noqa: F401 - loads torch.ops._C
    starts("roofline")
    architecture, multiprocessors = "the CPU", None
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        architecture, multiprocessors = f"SM{facts.major}{facts.minor}", facts.multi_processor_count
    found = Found(_roofline(device, rounds), multiprocessors, architecture)
    ends(found)
    for shape in wanted:
        starts(f"{shape.layer}, {shape.m} x {shape.n} x {shape.k}")
        found.cells += _measure(shape, device, rounds)
        ends(found)
    return found


def _measure(shape: Shape, device: torch.device, rounds: int) -> list[Cell]:
    operands = Operands(shape, device)
    cells: dict[str, Cell] = {}
    ready: dict[str, Prepared] = {}
    for name, kernel in kernels(device).items():
        try:
            ready[name] = kernel(operands)
            cells[name] = Cell(shape, name, error=_error(ready[name], operands))
        except Exception as exc:  # noqa: BLE001 - a kernel may raise anything; the others still say something
            ready.pop(name, None)
            cells[name] = Cell(shape, name, failed=reason_of(exc))
    times, failed = _times(ready, device, rounds)
    for name, cell in cells.items():
        if name in times:
            cells[name] = Cell(shape, name, times[name], cell.error)
        elif name in failed:
            cells[name] = Cell(shape, name, None, cell.error, failed[name])
    return list(cells.values())


def _error(prepared: Prepared, operands: Operands) -> float:
    got = prepared.works[0]()[operands.sample].float()
    want = prepared.expected().float()
    return ((got - want).norm() / want.norm()).item()


def _times(ready: dict[str, Prepared], device: torch.device, rounds: int) -> tuple[dict[str, float], dict[str, str]]:
    counts: dict[str, int] = {}

    def turn(name: str) -> float:
        works = ready[name].works
        if name not in counts:
            counts[name] = calls_for(works, device, _BATCH_MS[device.type])
        return device_ms(works, device, counts[name])

    return in_turns({name: lambda name=name: turn(name) for name in ready}, rounds, warm=1)  # type: ignore[misc]


def _roofline(device: torch.device, rounds: int) -> Roofline:
    tflops: dict[str, float] = {}
    source: dict[str, str] = {}
    failures: dict[str, str] = {}
    for size in _SQUARES[device.type]:
        shape = Shape("square", size, size, size)
        operands = Operands(shape, device)
        ready = {}
        for name, kernel in roofline_kernels(device).items():
            try:
                ready[name] = kernel(operands)
            except Exception as exc:  # noqa: BLE001 - as above
                failures[name] = reason_of(exc)
        times, failed = _times(ready, device, rounds)
        failures |= failed
        for name, ms in times.items():
            reached, dtype = shape.flops / ms / 1e9, dtype_of(name)
            if reached > tflops.get(dtype, 0):
                tflops[dtype], source[dtype] = reached, f"{name}, {size} x {size} x {size}"
        del operands, ready
    if not tflops:
        raise BackendError(
            "no kernel multiplies on this device", why="; ".join(f"{name}: {why}" for name, why in failures.items())
        )
    return Roofline(tflops, source, _copy_gb_s(device, rounds), failures)


def _copy_gb_s(device: torch.device, rounds: int) -> float:
    values = torch.zeros(_COPY_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(values)
    works = [lambda: target.copy_(values)]
    count = calls_for(works, device, _BATCH_MS[device.type])
    times, _ = in_turns({"copy": lambda: device_ms(works, device, count)}, rounds, warm=1)
    return 2 * values.nbytes / times["copy"] / 1e6
