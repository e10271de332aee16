# SPDX-License-Identifier: Apache-2.0
"""Clips of several sizes, lengths and steps through one server, and where the time of each went.

Each clip is a cell with a file of its own, ``NAME.cell.json`` beside the clip, written once the clip is verified. Cells
of several servers (recipes) lie in one folder and are read together.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_h3_plugin.checkpoint.atomic import replacing
from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.memory.operations import StepFlops
from vllm_h3_plugin.serving.answers import ask, count, finite, mapping, refusal
from vllm_h3_plugin.serving.client import VideoClient, VideoRequest
from vllm_h3_plugin.serving.clip_order import Order
from vllm_h3_plugin.serving.jobs.progress import (
    BUILDING_TABLE,
    DECODING,
    DECODING_AND_ENCODING,
    DENOISING,
    ENCODING_TEXT,
    ENCODING_VIDEO,
)
from vllm_h3_plugin.serving.limits import Deadline

SUFFIX = ".cell.json"
PHASES = {
    "text": (ENCODING_TEXT,),
    "table": (BUILDING_TABLE,),
    "denoise": (DENOISING,),
    "decode": (DECODING, DECODING_AND_ENCODING),
    "encode": (ENCODING_VIDEO,),
}
"""Columns, and the phases of a ledger that they sum up. What is encoded while the VAE decodes counts as decoding."""


class Cell(BaseModel):
    """One clip that was measured.

    Attributes:
        recipe: of the server that made it.
        repeat: 1 for the first clip of this kind.
        server: see :func:`~vllm_h3_plugin.serving.clip_record.server_facts`.
        step_flops: :class:`StepFlops` of its model; None from a server that does not tell.
        ledger: seconds and bytes as the job tells them; None if the server did not keep them.
        failed: why there is no clip; None if there is one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    recipe: str
    width: int
    height: int
    frames: int
    steps: int
    repeat: int
    server: dict[str, Any]
    step_flops: dict[str, int] | None = None
    ledger: dict[str, Any] | None = None
    failed: str | None = None

    @property
    def kind(self) -> tuple[str, int, int, int, int]:
        """What repeats share."""
        return self.recipe, self.width, self.height, self.frames, self.steps

    @property
    def name(self) -> str:
        """Of its clip and its files."""
        return f"{self.recipe}-{self.width}x{self.height}-{self.frames}f-{self.steps}s-{self.repeat}"

    def order(self, prompt: str, seed: int) -> Order:
        """What to ask for; each repeat has a seed of its own, so that none is taken for another."""
        request = VideoRequest(prompt, self.width, self.height, self.frames, self.steps, seed + self.repeat - 1)
        return Order(self.name, request)

    def seconds(self, column: str) -> float | None:
        """Seconds of one of :data:`PHASES`."""
        phases = mapping(mapping(self.ledger).get("phases"))
        found = [finite(phases[name]) for name in PHASES[column] if name in phases]
        known = [value for value in found if value is not None]
        return sum(known) if known else None

    @property
    def step_s(self) -> float | None:
        """Median seconds of a denoise step."""
        steps = mapping(self.ledger).get("steps_s")
        known = [value for value in map(finite, steps if isinstance(steps, list) else []) if value is not None]
        return statistics.median(known) if known else None

    @property
    def tokens(self) -> int | None:
        """Rows of the packed sequence."""
        return count(mapping(self.ledger).get("tokens"))

    @property
    def flops(self) -> int | None:
        """Of one step."""
        if self.step_flops is None or self.tokens is None:
            return None
        return StepFlops(**self.step_flops)(self.tokens)

    def write(self, folder: Path) -> Cell:
        """Write it into ``folder``; returns it."""
        with replacing(folder / f"{self.name}{SUFFIX}") as temporary:
            temporary.write_text(json.dumps(self.model_dump(), indent=1) + "\n", encoding="utf-8")
        return self


