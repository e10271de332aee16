# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 recipe``: what it prints, and how it refuses."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from vllm_h3_plugin.checkpoint.layout import TextEncoderConfig
from vllm_h3_plugin.cli.main import main


def text_config(config: TextEncoderConfig) -> dict:
    text = asdict(config)
    return {"model_type": "qwen3_vl", "vision_config": text.pop("vision"), "text_config": text}


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_configs) -> Path:
    """A checkpoint with configs and VAE headers, and no weights at all."""
    dit, text = tiny_configs
    folder = tmp_path / "h3 root" / "FL2VA"
    folder.mkdir(parents=True)
    index = {"_class_name": "MiniMaxH3Pipeline", "_minimax_h3": {"partition": "fl2va", "tasks": ["t2va", "fl2va"]}}
    (folder / "model_index.json").write_text(json.dumps(index))
    configs = {"transformer": dit.to_native(), "text_encoder": text_config(text)}
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    for name, shape in (("video_vae", [10, 20]), ("audio_vae", [7])):
        (folder / name).mkdir()
        data = b"0" * 2 * math.prod(shape)
        header = json.dumps({"w": {"dtype": "F16", "shape": shape, "data_offsets": [0, len(data)]}}).encode()
        file = folder / name / "diffusion_pytorch_model.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return folder


@pytest.fixture
def h3(capsys):
    """Run ``vllm-h3`` in this process; returns (exit code, stdout, stderr)."""

    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


def test_show_without_a_checkpoint_gives_the_real_model(h3):
    code, out, _ = h3("recipe", "show")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("transformer.blocks.{0..49}.attn.qkv_proj"))
    assert line.split() == ["transformer.blocks.{0..49}.attn.qkv_proj", "50", "fp8_channel", "7", "5.780", "B", "5.39"]
    assert "No checkpoint given" in out and "10.24 GiB" in out
    assert "rule 7: transformer.blocks.** -> fp8_channel. One scale per output channel" in out


@pytest.mark.parametrize(
    ("recipe", "gib"),
    [("bf16", 119.9), ("bf16-table", 95.65), ("fp8", 54.3), ("fp8-tensor", 78.5), ("fp8-text-bf16", 77.0)],
)
def test_totals_of_the_real_model(h3, recipe, gib):
    code, out, _ = h3("recipe", "show", "--recipe", recipe, "--json")
    assert code == 0 and len(out.splitlines()) == 1
    answer = json.loads(out)
    assert answer["ok"] and answer["total"]["gib"] == pytest.approx(gib, abs=0.05)
    for totals in (answer["parts"], answer["precisions"]):
        assert sum(total["bytes"] for total in totals.values()) == answer["total"]["bytes"]
        assert sum(total["parameters"] for total in totals.values()) == answer["total"]["parameters"]


def test_show_reads_a_checkpoints_configs_and_vae_headers_only(h3, checkpoint):
    code, out, _ = h3("recipe", "show", checkpoint, "--json")
    answer = json.loads(out)
    assert code == 0 and answer["checkpoint"] == str(checkpoint)
    assert [note.split(".")[0] for note in answer["notes"]] == ["AdaLN's weights stay on disk"]
    assert answer["parts"]["vae"] == {"parameters": 207, "bytes": 828, "gib": 0.0}
    assert {"transformer.blocks.{0..1}.mlp.fc1"} < {layer["path"] for layer in answer["layers"]}


def test_all_gives_a_line_per_layer(h3, checkpoint, tiny):
    code, out, _ = h3("recipe", "show", checkpoint, "--all", "--json")
    assert code == 0 and [layer["path"] for layer in json.loads(out)["layers"]] == [spec.path for spec in tiny]


def test_small_models_are_shown_in_mib(h3, checkpoint):
    _, out, _ = h3("recipe", "show", checkpoint)
    assert "MiB" in out and "GiB" not in out.replace("Saves 23 GiB", "")
    assert "In their place 0.4" in out and " MiB of table for a prompt of 50 steps" in out


def test_absent_and_damaged_vaes_are_noted(h3, checkpoint):
    (checkpoint / "audio_vae" / "diffusion_pytorch_model.safetensors").unlink()
    (checkpoint / "video_vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"<html>")
    code, out, _ = h3("recipe", "show", checkpoint)
    assert code == 0
    for name in ("audio_vae", "video_vae"):
        assert f"{name} has no readable weights (see `vllm-h3 inspect`) and is not counted." in out


def test_a_folder_one_level_too_high_or_too_deep_names_the_right_one(h3, checkpoint):
    for wrong in (checkpoint.parent, checkpoint / "transformer"):
        code, _, err = h3("recipe", "show", wrong)
        assert code == 3 and f"Use {checkpoint}" in err


def test_a_root_with_both_partitions_names_them(h3, checkpoint):
    other = checkpoint.parent / "Ref2VA"
    shutil.copytree(checkpoint, other)
    index = (other / "model_index.json").read_text().replace("fl2va", "ref2va")
    (other / "model_index.json").write_text(index)
    (checkpoint.parent / "model_index.json").write_text('{"_class_name": "MiniMaxH3Pipeline"}')
    code, _, err = h3("recipe", "show", checkpoint.parent)
    assert code == 3 and f"Use {checkpoint} or {other}." in err


def test_a_missing_folder_is_named(h3, tmp_path):
    code, _, err = h3("recipe", "show", tmp_path / "none")
    assert code == 3 and str(tmp_path / "none") in err and "no such folder" in err


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_a_damaged_or_missing_config_is_named(h3, checkpoint, part):
    path = checkpoint / part / "config.json"
    for text, why in (("{", "not JSON"), ("[]", "holds a list"), ('{"hidden_size": "x"}', "must be|is a qwen3_vl")):
        path.write_text(text)
        code, _, err = h3("recipe", "show", checkpoint)
        assert code == 3 and str(path) in err and re.search(why, err)
    path.unlink()
    code, _, err = h3("recipe", "show", checkpoint)
    assert code == 3 and str(path) in err and "missing" in err
    path.parent.rmdir()
    code, _, err = h3("recipe", "show", checkpoint)
    assert code == 3 and str(path.parent) in err


def test_a_recipe_that_does_not_fit_exits_4_and_ends_with_json(h3, checkpoint, write, recipe_dict):
    del recipe_dict["rules"][6]
    code, out, err = h3("recipe", "show", checkpoint, "--recipe", write(recipe_dict), "--json")
    assert code == 4 and "no rule matches linear layer transformer.blocks.0.attn.qkv_proj and 7 more" in err
    assert json.loads(out.splitlines()[-1])["error"]["unmatched"] == 8


def test_list_names_every_recipe(h3):
    code, out, _ = h3("recipe", "list")
    assert code == 0 and [line.split()[0] for line in out.splitlines()[1:]] == [
        "bf16",
        "bf16-table",
        "fp8",
        "fp8-attn-fp8",
        "fp8-attn-int8",
        "fp8-tensor",
        "fp8-text-bf16",
        "fp8-vision-fp32",
        "int8",
        "int8-text",
    ]
    _, out, _ = h3("recipe", "list", "--json")
    assert [recipe["method"] for recipe in json.loads(out)["recipes"]] == [None, None, *["fp8"] * 6, *["int8"] * 2]


def test_the_verb_imports_no_torch():
    code = (
        "import sys\n"
        "from vllm_h3_plugin.cli.main import main\n"
        "try:\n    main(['recipe', 'show'])\n"
        "except SystemExit as end:\n    sys.exit(end.code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
