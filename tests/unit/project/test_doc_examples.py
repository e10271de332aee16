# SPDX-License-Identifier: Apache-2.0
"""What the documents show is real: commands parse, data blocks are valid, figures and messages are the code's."""

from __future__ import annotations

import ast
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from typer.main import get_command

from tools.environment import ROOT
from vllm_h3_plugin.checkpoint.layout import DitConfig, TextEncoderConfig, linear_layers
from vllm_h3_plugin.cli import recipe as recipe_verb
from vllm_h3_plugin.cli.main import VERBS, verb_app
from vllm_h3_plugin.pins import load_pins
from vllm_h3_plugin.quantization.plan import plan
from vllm_h3_plugin.quantization.recipe import load_recipe, recipe_names
from vllm_h3_plugin.serving.profile import Profile, profile_names
from vllm_h3_plugin.settings import known_variables

# CLI.md is the programs' own help; CHANGELOG.md speaks of versions that are gone.
NOT_CHECKED = {"CLI.md", "CHANGELOG.md"}
DOCUMENTS = sorted(p for p in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")) if p.name not in NOT_CHECKED)
SHELLS = {"sh", "bash", "console"}
# Reported by others for one Spark; the documents say so where it stands.
TABLE_GIB = 0.89
"""The default schedule's AdaLN table; `vllm-h3 recipe show` prints it (test_quantization_cli.py)."""

OTHERS_RESIDENT_GIB = 89.17

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_PUNCTUATION = frozenset("();<>|&\n")
# Shell words that stand before a command.
_BEFORE = frozenset({"exec", "time", "then", "do", "else", "if", "while", "until", "!"})
_MAKE_VARIABLES = frozenset({"HOST", "CLUSTER", "PYTHON", "ARGS", "FILE"})
# In typer 0.12 and in those that carry their own click alike, the base of every complaint about a command line.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]  # type: ignore[assignment]


class Block(NamedTuple):
    """A fenced block of a document."""

    document: str
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    """Blocks of these languages in all documents."""
    found = [Block(path.name, *match) for path in DOCUMENTS for match in _FENCE.findall(path.read_text("utf-8"))]
    return [block for block in found if block.language in languages]


def simple_commands(script: str) -> Iterator[list[str]]:
    """The words of each simple command of a shell script, quoted scripts inside it included."""
    script = re.sub(r"(^|\s)#.*", r"\1", script.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(script, posix=True, punctuation_chars="".join(_PUNCTUATION))
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words: list[str] = []
    for word in [*lexer, "\n"]:
        if not set(word) <= _PUNCTUATION:
            words.append(word)
            if re.search(r"\svllm-h3\s", word):
                yield from simple_commands(word)
            continue
        while words and (words[0] in _BEFORE or _ASSIGNMENT.fullmatch(words[0])):
            words.pop(0)
        if words:
            yield words
        words = []


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """(document, words) of every vllm-h3 and make command, from shell blocks and from code in running text."""
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        scripts = [body for language, body in _FENCE.findall(text) if language in SHELLS]
        # `a \| b` is how a pipe is written in a cell of a table.
        spans = _SPAN.findall(_FENCE.sub("", text.replace("\\|", "|")))
        scripts += [span for span in spans if re.match(r"(\w+=\S+ )*(\S*/)?(vllm-h3|make) ", span)]
        for script in scripts:
            for words in simple_commands(script):
                if Path(words[0]).name in {"vllm-h3", "make"}:
                    yield path.name, [Path(words[0]).name, *words[1:]]


def _is_placeholder(word: str) -> bool:
    return word.isupper() or "…" in word


def fault_of_make(words: list[str]) -> str | None:
    """What is wrong with the arguments of make; None if nothing is."""
    phony = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    targets = {target for line in phony for target in line.split()}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals and name not in targets:
            return f"no target {name}"
        if equals and name not in _MAKE_VARIABLES:
            return f"no variable {name}"
        if name == "HOST" and equals and value not in {pin.name for pin in load_pins().hosts}:
            return f"no host {value}"
    return None


def fault_of_h3(words: list[str]) -> str | None:
    """What is wrong with the arguments of vllm-h3; None if nothing is. A verb without arguments is only named."""
    if not words or words[0] in {"--help", "--version"} or _is_placeholder(words[0]):
        return None
    verb, args = words[0], words[1:]
    if verb not in VERBS:
        return f"no verb {verb}"
    command: Any = get_command(verb_app(verb))
    while hasattr(command, "commands") and args and not args[0].startswith("-"):
        if args[0] not in command.commands:
            return f"no verb {verb} {args[0]}"
        command, args = command.commands[args[0]], args[1:]
    if not args or "--help" in args:
        return None
    try:
        with command.make_context(verb, list(args)) as context:
            values = context.params
    except _USAGE_ERROR as exc:
        return str(exc.format_message())  # type: ignore[attr-defined]
    return _fault_of_names(verb, values)


def _fault_of_names(verb: str, values: dict[str, Any]) -> str | None:
    target, recipe = str(values.get("target", "")), values.get("recipe")
    profile = target if verb == "serve" else str(values.get("profile", ""))
    if re.fullmatch(r"[a-z0-9-]+", profile) and profile not in profile_names():
        return f"no profile {profile}"
    if recipe and not _is_placeholder(recipe) and "/" not in recipe and recipe not in recipe_names():
        return f"no recipe {recipe}"
    return None


def _fault(words: list[str]) -> str | None:
    return fault_of_make(words[1:]) if words[0] == "make" else fault_of_h3(words[1:])


def test_every_command_in_the_documents_exists_and_parses() -> None:
    # Remedies in the index of errors have values in them that only a run knows.
    commands = [found for found in shown_commands() if found[0] != "ERRORS.md" or "…" not in "".join(found[1])]
    assert len(commands) > 40
    assert {words[1] for _, words in commands if words[0] == "vllm-h3" and len(words) > 1} >= set(VERBS)
    faults = [f"{document}: {shlex.join(words)}: {_fault(words)}" for document, words in commands if _fault(words)]
    assert faults == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vllm-h3 dance", "no verb dance"),
        ("vllm-h3 recipe bake", "no verb recipe bake"),
        ("vllm-h3 serve spark --prot 8000", "No such option"),
        ("vllm-h3 serve spark --port http", "--port"),
        ("vllm-h3 serve sparc -c CKPT", "no profile sparc"),
        ("vllm-h3 recipe show --recipe fp9", "no recipe fp9"),
        ("vllm-h3 synth DIR --partition all", "all"),
        ("make preflite", "no target preflite"),
        ("make demo SIZE=3", "no variable SIZE"),
        ("HOST=ascend make setup", None),
        ("make demo HOST=amd", "no host amd"),
        ("docker run IMAGE -c 'pip install x && vllm-h3 doctor --deep'", "No such option"),
        ("if true; then\n  vllm-h3 inspect CKPT --taks x # why\nfi", "No such option"),
        ("H3_REFERENCE=1 .venv-nvidia/bin/vllm-h3 serve x/FL2VA --recipe bf16 -- --enforce-eager", None),
    ],
)
def test_a_wrong_command_is_seen(line: str, expected: str | None) -> None:
    commands = [[Path(words[0]).name, *words[1:]] for words in simple_commands(line)]
    faults = [_fault(words) for words in commands if words[0] in {"vllm-h3", "make"}]
    assert len(faults) == 1
    assert faults[0] is None if expected is None else expected in str(faults[0])


