# SPDX-License-Identifier: Apache-2.0
"""A tiny table and its store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_h3_plugin.conditioning.schedule import Schedule
from vllm_h3_plugin.conditioning.store import Origin, TableStore
from vllm_h3_plugin.conditioning.table import AdalnTable, TableShape

SHAPE = TableShape(layers=2, block=6, final=2)
ORIGIN = Origin("weights", {"torch": "x"})


def steps(*values: float) -> Schedule:
    """One group of one timestep a step."""
    return Schedule(tuple((value,) for value in values), f"steps {values}")


def table_of(schedule: Schedule, fill: float = 1.0) -> AdalnTable:
    """A table whose values are all ``fill``."""
    return AdalnTable(SHAPE, schedule, torch.full((schedule.rows, SHAPE.width), fill, dtype=torch.bfloat16))


@pytest.fixture
def store(tmp_path: Path) -> Callable[..., TableStore]:
    """Makes a store in the test's folder."""

    def make(**options: object) -> TableStore:
        given: dict = {"device_bytes": 1 << 20, "folder": tmp_path / "tables", "disk_bytes": 1 << 20, **options}
        origin = given.pop("origin", ORIGIN)
        return TableStore(SHAPE, origin, device=torch.device("cpu"), **given)

    return make
