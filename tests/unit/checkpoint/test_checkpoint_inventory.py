# SPDX-License-Identifier: Apache-2.0
"""An inventory says where every tensor lies, and touches no weights to know it."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from vllm_h3_plugin.checkpoint import safetensors_header
from vllm_h3_plugin.checkpoint.configs import TEXT_LAYERS_USED, DitConfig
from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.checkpoint.layout import TensorSpec, host_drops_text_tensor
from vllm_h3_plugin.checkpoint.synthetic.shards import header
from vllm_h3_plugin.cli.main import main
from vllm_h3_plugin.errors import CheckpointError

PARTS = ("transformer", "text_encoder", "video_vae", "audio_vae")


def test_records_agree_with_the_safetensors_library(pristine: Path) -> None:
    partition = take_inventory(pristine / "FL2VA").partitions[0]
    assert [part.name for part in partition.parts] == list(PARTS)
    for part in partition.parts:
        seen = []
        for file in part.files:
            raw = file.path.read_bytes()
            with safe_open(file.path, "np") as opened:
                assert {record.name for record in file.tensors} == set(opened.keys())
                for record in file.tensors:
                    piece = opened.get_slice(record.name)
                    assert (record.dtype, list(record.shape)) == (piece.get_dtype(), piece.get_shape())
                    assert record.file == file.path and record.offset + record.nbytes <= len(raw)
                    if record.dtype == "F32":
                        data = raw[record.offset : record.offset + record.nbytes]
                        assert data == opened.get_tensor(record.name).tobytes()
            seen += [(file.path.name, record.offset) for record in file.tensors]
        assert seen == sorted(seen), "tensors are in file order"


def test_totals(pristine: Path) -> None:
    inventory = take_inventory(pristine, "any")
    partition = inventory.partitions[0]
    assert partition.tasks == ("t2va", "fl2va")
    assert partition.dit is not None and partition.dit.hidden_size == 64
    assert partition.text is not None and partition.text.layers_used == 1
    dit, text = partition.part("transformer"), partition.part("text_encoder")
    assert dit.layout == "native" and dit.dtypes["F32"] == 13
    assert text.ignored == {"model.language_model.norm.weight"}
    assert text.parameters == sum(tensor.numel for tensor in text.tensors) - 5120
    assert inventory.nbytes == sum(part.nbytes for item in inventory.partitions for part in item.parts)
    with pytest.raises(CheckpointError, match="upscaler"):
        partition.part("upscaler")


def test_no_weights_are_read(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights replaced by holes of the same size change nothing, and no read goes past a header."""
    for shard in checkpoint.fl2va.rglob("*.safetensors"):
        raw = shard.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        checkpoint.write(shard, raw[: 8 + length])
        os.truncate(shard, len(raw))
    real, reads = os.pread, []

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        data = real(descriptor, size, offset)
        reads.append((os.readlink(f"/proc/self/fd/{descriptor}"), offset + len(data)))
        return data

    monkeypatch.setattr(safetensors_header.os, "pread", pread)
    assert checkpoint.faults() == ()
    shards = list(checkpoint.fl2va.rglob("*.safetensors"))
    assert {name for name, _ in reads} == {str(shard.resolve()) for shard in shards}
    for name, end in reads:
        with open(name, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
        assert end <= max(8 + length, len(safetensors_header.LFS_PREFIX))


def test_layers_that_the_host_drops_are_no_faults(checkpoint) -> None:
    """A text encoder of all 64 layers with its LM head is served from the first 50."""
    text = checkpoint.fl2va / "text_encoder"
    config = json.loads((text / "config.json").read_text())["text_config"]
    shard, index = text / "model-late.safetensors", next(text.glob("*.index.json"))
    late = [
        TensorSpec("lm_head.weight", (config["vocab_size"], 5120), "BF16"),
        TensorSpec(f"model.language_model.layers.{TEXT_LAYERS_USED}.mlp.up_proj.weight", (64, 5120), "BF16"),
    ]
    shard.write_bytes(header(late) + bytes(sum(spec.nbytes for spec in late)))
    checkpoint.edit_json(index, lambda value: value["weight_map"].update({spec.name: shard.name for spec in late}))
    inventory = checkpoint.inventory()
    assert inventory.faults == ()
    assert {spec.name for spec in late} <= inventory.partitions[0].part("text_encoder").ignored


def test_what_the_host_keeps_is_not_ignored() -> None:
    assert not host_drops_text_tensor("model.language_model.layers.49.mlp.up_proj.weight")
    assert not host_drops_text_tensor("model.visual.merger.norm.weight")
    assert not host_drops_text_tensor("something.else")


def test_absent_fields_of_a_native_config_are_the_real_model() -> None:
    assert DitConfig.from_mapping({}) == DitConfig()


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["inspect", *args])
    out, err = capsys.readouterr()
    code = caught.value.code
    assert isinstance(code, int)
    return code, out, err


def test_inspect_prints_the_parts_and_exits_0(pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, str(pristine), "--json")
    assert (code, err) == (0, "")
    assert all(part in out for part in (*PARTS, "FL2VA", "Ref2VA"))
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert result["ok"] is True and result["faults"] == [] and len(result["partitions"]) == 2


def test_inspect_prints_every_fault_and_exits_1(checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = checkpoint.shard(), checkpoint.fl2va / "tokenizer" / "tokenizer.json"
    for path in (first, second):
        checkpoint.write(path, b"")
    code, out, err = run(capsys, str(checkpoint.fl2va), "--json")
    assert code == 1
    assert str(first) in err and str(second) in err and err.count("fix: ") == 2
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert result["ok"] is False
    assert [fault["code"] for fault in result["faults"]] == ["shard_truncated", "tokenizer_malformed"]


def test_inspect_as_for_serving_a_task(checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, str(checkpoint.fl2va), "--task", "ref2va")
    assert code == 1 and "Give the other folder" in err
    code, _, err = run(capsys, str(checkpoint.fl2va), "--task", "i2va")
    assert code == 2 and "i2va" in err