@pytest.mark.parametrize("block", blocks("json"), ids=lambda block: block.document)
def test_json_in_the_documents_is_valid(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda block: block.document)
def test_toml_in_the_documents_is_a_profile(block: Block) -> None:
    Profile.model_validate(tomllib.loads(block.text))


def test_the_recipe_in_the_documents_fits_the_real_model(tmp_path: Path) -> None:
    recipes = [block for block in blocks("json") if "rules" in json.loads(block.text)]
    assert recipes
    for number, block in enumerate(recipes):
        path = tmp_path / f"{number}.json"
        path.write_text(block.text, encoding="utf-8")
        given = plan(load_recipe(path), linear_layers(DitConfig(), TextEncoderConfig()))
        assert given.quantized


def test_every_setting_that_the_documents_name_exists() -> None:
    for path in DOCUMENTS:
        named = set(re.findall(r"\bH3_[A-Z]+(?:_[A-Z]+)*\b", path.read_text(encoding="utf-8")))
        assert named <= set(known_variables()), path.name


def test_python_one_liners_in_the_documents_run() -> None:
    lines = [words for block in blocks(*SHELLS) for words in simple_commands(block.text) if words[0] == "python3"]
    ours = [words[2] for words in lines if words[1] == "-c" and "vllm_h3_plugin" in words[2]]
    assert ours
    for code in ours:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == load_pins().hosts[0].image.pinned


