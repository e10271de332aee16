# SPDX-License-Identifier: Apache-2.0
"""Reading recipes: names, paths, and every way in which a file can be wrong."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_h3_plugin.data import data_path
from vllm_h3_plugin.errors import RecipeError
from vllm_h3_plugin.quantization.precision import Precision
from vllm_h3_plugin.quantization.recipe import Adaln, Rule, load_recipe, recipe_names, resolve_recipe


def refusal(path_or_name) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path_or_name)
    return caught.value


def test_packaged_recipes_are_these_and_named_after_their_files():
    assert recipe_names() == (
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
    )
    assert all(load_recipe(name).name == name for name in recipe_names())


def test_a_path_and_a_name_give_the_same_recipe():
    assert load_recipe(data_path("quant") / "fp8.json") == load_recipe("fp8")
    assert load_recipe(str(data_path("quant") / "fp8.json")) == load_recipe("fp8")


def test_a_recipe_survives_pickling_between_processes():
    recipe = load_recipe("fp8")
    assert recipe.rules[0].matches("transformer.video_patch_proj")
    assert pickle.loads(pickle.dumps(recipe)) == recipe


def test_reading_recipes_imports_no_torch():
    code = (
        "import sys\n"
        "import vllm_h3_plugin.quantization.plan, vllm_h3_plugin.quantization.footprint\n"
        "import vllm_h3_plugin.quantization.contract, vllm_h3_plugin.quantization.recipe as r\n"
        "r.load_recipe('fp8')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_name_suggests_the_nearest():
    message = str(refusal("fp8-tensr"))
    assert "'fp8-tensr'" in message and "Did you mean fp8-tensor?" in message and "bf16" in message


def test_unknown_name_far_from_all_lists_them():
    message = str(refusal("zzz"))
    assert "Did you mean" not in message and "fp8-text-bf16" in message and ".json" in message


def test_missing_file_is_named(tmp_path):
    assert str(tmp_path / "none.json") in str(refusal(tmp_path / "none.json"))


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    message = str(refusal(str(tmp_path) + "/"))
    assert str(tmp_path) in message and "is no file" in message


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "latin.json"
    path.write_bytes(b'{"name": "caf\xe9"}')
    assert str(path) in str(refusal(path)) and "UTF-8" in str(refusal(path))


def test_malformed_json_names_line_and_column(write):
    path = write('{\n  "name": "x",\n  "rules": [,]\n}')
    message = str(refusal(path))
    assert str(path) in message and "line 3, column 13" in message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"name": "a", "name": "b"}', '"name"'),
        ('{"rules": [{"match": "a", "match": "b"}]}', '"match"'),
    ],
)
def test_duplicate_key_is_named(write, text, key):
    path = write(text)
    assert f"{path}: key {key} stands twice" in str(refusal(path))


def test_unknown_key_is_named_with_its_place_and_the_nearest_known_one(write, recipe_dict):
    recipe_dict["rules"][2]["precison"] = "bf16"
    path = write(recipe_dict)
    message = str(refusal(path))
    assert f"{path}: unknown key rules[2].precison" in message and "'precision'" in message


def test_unknown_top_level_key_lists_the_known_ones(write, recipe_dict):
    recipe_dict["zzz"] = 1
    message = str(refusal(write(recipe_dict)))
    assert "unknown key zzz" in message and "name, description, method, adaln, rules" in message


@pytest.mark.parametrize("key", ["name", "description", "method", "adaln", "rules"])
def test_missing_key_is_named(write, recipe_dict, key):
    del recipe_dict[key]
    assert f"key {key} is missing" in str(refusal(write(recipe_dict)))


def test_missing_rule_key_is_named_with_its_place(write, recipe_dict):
    del recipe_dict["rules"][1]["why"]
    assert "key rules[1].why is missing" in str(refusal(write(recipe_dict)))


def test_unknown_precision_names_the_value_and_the_choices(write, recipe_dict):
    recipe_dict["rules"][5]["precision"] = "fp4"
    message = str(refusal(write(recipe_dict)))
    assert 'rules[5].precision is "fp4"' in message
    assert all(precision.value in message for precision in Precision)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"name": 7}, "name is 7"),
        ({"name": ""}, 'name is ""'),
        ({"rules": []}, "rules is []"),
        ({"rules": {}}, "rules is {}"),
        ({"method": "int4"}, 'method is "int4"'),
        ({"adaln": "cached"}, 'adaln is "cached"'),
        ({"rules": [{"match": 1, "precision": "bf16", "why": "w"}]}, "rules[0].match is 1"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_its_place(write, recipe_dict, change, place):
    path = write({**recipe_dict, **change})
    message = str(refusal(path))
    assert str(path) in message and place in message


@pytest.mark.parametrize("text", ["[]", "null", '"fp8"', "3"])
def test_a_file_that_is_no_object_is_refused(write, text):
    assert f"the file is {text}" in str(refusal(write(text)))


@pytest.mark.parametrize("match", ["", "a..b", ".a", "a.", "a.**b", "a.***", "a b", "a.{b,c}", "blocks.[0-9]", "a/b"])
def test_a_glob_that_cannot_be_one_is_named_with_its_rule(write, recipe_dict, match):
    recipe_dict["rules"][3]["match"] = match
    message = str(refusal(write(recipe_dict)))
    assert f"rule 4: match {match!r}" in message and "** any number of segments" in message


def test_method_without_fp8_rules_and_fp8_rules_without_method_are_refused(write, recipe_dict):
    assert "has FP8 rules" in str(refusal(write({**recipe_dict, "method": None})))
    plain = json.loads((data_path("quant") / "bf16.json").read_text())
    assert "has no FP8 rule" in str(refusal(write({**plain, "method": "fp8"})))


GLOBS = [
    ("a.b", "a.b", True),
    ("a.b", "a.bc", False),
    ("a.b", "a.b.c", False),
    ("a.b", "x.a.b", False),
    ("a.*", "a.b", True),
    ("a.*", "a.b.c", False),
    ("a.*", "a", False),
    ("a.*_proj", "a.qkv_proj", True),
    ("a.*_proj", "a.b._proj", False),
    ("a.b*", "a.b", True),
    ("a.*b*d", "a.abcd", True),
    ("*", "a", True),
    ("*", "a.b", False),
    ("**", "a", True),
    ("**", "a.b.c", True),
    ("a.**", "a.b.c", True),
    ("a.**", "a", True),
    ("a.**", "ab.c", False),
    ("**.c", "a.b.c", True),
    ("**.c", "c", True),
    ("**.c", "a.bc", False),
    ("a.**.d", "a.d", True),
    ("a.**.d", "a.b.c.d", True),
    ("a.**.d", "a.b.c", False),
    ("a.**.c.*", "a.b.c.d", True),
    ("a.**.**", "a.b", True),
    ("**.blocks.*.attn.*", "t.r.blocks.0.attn.qkv", True),
    ("a-b.c", "a-b.c", True),
]


@pytest.mark.parametrize(("match", "path", "expected"), GLOBS)
def test_glob(match, path, expected):
    assert Rule(match, Precision.BF16, "").matches(path) is expected


@pytest.mark.parametrize(
    ("flag", "explicit", "name"),
    [
        (None, None, "bf16"),
        ("fp8", None, "fp8"),
        ("int8", None, "int8"),
        ("int8", "int8-text", "int8-text"),
        ("fp8", "fp8-tensor", "fp8-tensor"),
        ("fp8", "fp8-text-bf16", "fp8-text-bf16"),
        (None, "bf16", "bf16"),
        (None, "fp8", "fp8"),
    ],
)
def test_flag_and_name_resolve_to_one_recipe(flag, explicit, name):
    assert resolve_recipe(flag, explicit).name == name


def test_flag_against_recipe_names_both():
    with pytest.raises(RecipeError) as caught:
        resolve_recipe("fp8", "bf16")
    message = str(caught.value)
    assert "--quantization fp8" in message and "recipe bf16" in message and "no --quantization flag" in message


def test_a_recipe_has_one_method(write, recipe_dict):
    recipe_dict["rules"][6]["precision"] = "int8"
    error = refusal(write(recipe_dict))
    assert "has both FP8 and INT8 rules" in error.what and "fp8_channel" in error.fix and "int8" in error.fix


@pytest.mark.parametrize(
    ("precision", "method", "fix"),
    [("int8", "fp8", '"method" to "int8"'), ("fp8_channel", "int8", '"fp8"'), ("bf16", "int8", "to null")],
)
def test_a_method_that_the_rules_do_not_have_is_named_with_the_right_one(write, recipe_dict, precision, method, fix):
    for rule in recipe_dict["rules"]:
        if rule["precision"] == "fp8_channel":
            rule["precision"] = precision
    recipe_dict["method"] = method
    error = refusal(write(recipe_dict))
    assert f'method "{method}"' in error.what and fix in error.fix


@pytest.mark.parametrize("name", ["int8", "int8-text"])
def test_int8_recipes_differ_from_their_fp8_twins_in_the_precision_alone(name):
    twin = load_recipe({"int8": "fp8-text-bf16", "int8-text": "fp8"}[name])
    recipe = load_recipe(name)
    swapped = [(r.match, {"int8": "fp8_channel"}.get(r.precision.value, r.precision.value)) for r in recipe.rules]
    assert swapped == [(rule.match, rule.precision.value) for rule in twin.rules]
    assert (recipe.adaln, recipe.method, twin.method) == (twin.adaln, "int8", "fp8")


def test_unsupported_flag_names_the_supported_ones():
    with pytest.raises(RecipeError) as caught:
        resolve_recipe("mxfp8", None)
    assert "--quantization mxfp8" in str(caught.value) and "Supported: fp8, int8" in str(caught.value)


def test_explicit_path_wins(write, recipe_dict):
    path = write({**recipe_dict, "name": "mine"})
    recipe = resolve_recipe("fp8", str(path))
    assert recipe.name == "mine" and recipe.source == str(path) and recipe.adaln is Adaln.TABLE


def test_recipe_errors_exit_with_their_own_code(tmp_path):
    error = refusal(Path(tmp_path / "none.json"))
    assert error.exit_code == 4 and error.fix


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    assert "is no file" in refusal(tmp_path / "pipe.json").what


def test_a_recipe_nested_without_end_is_refused(tmp_path):
    (tmp_path / "deep.json").write_text('{"a":' * 100_000)
    assert "nested deeper" in refusal(tmp_path / "deep.json").why
