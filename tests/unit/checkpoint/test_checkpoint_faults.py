# SPDX-License-Identifier: Apache-2.0
"""Every way in which a checkpoint's files are found broken is named with its path, its reason and its way out."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_h3_plugin.checkpoint import safetensors_header
from vllm_h3_plugin.checkpoint.inventory import Fault
from vllm_h3_plugin.checkpoint.layout import TensorSpec
from vllm_h3_plugin.checkpoint.synthetic.shards import header
from vllm_h3_plugin.errors import CheckpointError

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32\nsize 12345\n"


def only(faults: tuple[Fault, ...], code: str, path: Path) -> Fault:
    """The one fault that was expected; its message names the path and has a fix."""
    assert [(fault.code, fault.path) for fault in faults] == [(code, path)], faults
    (fault,) = faults
    assert str(path) in fault.what and fault.why and fault.fix
    return fault


def test_a_whole_checkpoint_has_no_faults(checkpoint) -> None:
    inventory = checkpoint.inventory()
    assert inventory.faults == ()
    assert inventory.require_clean() is inventory


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        (lambda size: size - 1, "1 of"),
        (lambda size: size // 2, "are missing at its end"),
        (lambda size: 0, "the file is empty"),
        (lambda size: 5, "less than the header's length field"),
    ],
    ids=["by one byte", "by half", "to nothing", "to five bytes"],
)
@pytest.mark.parametrize("part", ["transformer", "text_encoder", "video_vae", "audio_vae"])
def test_truncated_shard(checkpoint, part: str, keep: Callable[[int], int], reason: str) -> None:
    shard = checkpoint.shard(part)
    raw = shard.read_bytes()
    checkpoint.write(shard, raw[: keep(len(raw))])
    fault = only(checkpoint.faults(), "shard_truncated", shard)
    assert reason in fault.why and "Download this file again" in fault.fix


def test_shard_with_bytes_left_over(checkpoint) -> None:
    shard = checkpoint.shard()
    checkpoint.write(shard, shard.read_bytes() + b"\0")
    assert "1 bytes more" in only(checkpoint.faults(), "shard_too_long", shard).why


def test_header_length_beyond_the_file(checkpoint) -> None:
    shard = checkpoint.shard()
    raw = shard.read_bytes()
    checkpoint.write(shard, struct.pack("<Q", len(raw)) + raw[8:])
    assert f"should be {len(raw)} bytes long" in only(checkpoint.faults(), "header_beyond_file", shard).why


def test_header_length_that_no_file_has(checkpoint) -> None:
    shard = checkpoint.shard()
    checkpoint.write(shard, b"\xff" * 64)
    only(checkpoint.faults(), "not_safetensors", shard)


def test_web_page_saved_as_a_shard(checkpoint) -> None:
    shard = checkpoint.shard()
    checkpoint.write(shard, b"<!DOCTYPE html><html>403 Forbidden</html>" + b" " * 100)
    assert "web page" in only(checkpoint.faults(), "not_safetensors", shard).why


@pytest.mark.parametrize("header", [b"{not json", b"[1, 2]", b'{"a": {"dtype": "F4", "shape": [2]}}'])
def test_malformed_header(checkpoint, header: bytes) -> None:
    shard = checkpoint.shard()
    checkpoint.write(shard, struct.pack("<Q", len(header)) + header)
    only(checkpoint.faults(), "header_malformed", shard)


def test_header_that_names_a_tensor_twice(checkpoint) -> None:
    shard = checkpoint.shard()
    entry = b'"x": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}'
    header = b"{" + entry + b", " + entry + b"}"
    checkpoint.write(shard, struct.pack("<Q", len(header)) + header)
    assert "x stands in it twice" in only(checkpoint.faults(), "header_malformed", shard).why


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"dtype": "F4"}, "unknown dtype 'F4'"),
        ({"shape": [-1, 2]}, "whole numbers"),
        ({"shape": [3, 3]}, "is not"),
        ({"data_offsets": [0]}, "unpack"),
    ],
)
def test_header_entry_that_cannot_be_right(checkpoint, values: dict[str, Any], reason: str) -> None:
    shard = checkpoint.shard()
    checkpoint.edit_header(shard, lambda header: header["audio_patch_proj.weight"].update(values))
    fault = only(checkpoint.faults(), "header_malformed", shard)
    assert "audio_patch_proj.weight" in fault.what and reason in fault.why


@pytest.mark.parametrize(("shift", "reason"), [(8, "leaves a gap"), (-8, "overlaps")])
def test_gap_or_overlap_between_tensors(checkpoint, shift: int, reason: str) -> None:
    shard = checkpoint.shard()

    def move(header: dict[str, Any]) -> None:
        name = list(header)[-1]
        header[name]["data_offsets"] = [value + shift for value in header[name]["data_offsets"]]

    checkpoint.edit_header(shard, move)
    assert reason in only(checkpoint.faults(), "offsets", shard).why


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_index_that_names_a_missing_shard(checkpoint, part: str) -> None:
    shard = checkpoint.shard(part, 1)
    shard.unlink()
    fault = only(checkpoint.faults(), "shard_missing", shard)
    assert "says that it holds" in fault.why and "Download" in fault.fix


def test_missing_index(checkpoint) -> None:
    checkpoint.dit_index.unlink()
    only(checkpoint.faults(), "index_missing", checkpoint.dit_index)


def test_single_file_part_needs_no_index(checkpoint) -> None:
    part = checkpoint.inventory().partitions[0].part("text_encoder")
    data = header([TensorSpec(tensor.name, tensor.shape, tensor.dtype) for tensor in part.tensors])
    data += b"".join(file.path.read_bytes()[file.tensors[0].offset :] for file in part.files)
    for path in part.path.glob("*.safetensors*"):
        path.unlink()
    (part.path / "model.safetensors").write_bytes(data)
    assert checkpoint.faults() == ()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": {"a": 1}}'])
def test_malformed_index(checkpoint, content: bytes) -> None:
    checkpoint.write(checkpoint.dit_index, content)
    only(checkpoint.faults(), "index_malformed", checkpoint.dit_index)


def test_index_that_points_out_of_its_folder(checkpoint) -> None:
    checkpoint.edit_json(checkpoint.dit_index, lambda index: index["weight_map"].update(evil="../../secret"))
    assert "'../../secret'" in only(checkpoint.faults(), "index_malformed", checkpoint.dit_index).what


def test_two_shards_that_hold_one_tensor(checkpoint) -> None:
    first, second = checkpoint.shard(number=0), checkpoint.shard(number=1)

    def rename(header: dict[str, Any]) -> None:
        header["video_patch_proj.bias"] = header.pop(next(name for name in header if name != "__metadata__"))

    checkpoint.edit_header(second, rename)
    codes = {fault.code: fault for fault in checkpoint.faults()}
    twice = codes["tensor_twice"]
    assert twice.path == second and "video_patch_proj.bias" in twice.what and first.name in twice.why and twice.fix


def test_tensor_that_the_index_puts_elsewhere(checkpoint) -> None:
    def rename(header: dict[str, Any]) -> None:
        header["nobody.knows.me"] = header.pop("video_patch_proj.bias")

    checkpoint.edit_header(checkpoint.shard(), rename)
    by_code = {fault.code: fault for fault in checkpoint.faults()}
    assert set(by_code) == {"tensor_misplaced", "tensor_extra"}
    assert "video_patch_proj.bias" in by_code["tensor_misplaced"].what
    assert "nobody.knows.me" in by_code["tensor_extra"].what


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("transformer", "video_patch_proj.bias"),
        ("text_encoder", "model.language_model.layers.0.self_attn.q_norm.weight"),
        ("text_encoder", "model.visual.merger.norm.bias"),
    ],
)
def test_absent_tensor(checkpoint, part: str, name: str) -> None:
    index = next((checkpoint.fl2va / part).glob("*.index.json"))
    shard = index.with_name(json.loads(index.read_text())["weight_map"][name])

    def rename(header: dict[str, Any]) -> None:
        header["renamed"] = header.pop(name)

    checkpoint.edit_header(shard, rename)
    checkpoint.edit_json(index, lambda value: value["weight_map"].pop(name))
    by_code = {fault.code: fault for fault in checkpoint.faults()}
    assert set(by_code) == {"tensor_absent", "tensor_extra"}
    absent, extra = by_code["tensor_absent"], by_code["tensor_extra"]
    assert name in absent.what and absent.path == checkpoint.fl2va / part and absent.fix
    assert "renamed" in extra.what and extra.path == shard and extra.fix


def test_tensor_of_another_shape(checkpoint) -> None:
    shard = checkpoint.shard()
    checkpoint.edit_header(shard, lambda header: header["audio_patch_proj.weight"]["shape"].reverse())
    fault = only(checkpoint.faults(), "tensor_shape", shard)
    assert "audio_patch_proj.weight" in fault.what and "[32, 64]" in fault.why and "[64, 32]" in fault.why


def test_tensor_of_another_dtype(checkpoint) -> None:
    shard = checkpoint.shard()
    checkpoint.edit_header(shard, lambda header: header["audio_patch_proj.weight"].update(dtype="I32"))
    fault = only(checkpoint.faults(), "tensor_dtype", shard)
    assert "audio_patch_proj.weight" in fault.what and "I32" in fault.why and "BF16 release" in fault.fix


def test_many_faults_of_one_kind_are_counted(checkpoint) -> None:
    config = checkpoint.fl2va / "transformer" / "config.json"
    checkpoint.edit_json(config, lambda value: value.update(num_layers=5))
    faults = checkpoint.faults()
    assert {fault.code for fault in faults} == {"tensor_absent"} and len(faults) == 9
    assert "and 32 more like it" in faults[-1].what


@pytest.mark.parametrize("part", ["transformer", "video_vae"])
def test_git_lfs_pointer_instead_of_a_shard(checkpoint, part: str) -> None:
    shard = checkpoint.shard(part)
    checkpoint.write(shard, LFS)
    fault = only(checkpoint.faults(), "lfs_pointer", shard)
    assert "git lfs pull" in fault.fix


def test_git_lfs_pointer_instead_of_a_tokenizer(checkpoint) -> None:
    path = checkpoint.fl2va / "tokenizer" / "tokenizer.json"
    checkpoint.write(path, LFS)
    only(checkpoint.faults(), "lfs_pointer", path)


def test_unreadable_shard(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, real = checkpoint.shard(), os.open

    def refuse(path: Any, *args: Any) -> int:
        if path == shard:
            raise OSError(errno.EACCES, "Permission denied")
        return real(path, *args)

    monkeypatch.setattr(safetensors_header.os, "open", refuse)
    fault = only(checkpoint.faults(), "unreadable", shard)
    assert fault.why == "Permission denied" and "read access" in fault.fix


def test_shard_that_is_a_dangling_link(checkpoint) -> None:
    shard = checkpoint.shard("video_vae")
    shard.unlink()
    shard.symlink_to("../blobs/gone")
    assert "../blobs/gone" in only(checkpoint.faults(), "shard_missing", shard).why


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "video_vae", "audio_vae"])
@pytest.mark.parametrize(
    ("content", "code"), [(None, "config_missing"), (b"{", "config_malformed"), (b"[]", "config_malformed")]
)
def test_config_missing_or_malformed(checkpoint, part: str, content: bytes | None, code: str) -> None:
    path = checkpoint.fl2va / part / "config.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert "release" in only(checkpoint.faults(), code, path).fix


@pytest.mark.parametrize(
    ("part", "change", "field"),
    [
        ("transformer", {"hidden_size": "64"}, "hidden_size"),
        ("transformer", {"hidden_size": True}, "hidden_size"),
        ("transformer", {"num_layers": 0}, "num_layers"),
        ("transformer", {"text_dim": 4096}, "text_dim"),
        ("transformer", {"latents_dim": 16}, "latents_dim"),
        ("transformer", {"patch_size": [2, 2]}, "patch_size"),
        ("transformer", {"adaln_out_features": 64}, "adaln_out_features"),
        ("transformer", {"rope_inv_freq_len": 16}, "rope_inv_freq_len"),
        ("transformer", {"timestep_input_dim": 31}, "timestep_input_dim"),
        ("transformer", {"norm_eps": -1}, "norm_eps"),
        ("text_encoder", {"model_type": "llama"}, "model_type"),
        ("text_encoder", {"text_config": None}, "text_config"),
        ("text_encoder", {"vision_config": 3}, "vision_config"),
        ("video_vae", {"latent_channels": 16}, "latent_channels"),
        ("video_vae", {"latents_std": [1.0]}, "latents_std"),
        ("video_vae", {"auto_map": {}}, "auto_map.AutoModel"),
        ("audio_vae", {"latents_mean": ["x"] * 32}, "latents_mean"),
        ("audio_vae", {"sample_rate": 0}, "sample_rate"),
    ],
)
def test_config_value_that_no_model_has(checkpoint, part: str, change: dict[str, Any], field: str) -> None:
    path = checkpoint.fl2va / part / "config.json"
    checkpoint.edit_json(path, lambda value: value.update(change))
    assert field in only(checkpoint.faults(), "config_value", path).what


@pytest.mark.parametrize(
    ("section", "change", "field"),
    [
        ("text_config", {"hidden_size": 4096}, "text_config.hidden_size"),
        ("text_config", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("vision_config", {"out_hidden_size": 64}, "out_hidden_size"),
        ("vision_config", {"num_heads": 3}, "num_heads"),
        ("vision_config", {"deepstack_visual_indexes": [7]}, "deepstack_visual_indexes"),
        ("vision_config", {"deepstack_visual_indexes": 7}, "deepstack_visual_indexes"),
    ],
)
def test_text_encoder_value_that_no_model_has(checkpoint, section: str, change: dict[str, Any], field: str) -> None:
    path = checkpoint.fl2va / "text_encoder" / "config.json"
    checkpoint.edit_json(path, lambda value: value[section].update(change))
    assert field in only(checkpoint.faults(), "config_value", path).what


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("tokenizer/tokenizer_config.json", "tokenizer_missing"),
        ("processor/preprocessor_config.json", "processor_missing"),
        ("video_vae/modeling_video_vae.py", "code_missing"),
        ("audio_vae/modeling_audio_vae.py", "code_missing"),
    ],
)
def test_missing_small_file(checkpoint, name: str, code: str) -> None:
    (checkpoint.fl2va / name).unlink()
    only(checkpoint.faults(), code, checkpoint.fl2va / name)


@pytest.mark.parametrize(
    ("content", "code", "reason"),
    [
        (LFS, "lfs_pointer", "Git LFS pointer"),
        (b"", "code_malformed", "it has no class"),
        (b"<html>not found</html>", "code_malformed", "it is not Python"),
        (b"class Other:\n    pass\n", "code_malformed", "it has no class"),
    ],
    ids=["an LFS pointer", "empty", "a web page", "another class"],
)
def test_remote_code_is_looked_into_and_not_run(checkpoint, content: bytes, code: str, reason: str) -> None:
    module = checkpoint.fl2va / "video_vae" / "modeling_video_vae.py"
    checkpoint.write(module, content)
    assert reason in only(checkpoint.faults(), code, module).why


def test_code_of_another_repository_is_refused(checkpoint) -> None:
    path = checkpoint.fl2va / "video_vae" / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"]["AutoModel"] = f"somebody/else--{config['auto_map']['AutoModel']}"
    checkpoint.write(path, json.dumps(config).encode())
    fault = only(checkpoint.faults(), "config_value", path)
    assert "somebody/else" in fault.what and "another repository" in fault.why


def test_json_that_is_nested_without_end_is_a_fault(checkpoint) -> None:
    path = checkpoint.fl2va / "tokenizer" / "tokenizer_config.json"
    checkpoint.write(path, b'{"a":' * 100_000)
    assert "nested deeper" in only(checkpoint.faults(), "tokenizer_malformed", path).why


def test_a_number_of_layers_that_no_model_has_is_a_fault_and_not_a_long_wait(checkpoint) -> None:
    path = checkpoint.fl2va / "transformer" / "config.json"
    config = json.loads(path.read_text())
    config["num_layers"] = 10**8
    checkpoint.write(path, json.dumps(config).encode())
    assert any("100000000" in fault.what for fault in checkpoint.faults() if fault.path == path)


@pytest.mark.parametrize("folder", ["tokenizer", "processor"])
def test_vocabulary_in_either_form_will_do(checkpoint, folder: str) -> None:
    (checkpoint.fl2va / folder / "tokenizer.json").unlink()
    assert checkpoint.faults() == ()
    (checkpoint.fl2va / folder / "merges.txt").unlink()
    only(checkpoint.faults(), "tokenizer_missing", checkpoint.fl2va / folder / "merges.txt")


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "video_vae", "audio_vae", "tokenizer", "processor"])
def test_missing_part(checkpoint, part: str) -> None:
    (checkpoint.fl2va / part).rename(checkpoint.root / "elsewhere")
    only(checkpoint.faults(), "part_missing", checkpoint.fl2va / part)


def test_require_clean_says_the_first_fault_and_how_many_more(checkpoint) -> None:
    first, second = checkpoint.shard(), checkpoint.shard("text_encoder")
    for shard in (first, second):
        checkpoint.write(shard, LFS)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.inventory().require_clean()
    text = str(caught.value)
    assert str(first) in text and "git lfs pull" in text and "There is 1 more" in text
    assert f"vllm-h3 inspect {checkpoint.fl2va}" in text
    assert caught.value.details["faults"] == 2