def _rows(text: str, header: str) -> list[list[str]]:
    """Cells of the tables whose first heading is ``header``."""
    rows = []
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
        if lines[0][0] == header:
            rows += lines[2:]
    return rows


def _document(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_resident_totals_in_the_documents_are_those_that_recipe_show_computes() -> None:
    written = {row[0].split("`")[1]: float(row[-1]) for row in _rows(_document("PRECISION.md"), "Recipe")}
    assert set(written) == set(recipe_names())
    computed = {}
    for name in recipe_names():
        with redirect_stdout(io.StringIO()) as out:
            recipe_verb.show(checkpoint=None, recipe=name, every=False, as_json=True)
        shown = json.loads(out.getvalue())
        computed[name] = shown["total"]["gib"] + (shown["adaln_table"] or {"gib": 0})["gib"]
    assert written == pytest.approx(computed, abs=0.006)
    known = {*written.values(), OTHERS_RESIDENT_GIB, TABLE_GIB}
    for path in (ROOT / "README.md", ROOT / "docs" / "QUICKSTART.md", ROOT / "docs" / "SPARK.md"):
        assert {float(value) for value in re.findall(r"(\d+\.\d{2}) GiB", path.read_text("utf-8"))} <= known, path.name


def test_errors_of_one_linear_are_those_that_the_lines_beside_the_table_print() -> None:
    (block,) = (block for block in blocks("python") if block.document == "PRECISION.md")
    with redirect_stdout(io.StringIO()) as out:
        exec(compile(block.text, "PRECISION.md", "exec"), {})
    printed = [re.findall(r"[\d.]+", line) for line in out.getvalue().splitlines()]
    written = [re.findall(r"[\d.]+", " ".join(row)) for row in _rows(_document("PRECISION.md"), "Factor")]
    assert len(written) == 5
    for wanted, got in zip(written, printed, strict=True):
        assert [float(cell) for cell in got] == pytest.approx([float(cell) for cell in wanted], abs=0.11)


def test_the_info_example_has_the_fields_that_the_server_reports() -> None:
    (info,) = (content for block in blocks("json") if "workers" in (content := json.loads(block.text)))
    pin = load_pins().hosts[0]
    assert (info["host"]["vllm"], info["host"]["vllm-omni"]) == (pin.vllm, pin.vllm_omni)
    for source, fields in (
        ("endpoints.py", info),
        ("pipeline.py", info["workers"][0]),
        ("progress.py", info["progress"]),
    ):
        code = (ROOT / "vllm_h3_plugin" / "host" / source).read_text(encoding="utf-8")
        assert [name for name in fields if f'"{name}":' not in code] == [], source


@cache
def _templates() -> tuple[tuple[re.Pattern[str], int], ...]:
    """Every text of the code as a pattern, values standing for anything, with the length of its fixed part."""
    found = {}
    for folder in ("vllm_h3_plugin", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                fixed = [part.value if isinstance(part, ast.Constant) else None for part in parts]
                if not any(isinstance(text, str) for text in fixed):
                    continue
                pattern = "".join(re.escape(text) if isinstance(text, str) else ".*" for text in fixed)
                found[pattern] = sum(len(text) for text in fixed if isinstance(text, str))
    return tuple((re.compile(pattern, re.DOTALL), length) for pattern, length in found.items())


def is_printed(message: str) -> bool:
    """Whether the code can print the message; ``…`` in it stands for a value. A text that is mostly values is none."""
    if message in (ROOT / "Makefile").read_text(encoding="utf-8"):
        return True
    needed = max(10, len(message.replace("…", "")) // 2)
    return any(length >= needed and pattern.fullmatch(message) for pattern, length in _templates())


def test_every_message_in_troubleshooting_is_one_that_the_code_prints() -> None:
    texts = (_document("TROUBLESHOOTING.md"), _document("CLUSTER.md"))
    messages = [span for text in texts for row in _rows(text, "Message") for span in _SPAN.findall(row[0])]
    assert len(messages) > 60
    assert [message for message in messages if message != "ffmpeg" and not is_printed(message)] == []


def test_a_message_that_the_code_does_not_print_is_seen() -> None:
    assert is_printed("cannot listen on …:…")
    assert not is_printed("cannot listen at …:…")
    assert not is_printed("something else entirely: …")
