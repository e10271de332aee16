# SPDX-License-Identifier: Apache-2.0
"""A synthetic checkpoint is reproducible, complete or absent, and the same weights in either layout."""

from __future__ import annotations

import hashlib
import json
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_h3_plugin.checkpoint.configs import DitConfig
from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.checkpoint.synthetic import SynthSpec, planned_bytes, tiny_dit, write_checkpoint
from vllm_h3_plugin.checkpoint.synthetic import writer as writer_module
from vllm_h3_plugin.checkpoint.synthetic.values import Distribution, RowStream, to_bfloat16
from vllm_h3_plugin.cli.main import main
from vllm_h3_plugin.cli.synth import parse_size
from vllm_h3_plugin.errors import UsageError

SMALL = SynthSpec(dit=tiny_dit(layers=1))


def digests(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def bits(part: Path) -> dict[str, np.ndarray]:
    """Every tensor of a part as raw integers: BF16 needs no torch to be compared."""
    result = {}
    for path in part.glob("*.safetensors"):
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            kind = {"BF16": "<u2", "F32": "<u4"}[entry["dtype"]]
            result[name] = np.frombuffer(raw[start + begin : start + end], kind).reshape(entry["shape"])
    return result


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", SMALL)
    write_checkpoint(tmp_path / "b", SMALL)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_values_depend_on_seed_and_name_and_not_on_depth_or_shards(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", SMALL)
    deeper = replace(SMALL, dit=tiny_dit(layers=2), shard_bytes=100_000)
    write_checkpoint(tmp_path / "b", deeper)
    write_checkpoint(tmp_path / "c", replace(SMALL, seed=1))
    a, b, c = (bits(tmp_path / name / "FL2VA" / "transformer") for name in "abc")
    assert set(a) < set(b)
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not np.array_equal(a["blocks.0.mlp.fc2.weight"], c["blocks.0.mlp.fc2.weight"])


def test_partitions_differ_in_their_dit_and_share_their_text_encoder(pristine: Path) -> None:
    fl2va, ref2va = digests(pristine / "FL2VA"), digests(pristine / "Ref2VA")
    different = {name for name in fl2va if fl2va[name] != ref2va[name]}
    assert all(name == "model_index.json" or name.startswith("transformer/") for name in different)
    a, b = (bits(pristine / name / "transformer") for name in ("FL2VA", "Ref2VA"))
    assert not np.array_equal(a["blocks.0.mlp.fc2.weight"], b["blocks.0.mlp.fc2.weight"])


def test_shards_respect_the_limit_and_the_index(pristine: Path, tiny_spec: SynthSpec) -> None:
    assert tiny_spec.shard_bytes is not None
    part = take_inventory(pristine / "FL2VA").partitions[0].part("transformer")
    assert len(part.files) >= 3
    for file in part.files:
        held = sum(tensor.nbytes for tensor in file.tensors)
        assert held <= tiny_spec.shard_bytes or len(file.tensors) == 1
    assert part.nbytes == json.loads(next(part.path.glob("*.index.json")).read_text())["metadata"]["total_size"]


def test_values_have_the_distribution_that_was_asked_for() -> None:
    stream = RowStream(0, "x", rows=512, width=512, distribution=Distribution(1.0, 0.5))
    values = np.concatenate(list(stream.take(512)))
    assert values.shape == (512, 512) and values.dtype == np.float32
    assert abs(values.mean() - 1) < 0.005 and abs(values.std() - 0.5) < 0.005
    assert abs(np.corrcoef(values[0], values[1])[0, 1]) < 0.2


def test_rows_do_not_depend_on_how_they_are_taken() -> None:
    def stream() -> RowStream:
        return RowStream(3, "w", rows=130, width=7, distribution=Distribution(0, 1), outliers=True)

    whole = np.concatenate(list(stream().take(130)))
    pieces = stream()
    assert np.array_equal(whole, np.concatenate([row for _ in range(13) for row in pieces.take(10)]))


def test_bfloat16_rounds_to_nearest_even() -> None:
    import torch

    values = np.concatenate(
        [np.random.default_rng(0).normal(size=4096).astype(np.float32), np.float32([0, -0.0, 1.00390625, 1.01171875])]
    )
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(to_bfloat16(values), expected)


def test_outliers_enlarge_a_few_rows_of_quantizable_linears_only(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain", SMALL)
    write_checkpoint(tmp_path / "outliers", replace(SMALL, outliers=True))
    for part in ("transformer", "text_encoder"):
        plain, large = (bits(tmp_path / name / "FL2VA" / part) for name in ("plain", "outliers"))
        for name, value in plain.items():
            changed = np.flatnonzero((value != large[name]).reshape(value.shape[0], -1).any(axis=1))
            quantizable = (
                value.ndim == 2
                and name.endswith("weight")
                and value.dtype == np.uint16
                and not any(word in name for word in ("adaln", "visual", "embed"))
            )
            assert (0 < len(changed) <= max(3, value.shape[0] // 32)) == quantizable, name
            if quantizable:
                rows = [(bit[changed].astype(np.uint32) << 16).view(np.float32) for bit in (value, large[name])]
                assert np.allclose(rows[1], 30 * rows[0], rtol=2**-7)


def test_diffusers_layout_holds_the_same_weights(tmp_path: Path) -> None:
    """q, k and v are the thirds of every head's rows, the SwiGLU halves are exchanged, everything else is equal."""
    spec = replace(SMALL, outliers=True)
    write_checkpoint(tmp_path / "n", spec)
    write_checkpoint(tmp_path / "d", replace(spec, layout="diffusers"))
    native = bits(tmp_path / "n" / "FL2VA" / "transformer")
    diffusers = bits(tmp_path / "d" / "FL2VA" / "transformer")
    heads, head_dim = spec.dit.num_attention_heads, spec.dit.attention_head_dim

    for mine, theirs in (
        ("blocks.0", "transformer_blocks.0"),
        ("token_refiner.blocks.0", "token_refiner.refiner_blocks.0"),
    ):
        grouped = native[f"{mine}.attn.qkv_proj.weight"].reshape(heads, 3, head_dim, -1)
        for i, letter in enumerate("qkv"):
            expected = grouped[:, i].reshape(heads * head_dim, -1)
            assert np.array_equal(diffusers[f"{theirs}.attn.to_{letter}.weight"], expected)
        gate, up = np.split(native[f"{mine}.mlp.fc1.weight"], 2)
        assert np.array_equal(diffusers[f"{theirs}.ff.net.0.proj.weight"], np.concatenate([up, gate]))
        assert np.array_equal(diffusers[f"{theirs}.ff.net.2.weight"], native[f"{mine}.mlp.fc2.weight"])
        assert np.array_equal(diffusers[f"{theirs}.attn.to_out.0.weight"], native[f"{mine}.attn.out_proj.weight"])
        assert np.array_equal(diffusers[f"{theirs}.attn.norm_q.weight"], native[f"{mine}.attn.q_norm.weight"])
    for mine, theirs in (
        ("video_patch_proj", "proj_in"),
        ("audio_patch_proj", "audio_proj_in"),
        ("condition_proj", "context_embedder"),
        ("time_embedder.proj_in", "time_embedder.linear_1"),
        ("time_embedder.proj_out", "time_embedder.linear_2"),
        ("final_layer.adaln_proj.linear", "norm_out.linear"),
        ("final_layer.video_out", "proj_out"),
        ("final_layer.audio_out", "audio_proj_out"),
        ("blocks.0.adaln_proj.linear", "transformer_blocks.0.adaln_proj.linear"),
    ):
        for kind in ("weight", "bias"):
            assert np.array_equal(diffusers[f"{theirs}.{kind}"], native[f"{mine}.{kind}"])
    assert sum(value.size for value in diffusers.values()) == sum(value.size for value in native.values()) - len(
        native["rope.inv_freq"]
    )
    assert (
        take_inventory(tmp_path / "d" / "FL2VA").require_clean().partitions[0].part("transformer").layout == "diffusers"
    )
    native_text, diffusers_text = (digests(tmp_path / name / "FL2VA" / "text_encoder") for name in "nd")
    assert native_text == diffusers_text


def test_rope_frequencies_are_bit_for_bit_those_that_the_host_computes_for_the_diffusers_layout(pristine: Path) -> None:
    import torch

    stored = bits(pristine / "FL2VA" / "transformer")["rope.inv_freq"].view(np.float32)
    count = len(stored)
    # vLLM-Omni 0.30.0 MiniMaxH3DiTModel.load_weights
    computed = 1.0 / (10000.0 ** (torch.arange(0, 2 * count, 2, dtype=torch.float32) / (2 * count)))
    assert np.array_equal(stored, computed.numpy())


# --- complete or not there -------------------------------------------------------------------------------------------


def test_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(UsageError) as caught:
        write_checkpoint(tmp_path, SMALL)
    assert str(tmp_path) in caught.value.what and "is empty" in caught.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(UsageError, match="is a file"):
        write_checkpoint(tmp_path / "mine", SMALL)


def test_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    write_checkpoint(tmp_path / "here", SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert take_inventory(tmp_path / "here" / "FL2VA").faults == ()


def test_full_disk_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(writer_module.shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(UsageError) as caught:
        write_checkpoint(tmp_path / "a" / "b", SMALL)
    assert str(tmp_path / "a" / "b") in caught.value.what and "another disk" in caught.value.fix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError])
def test_interrupted_run_leaves_nothing(tmp_path: Path, interruption: type[BaseException]) -> None:
    def stop(written: int) -> None:
        assert (tmp_path / "H3.part").is_dir() and not (tmp_path / "H3").exists()
        raise interruption

    with pytest.raises(interruption):
        write_checkpoint(tmp_path / "H3", SMALL, stop)
    assert list(tmp_path.iterdir()) == []


def test_leftover_of_a_killed_run_is_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    part = tmp_path / "H3.part"
    part.mkdir()
    (part / "precious").touch()
    with pytest.raises(UsageError, match=r"H3\.part is in the way"):
        write_checkpoint(tmp_path / "H3", SMALL)
    assert (part / "precious").exists()
    (part / ".vllm-h3-synth").touch()
    write_checkpoint(tmp_path / "H3", SMALL)
    assert not part.exists() and not (tmp_path / "H3" / ".vllm-h3-synth").exists()


def test_progress_adds_up_to_what_was_planned(tmp_path: Path) -> None:
    seen: list[int] = []
    write_checkpoint(tmp_path / "H3", SMALL, seen.append)
    assert sum(seen) == planned_bytes(SMALL)


# --- the verb --------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["synth", *args])
    out, err = capsys.readouterr()
    code = caught.value.code
    assert isinstance(code, int)
    return code, out, err


def test_verb_writes_what_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "H3"
    args = ("--layout", "diffusers", "--layers", "1", "--hidden", "48", "--heads", "2", "--head-dim", "24")
    code, out, _ = run(
        capsys, str(root), "--partition", "ref2va", *args, "--ffn", "96", "--shard-size", "1MB", "--json"
    )
    assert code == 0
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert result["ok"] is True and result["partitions"] == [str(root / "Ref2VA")]
    partition = take_inventory(root / "Ref2VA", "ref2va").require_clean().partitions[0]
    assert partition.dit is not None and (partition.dit.hidden_size, partition.dit.ffn_hidden_size) == (48, 96)
    assert result["dit_parameters"] == partition.part("transformer").parameters


@pytest.mark.parametrize(
    ("args", "name", "fix"),
    [
        (["--hidden", "65"], "--hidden = 65", "Use 80"),
        (["--ffn", "8"], "--ffn = 8", "Use 16"),
        (["--heads", "3", "--head-dim", "12"], "--heads x --head-dim = 36", "Use 48"),
        (["--layers", "0"], "--layers = 0", "at least 1"),
        (["--text-layers", "0"], "--text-layers = 0", "at least 1"),
        (["--head-dim", "4"], "--head-dim = 4", "at least 8"),
        (["--shard-size", "many"], "--shard-size 'many'", "5GB"),
    ],
)
def test_impossible_options_name_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], name: str, fix: str
) -> None:
    code, _, err = run(capsys, str(tmp_path / "H3"), *args)
    assert code == 2 and name in err and fix in err
    assert list(tmp_path.iterdir()) == []


def test_sizes() -> None:
    assert parse_size("5GB") == 5_000_000_000
    assert parse_size("1.5 MiB") == 3 << 19
    assert parse_size("1000") == 1000


def test_true_width_is_the_real_model_with_fewer_layers() -> None:
    real = tiny_dit(layers=50, refiner_layers=2, hidden=5376, heads=56, head_dim=128, ffn=14336)
    assert real == DitConfig()


def test_an_empty_folder_of_the_callers_is_filled_and_not_replaced(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    root.mkdir(mode=0o775)
    before = root.stat().st_ino
    write_checkpoint(root, SynthSpec())
    assert root.stat().st_ino == before
    assert (root / "FL2VA" / "model_index.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="link to nothing"):
        write_checkpoint(tmp_path / "link", SynthSpec())