def matrix(
    info: dict[str, Any],
    server: dict[str, Any],
    sizes: Sequence[tuple[int, int]],
    frames: Sequence[int],
    steps: Sequence[int],
    repeats: int,
) -> list[Cell]:
    """The cells to be measured on a server, the cheapest first.

    Args:
        info: ``/v1/h3/info`` of the server.
        server: :func:`~vllm_h3_plugin.serving.clip_record.server_facts` of it.
    """
    worker = mapping(info["workers"][0])
    flops = mapping(worker.get("step_flops"))
    known = {name: value for name in ("per_token", "per_pair") if (value := count(flops.get(name))) is not None}
    wanted = {(w, h, f, s) for w, h in sizes for f in frames for s in steps}
    return [
        Cell(
            recipe=str(worker.get("recipe") or "unknown"),
            width=w,
            height=h,
            frames=f,
            steps=s,
            repeat=repeat,
            server=server,
            step_flops=known if len(known) == 2 else None,
        )
        for w, h, f, s in sorted(wanted, key=lambda cell: cell[0] * cell[1] * cell[2] * cell[3])
        for repeat in range(1, repeats + 1)
    ]


def fetch_ledger(client: VideoClient, job: str) -> dict[str, Any] | None:
    """Where a finished job's time went; None where the server does not keep it (any more).

    Raises:
        ServerError: the server refuses to tell.
    """
    answer = ask(client.http, Deadline(client.limits.stall_s), "GET", f"/v1/videos/{job}")
    if answer.status == 404:
        return None
    if answer.status != 200:
        raise refusal(answer, f"tell where the time of job {job} went")
    return mapping(mapping(answer.json()).get("ledger")) or None


def read_cells(folder: Path) -> list[Cell]:
    """All cells in a folder, by name.

    Raises:
        UsageError: a file with the suffix is none; it is named.
    """
    cells = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            cells.append(Cell.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError) as exc:
            why = exc.strerror or str(exc) if isinstance(exc, OSError) else str(exc.errors()[0]["msg"])
            raise UsageError(f"{path} is no cell of `vllm-h3 bench clip`", why=why, fix="Move it away.") from exc
    return cells


@dataclass(frozen=True)
class Row:
    """Repeats of one kind. Seconds are medians of those after the first where there are any, for the first warms up.

    Attributes:
        cells: the repeats that were made, by number.
        measured: of them, those that count.
        growth, predicted: a step's seconds and FLOPs over those of the fewest tokens of the same recipe; None where
            that cannot be told.
    """

    cells: tuple[Cell, ...]
    measured: tuple[Cell, ...]
    growth: float | None = None
    predicted: float | None = None

    @property
    def first(self) -> Cell:
        return self.cells[0]

    def median(self, column: str) -> float | None:
        """Of ``step`` or one of :data:`PHASES`."""
        values = [cell.step_s if column == "step" else cell.seconds(column) for cell in self.measured]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None


def rows(cells: Iterable[Cell]) -> list[Row]:
    """Cells by kind, recipes apart, few tokens first, and how a step's time grows beside its FLOPs."""
    kinds: dict[tuple[str, int, int, int, int], list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.repeat):
        kinds.setdefault(cell.kind, []).append(cell)
    found = []
    for repeats in kinds.values():
        made = [cell for cell in repeats if cell.failed is None]
        found.append(Row(tuple(repeats), tuple(made[1:] or made)))
    found.sort(
        key=lambda row: (row.first.recipe, row.first.width * row.first.height * row.first.frames, row.first.steps)
    )
    least: dict[str, Row] = {}
    for row in found:
        tokens = row.measured[0].tokens if row.measured else None
        if tokens and row.median("step"):
            held = least.get(row.first.recipe)
            if held is None or (held.measured[0].tokens or 0) > tokens:
                least[row.first.recipe] = row
    return [_grown(row, least.get(row.first.recipe)) for row in found]


def _grown(row: Row, least: Row | None) -> Row:
    if least is None or not row.measured:
        return row
    step, base = row.median("step"), least.median("step")
    flops, base_flops = row.measured[0].flops, least.measured[0].flops
    return Row(
        row.cells,
        row.measured,
        step / base if step and base else None,
        flops / base_flops if flops and base_flops else None,
    )
