# SPDX-License-Identifier: Apache-2.0
"""An adapter that does not fit is refused with its name, the reason and the way out; one that fits is told."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_h3_plugin.checkpoint.adapter import CONFIG, Adapter, check_adapter
from vllm_h3_plugin.checkpoint.adapter_layout import (
    FLASHGEN_FILE,
    KINDS,
    Kind,
    fasth3_modules,
    flashgen_layers,
    parse_turbo_name,
    turbo_file,
    turbo_layers,
)
from vllm_h3_plugin.checkpoint.configs import DitConfig
from vllm_h3_plugin.checkpoint.faults import FaultLog
from vllm_h3_plugin.checkpoint.layout import dit_tensors_diffusers
from vllm_h3_plugin.checkpoint.safetensors_header import ShardFile, read_header
from vllm_h3_plugin.checkpoint.synthetic import tiny_dit
from vllm_h3_plugin.checkpoint.synthetic.adapters import BREAKS, AdapterSpec, Break, write_adapter
from vllm_h3_plugin.errors import AdapterError, UsageError

DIT = tiny_dit(layers=2, refiner_layers=1)

REASONS: dict[Break, str] = {
    "other-width": r"its shape is \[.*\], and this model takes \[.*\]: it was made for another width",
    "other-model": r"this model has no layer double_blocks\.0\.",
    "missing-pair": r"its lora_B is missing",
    "missing-layer": r"have no factors|does not change|and it holds",
    "wrong-dtype": r"it is F8_E4M3",
    "truncated": r"bytes are missing at its end",
    "nan": r"numbers that are NaN or infinite: 1",
    "inf": r"numbers that are NaN or infinite: 1",
    "wrong-rank": r"its rank is \d+ and that of|its rank is \d+, and this adapter's is|it was made for another width",
}


def write(folder: Path, kind: Kind, broken: Break | None = None, **options: object) -> Path:
    return write_adapter(folder, AdapterSpec(kind, DIT, broken=broken, **options))  # type: ignore[arg-type]


def header_of(path: Path) -> ShardFile:
    header = read_header(path, FaultLog())
    assert header is not None
    return header


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_each_kind_is_told(kind: Kind, tmp_path: Path) -> None:
    path = write(tmp_path, kind)
    found = check_adapter(path, DIT)
    assert (found.kind, found.path, found.file.suffix) == (kind, path, ".safetensors")
    assert found.nbytes == sum(record.nbytes for record in header_of(found.file).tensors)
    assert Adapter.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    facts = {
        "turbo": (128, ("t2va", "fl2va"), 8, 6.0, 3.0, False, 18),
        "flashgen": (64, ("t2va",), 4, None, None, False, 15),
        "fasth3": (16, ("t2va",), 4, None, None, True, 22),
        "peft": (8, (), None, None, None, False, 9),
    }
    shifts = (found.video_shift, found.audio_shift)
    assert (found.rank, found.tasks, found.steps, *shifts, found.fused, found.layers) == facts[kind]
    assert (found.adaln is not None) == (kind in ("flashgen", "fasth3"))
    assert (found.embedder is not None) == (kind == "fasth3")


@pytest.mark.parametrize("broken", BREAKS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_that_does_not_fit_is_refused_with_the_reason(kind: Kind, broken: Break, tmp_path: Path) -> None:
    if (kind, broken) == ("peft", "missing-layer"):
        check_adapter(write(tmp_path, kind, broken), DIT)  # a PEFT adapter may have any layers
        return
    path = write(tmp_path, kind, broken)
    with pytest.raises(AdapterError, match=REASONS[broken]) as caught:
        check_adapter(path, DIT)
    error = caught.value
    assert str(path) in error.what and error.why and error.fix
    assert (error.exit_code, error.http_status) == (2, 400)


def test_a_file_that_becomes_bad_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, "turbo")
    good = check_adapter(path, DIT)
    assert check_adapter(path, DIT) is good
    record = header_of(path).tensors[-1]
    with path.open("r+b") as file:
        file.seek(record.offset)
        file.write(b"\xff\xff")
    os.utime(path, ns=(1, 1))
    with pytest.raises(AdapterError, match="NaN or infinite"):
        check_adapter(path, DIT)


def test_every_number_is_looked_at_and_no_large_one_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "turbo")
    for record in (header_of(path).tensors[0], header_of(path).tensors[-1]):
        with path.open("r+b") as file:
            file.seek(record.offset + record.nbytes - 2)
            file.write(np.array([0x7F7F], "<u2").tobytes())  # the largest BF16
        check_adapter(path, DIT)
        with path.open("r+b") as file:
            file.seek(record.offset + record.nbytes - 2)
            file.write(np.array([0xFF80], "<u2").tobytes())  # minus infinity
        os.utime(path)
        with pytest.raises(AdapterError, match=re.escape(record.name)):
            check_adapter(path, DIT)
        with path.open("r+b") as file:
            file.seek(record.offset + record.nbytes - 2)
            file.write(b"\0\0")


def test_the_folder_of_a_file_will_do_and_an_ambiguous_one_will_not(tmp_path: Path) -> None:
    write(tmp_path, "turbo")
    assert check_adapter(tmp_path, DIT).file.name == turbo_file(8)
    write(tmp_path, "turbo", steps=4)
    with pytest.raises(AdapterError, match=r"2 \.safetensors files"):
        check_adapter(tmp_path, DIT)
    with pytest.raises(AdapterError, match="no such file"):
        check_adapter(tmp_path / "gone", DIT)
    (tmp_path / "a.bin").touch()
    with pytest.raises(AdapterError, match=r"no \.safetensors file"):
        check_adapter(tmp_path / "a.bin", DIT)


def test_a_turbo_file_under_another_name_is_sent_back_to_its_name(tmp_path: Path) -> None:
    path = write(tmp_path, "turbo").rename(tmp_path / "my-lora.safetensors")
    with pytest.raises(AdapterError, match="steps and shift stand in its file name") as caught:
        check_adapter(path, DIT)
    assert "turbo_8step" in caught.value.fix


def test_a_file_of_no_known_kind_names_its_first_tensor(tmp_path: Path) -> None:
    peft = write(tmp_path, "peft")
    (peft / CONFIG).unlink()
    with pytest.raises(AdapterError, match=r"its kind is not known.*lora_A"):
        check_adapter(peft, DIT)


def test_a_flashgen_file_under_another_name_is_refused_as_the_host_would(tmp_path: Path) -> None:
    path = write(tmp_path, "flashgen").rename(tmp_path / "other.safetensors")
    with pytest.raises(AdapterError, match="published name alone") as caught:
        check_adapter(path, DIT)
    assert FLASHGEN_FILE in caught.value.fix


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"r": 600}, "a rank is a whole number"),
        ({"r": 16}, "its rank is 8, and this adapter's is 16"),
        ({"use_dora": True}, "only plain LoRA"),
        ({"lora_alpha": "high"}, "positive number"),
    ],
)
def test_a_peft_config_that_does_not_fit_is_refused(change: dict[str, object], reason: str, tmp_path: Path) -> None:
    path = write(tmp_path, "peft")
    said = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps({**said, **change}))
    with pytest.raises(AdapterError, match=reason):
        check_adapter(path, DIT)


def _reheaded(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write a file anew with another header."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    text = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_the_sparse_fasth3_is_refused_with_the_dense_one(tmp_path: Path) -> None:
    path = write(tmp_path, "fasth3")
    gate = "transformer_blocks.0.attn.to_gate_compress.set_weight"
    norm = "transformer_blocks.0.norm1.diff"
    _reheaded(path, lambda entries: {gate if name == norm else name: entry for name, entry in entries.items()})
    with pytest.raises(AdapterError, match="Video Sparse Attention") as caught:
        check_adapter(path, DIT)
    assert "dense" in caught.value.fix and gate in caught.value.what


def test_a_fastvideo_container_of_another_model_is_not_fasth3(tmp_path: Path) -> None:
    path = write(tmp_path, "fasth3")
    _reheaded(path, lambda entries: {**entries, "__metadata__": {**entries["__metadata__"], "base_model": "other/H2"}})
    with pytest.raises(AdapterError, match="only FastH3 over MiniMaxAI/MiniMax-H3"):
        check_adapter(path, DIT)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("minimax_h3_fl2v_turbo_8step_v1.0_768p_bf16.safetensors", (("t2va", "fl2va"), 8, 6.0, 3.0)),
        ("minimax_h3_ref2v_turbo_4step_v0.1.safetensors", (("ref2va",), 4, 12.0, 3.0)),
        ("minimax_h3_fl2v_turbo_0step_v1.0.safetensors", None),
        ("minimax_h3_fl2v_turbo_8step.safetensors", None),
    ],
)
def test_steps_shift_and_tasks_stand_in_the_name(name: str, expected: object) -> None:
    found = parse_turbo_name(name)
    assert expected is None if found is None else (
        found.tasks, found.steps, found.video_shift, found.audio_shift
    ) == expected  # fmt: skip


def test_the_real_model_has_as_many_layers_as_the_published_files() -> None:
    real = DitConfig()
    assert len(turbo_layers(real)) == 52 * 6 and len(flashgen_layers(real)) == 50 * 5 + 2 * 4 + 1
    assert {name.rpartition(".")[0] for name in dit_tensors_diffusers(real)} == set(fasth3_modules(real))


def test_nothing_is_overwritten_and_a_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first = write(tmp_path / "a", "turbo").read_bytes()
    assert write(tmp_path / "b", "turbo").read_bytes() == first
    assert write(tmp_path / "c", "turbo", seed=1).read_bytes() != first
    with pytest.raises(UsageError, match="nothing is overwritten"):
        write(tmp_path / "a", "turbo")
