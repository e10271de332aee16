# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-h3 bench step`` measures, and what it found, as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_h3_plugin.checkpoint.configs import DitConfig
from vllm_h3_plugin.memory.requests import RequestSize
from vllm_h3_plugin.quantization.recipe import AttentionPrecision

STOCK_BF16, STOCK_FP8, STOCK_SDPA, PLUGIN, FLOOR = "stock-bf16", "stock-fp8", "stock-sdpa", "plugin", "floor"
LOW_BIT = "lowbit"
COLUMNS = (STOCK_BF16, STOCK_FP8, STOCK_SDPA, PLUGIN, FLOOR, LOW_BIT)

SHORT_CLIP, LONG_CLIP = (768, 448, 56), (1344, 768, 124)
"""Width, height and frames of the sizes that the figures are about: about 6 000 and 38 000 tokens."""

LONG_TOKENS = 40_000
"""Above this a step takes a second and more, and fewer rounds say enough."""


def clip_of(size: RequestSize) -> tuple[int, int, int]:
    """Width, height and frames."""
    return size.width, size.height, size.frames


def default_layers(tokens: int) -> int:
    """How many blocks are timed at a size: less than 1.5 s of an H200 a step."""
    if tokens < 10_000:
        return 8
    return 4 if tokens <= LONG_TOKENS else 2


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        config: of the DiT; its number of layers is not read.
        sizes: in the order of measuring.
        layers: blocks at each size; None: :func:`default_layers`.
        columns: of :data:`COLUMNS`.
        rounds: turns that everything takes; at most 2 at sizes beyond the long clip.
        low_bit: precision of the column of that name.
        eager: do not compile the stock host's blocks, as its ``--enforce-eager``.
    """

    config: DitConfig
    sizes: Sequence[RequestSize]
    layers: int | None = None
    columns: Sequence[str] = COLUMNS
    rounds: int = 5
    eager: bool = False
    low_bit: AttentionPrecision = AttentionPrecision.FP8

    def depth(self, size: RequestSize) -> int:
        """Blocks at a size."""
        return self.layers or default_layers(size.tokens)

    def rounds_at(self, size: RequestSize) -> int:
        """Turns at a size."""
        return self.rounds if size.tokens <= LONG_TOKENS else min(self.rounds, 2)


@dataclass(frozen=True)
class Cell:
    """One column at one size. Times are medians in milliseconds; None: not measured, and ``note`` says why.

    Attributes:
        blocks_ms: of the blocks alone; of the floor: of its graph.
        forward_ms: of a whole step; ``outside_ms``: of a step without its blocks.
        busy_ms: of kernels in one whole step, by group; empty without a profiler of the device.
        compile_s: what the first step took longer than the later ones.
        activation_bytes: the most that a step had on the device beyond what was there before.
        flops: of the blocks' matrix multiplications and attention.
    """

    size: RequestSize
    layers: int
    column: str
    blocks_ms: float | None = None
    forward_ms: float | None = None
    outside_ms: float | None = None
    busy_ms: Mapping[str, float] = field(default_factory=dict)
    compile_s: float | None = None
    activation_bytes: int | None = None
    flops: int = 0
    note: str = ""


@dataclass(frozen=True)
class LowBit:
    """Attention in few bits at one size.

    Attributes:
        exact_ms: median of a whole step with cuDNN's attention in BF16.
        low_bit_ms: of the same step with the recipe's.
        cosine: of the step's video and audio rows, taken as one vector, between the two.
        layer_errors: relative error of each block's attention on the queries, keys and values of the exact step.
        layers: number of blocks.
    """

    size: RequestSize
    precision: str
    exact_ms: float
    low_bit_ms: float
    cosine: float
    layer_errors: Mapping[str, float] = field(default_factory=dict)
    layers: int = 0

    @property
    def speedup(self) -> float:
        """Of a whole step."""
        return self.exact_ms / self.low_bit_ms


@dataclass
class Found:
    """What was measured so far.

    Attributes:
        config: of the model, whole.
        low_bit: None: not measured, and ``low_bit_reason`` says why.
        lost: why nothing runs on the device any more; empty while it does.
        dram: bytes a block outside of matrix multiplications and attention, by column; else ``dram_reason``.
    """

    config: DitConfig
    cells: list[Cell] = field(default_factory=list)
    low_bit: LowBit | None = None
    low_bit_reason: str = "not measured (yet)"
    lost: str = ""
    dram: dict[str, float] = field(default_factory=dict)
    dram_reason: str = "not asked for: --dram"

    def cell(self, clip: tuple[int, int, int], column: str) -> Cell | None:
        """The cell of a clip (width, height, frames) and a column, if there is one."""
        return next((cell for cell in self.cells if clip_of(cell.size) == clip and cell.column == column), None)
