# SPDX-License-Identifier: Apache-2.0
"""Every example with curl in docs/API.md, run by bash as it stands there, with $URL, $KEY and $H3 (the header) set.

A block is read as its reader reads it: each request succeeds, unless a comment says ``# answers 400``, in the order of
the requests that do not. Two things are made smaller, since a clip of full size takes this platform an hour: sizes and
steps, where no error is shown. The server of these tests has a key; a block that does not speak of one is given it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.server.clients.conftest import KEY, Keyed
from tools.environment import ROOT

pytestmark = pytest.mark.programs("bash", "curl")

BLOCK_S = 180
SHELLS = {"bash", "sh"}
LONGEST_SIDE, MOST_STEPS = 256, 4
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ANSWERS = re.compile(r"#\s*answers\s+(\d{3})")
_SIZE = re.compile(r"""(?<=size=)\d+x\d+|(?<="size": ")\d+x\d+""")
_STEPS = re.compile(r"""(?<=steps=)\d+|(?<=steps": )\d+""")
_REFUSED = 22
"""What curl ends with where --fail meets an error."""


class Example(NamedTuple):
    """A block of the document.

    Attributes:
        line: where it begins.
        answers: statuses of its errors.
    """

    line: int
    script: str
    answers: tuple[int, ...]


def examples(text: str) -> list[Example]:
    """The blocks that call curl."""
    found = []
    for match in _FENCE.finditer(text):
        language, script = match.groups()
        if language in SHELLS and re.search(r"\bcurl\b", script):
            answers = tuple(int(status) for status in _ANSWERS.findall(script))
            found.append(Example(text[: match.start()].count("\n") + 1, script, answers))
    return found


def smaller(script: str) -> str:
    """The script with sizes and steps that this platform makes in seconds."""

    def size(match: re.Match[str]) -> str:
        sides = [int(side) for side in match[0].split("x")]
        scale = min(1.0, LONGEST_SIDE / max(sides))
        return "x".join(str(round(side * scale)) for side in sides)

    return _STEPS.sub(lambda match: str(min(int(match[0]), MOST_STEPS)), _SIZE.sub(size, script))


EXAMPLES = examples((ROOT / "docs" / "API.md").read_text(encoding="utf-8"))


class Shell:
    """Runs scripts in a folder that has what examples upload."""

    def __init__(self, folder: Path, keyed: Keyed, pictures: tuple[Path, Path]) -> None:
        self.folder, self.keyed = folder, keyed
        self.asked = folder / ".asked"
        self.asked.mkdir()
        for path in pictures:
            shutil.copy(path, folder / path.name)
        curl = folder / ".bin" / "curl"
        curl.parent.mkdir()
        # The headers of each answer tell what curl itself may not print.
        curl.write_text(f'#!/bin/sh\nexec {shutil.which("curl")} -D "$ASKED/$(date +%s%N)-$$" "$@" $GIVEN_KEY\n')
        curl.chmod(0o755)

    def run(self, example: Example) -> tuple[int, list[int], str]:
        """(exit code, statuses of all answers, output)."""
        script = example.script if example.answers else smaller(example.script)
        script = script.replace("http://127.0.0.1:8000", self.keyed.url)
        speaks_of_it = 401 in example.answers or re.search(r"Authorization|\bH3\b|\bKEY\b|--oauth2-bearer", script)
        environment = {
            **os.environ,
            "PATH": f"{self.folder / '.bin'}:{os.environ['PATH']}",
            "ASKED": str(self.asked),
            "GIVEN_KEY": "" if speaks_of_it else f"--oauth2-bearer {KEY}",
            "KEY": KEY,
            "H3": f"Authorization: Bearer {KEY}",
            "URL": self.keyed.url,
        }
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", script],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=BLOCK_S,
            check=False,
        )
        heads = [path.read_text() for path in sorted(self.asked.iterdir())]
        statuses = [int(re.findall(r"^HTTP/\S+ (\d{3})", head, re.MULTILINE)[-1]) for head in heads]
        return done.returncode, statuses, done.stdout[-2000:].decode(errors="replace")


@pytest.fixture
def shell(keyed: Keyed, tmp_path: Path, pictures: tuple[Path, Path]) -> Shell:
    """A shell in a folder of its own."""
    return Shell(tmp_path, keyed, pictures)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"line{example.line}")
def test_an_example_of_the_document_does_what_it_shows(shell: Shell, example: Example) -> None:
    code, statuses, output = shell.run(example)
    assert statuses, output
    assert [status for status in statuses if status >= 400] == list(example.answers), output
    assert code == 0 or (code == _REFUSED and example.answers), output


def test_the_document_has_examples() -> None:
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize(
    ("script", "code", "errors"),
    [
        ('curl -sS "$URL/v1/videos/nobody"', 0, [404]),
        ('curl -sS --fail "$URL/v1/videos/nobody"', _REFUSED, [404]),
        ('curl -sS "$URL/v1/videos" -F size=64x64 -F "prompt="', 0, [400]),
        ('curl -sS -H "Authorization: Bearer x$KEY" "$URL/v1/videos"', 0, [401]),
        ('curl -sS -H "Authorization: Bearer $KEY" "$URL/v1/videos" | grep -q list', 0, []),
        ("curl -sS http://127.0.0.1:1/", 7, None),
    ],
)
def test_an_example_that_does_not_work_is_seen(shell: Shell, script: str, code: int, errors: list[int] | None) -> None:
    (example,) = examples(f"```bash\n{script}\n```\n")
    if errors is None:
        with pytest.raises(IndexError):
            shell.run(example)
        return
    found = shell.run(example)
    assert (found[0], [status for status in found[1] if status >= 400]) == (code, errors)


def test_what_is_made_smaller_and_what_is_not() -> None:
    script = 'curl -F size=1344x768 -F num_inference_steps=50 -d \'{"size": "64x64", "steps": 3}\''
    assert smaller(script) == script.replace("1344x768", "256x146").replace("=50", "=4")
    marked = examples("```bash\n# answers 400\ncurl $URL -F size=16000x1\n```\n\n```json\n{}\n```\n")
    assert marked == [Example(1, "# answers 400\ncurl $URL -F size=16000x1\n", (400,))]
