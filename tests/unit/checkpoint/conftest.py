# SPDX-License-Identifier: Apache-2.0
"""A tiny checkpoint, written once, and copies of it that a test may break."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm_h3_plugin.checkpoint.inventory import Fault, Inventory, take_inventory
from vllm_h3_plugin.checkpoint.synthetic import SynthSpec, tiny_dit, write_checkpoint


@pytest.fixture(scope="session")
def tiny_spec() -> SynthSpec:
    return SynthSpec(partition="both", dit=tiny_dit(layers=1), shard_bytes=400_000)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory, tiny_spec: SynthSpec) -> Path:
    """Root with FL2VA and Ref2VA; not to be changed."""
    root = tmp_path_factory.mktemp("checkpoint") / "H3"
    write_checkpoint(root, tiny_spec)
    return root


@dataclass
class BreakableCheckpoint:
    """Hard-linked copy of the tiny checkpoint, with ways to break its files one at a time."""

    root: Path

    @property
    def fl2va(self) -> Path:
        return self.root / "FL2VA"

    @property
    def dit_index(self) -> Path:
        return self.fl2va / "transformer" / "diffusion_pytorch_model.safetensors.index.json"

    def shard(self, part: str = "transformer", number: int = 0) -> Path:
        return sorted((self.fl2va / part).glob("*.safetensors"))[number]

    def write(self, path: Path, data: bytes) -> None:
        """Replace a file; the pristine one behind the hard link stays as it is."""
        path.unlink(missing_ok=True)
        path.write_bytes(data)

    def edit_json(self, path: Path, change: Callable[[dict[str, Any]], None]) -> None:
        value = json.loads(path.read_text())
        change(value)
        self.write(path, json.dumps(value).encode())

    def edit_header(self, path: Path, change: Callable[[dict[str, Any]], None]) -> None:
        """Change a shard's header and leave its data as they are."""
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        self.write(path, struct.pack("<Q", len(text)) + text + raw[8 + length :])

    def faults(self, task: str | None = None) -> tuple[Fault, ...]:
        return self.inventory(task).faults

    def inventory(self, task: str | None = None) -> Inventory:
        return take_inventory(self.fl2va, task)


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> BreakableCheckpoint:
    root = tmp_path / "H3"
    shutil.copytree(pristine, root, copy_function=os.link)
    return BreakableCheckpoint(root)
