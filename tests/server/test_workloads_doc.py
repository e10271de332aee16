# SPDX-License-Identifier: Apache-2.0
"""Every bash block of docs/WORKLOADS.md, in order, in one folder, as a reader types it, on the reference platform.

A block that begins with ``vllm-h3 serve`` is a server that runs until the next one; it gets a port of its own. Sizes,
steps and lengths are made smaller where nothing refuses them; a comment ``# answers 400`` says which requests are.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ports import own_port
from tests.server.adapter_kit import Adapters
from tests.server.clients.test_curl_examples import smaller
from tests.unit.cli.test_cli_serve_and_demo import run
from tools.environment import ROOT
from vllm_h3_plugin.checkpoint.synthetic import tiny_text

pytestmark = [pytest.mark.programs("bash", "curl"), pytest.mark.timeout(1500)]

TEXT = (ROOT / "docs" / "WORKLOADS.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
DRY = re.findall(r"^vllm-h3 (serve .*--dry-run)$", TEXT, re.MULTILINE)
BLOCK_S = 300


class Reader:
    """Somebody who follows the page in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self._server: subprocess.Popen[str] | None = None
        asked = folder / ".asked"
        asked.mkdir()
        programs = folder / ".bin"
        programs.mkdir()
        verb = Path(sys.executable).parent / "vllm-h3"
        for name, line in (
            ("vllm-h3", f'exec {shlex.quote(str(verb))} "$@"'),
            ("curl", f'exec {shutil.which("curl")} -D "{asked}/$(date +%s%N)-$$" "$@"'),
        ):
            (programs / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
            (programs / name).chmod(0o755)
        self._asked = asked
        self._environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "H3_REFERENCE": "1"}
        self._environment["H3_CACHE_DIR"] = str(folder / "cache")
        self._environment["VLLM_OMNI_SERVER_STORAGE__PATH"] = str(folder / "storage")

    def follow(self, block: str) -> None:
        """Do what a block says."""
        if block.startswith("vllm-h3 serve"):
            self._serve(block)
            return
        answers = [int(status) for status in re.findall(r"# answers (\d{3})", block)]
        script = block if answers else smaller(block).replace("num_frames=124", "num_frames=96")
        if "image_reference" in script and not answers:
            # No side below 256 where pictures come with it: 0.28 makes no such clip.
            script = re.sub(r"size=\d+x\d+", "size=256x256", script)
        for old in self._asked.iterdir():
            old.unlink()
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", script.replace("seconds=5", "seconds=4")],
            cwd=self.folder,
            env={**self._environment, "URL": self.url},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=BLOCK_S,
            check=False,
        )
        output = done.stdout[-3000:].decode(errors="replace")
        assert done.returncode == 0, f"{block}\n{output}"
        heads = [path.read_text() for path in sorted(self._asked.iterdir())]
        statuses = [int(re.findall(r"^HTTP/\S+ (\d{3})", head, re.MULTILINE)[-1]) for head in heads]
        assert [status for status in statuses if status >= 400] == answers, f"{block}\n{output}"
        assert len(statuses) == len(re.findall(r"\bcurl ", block))

    def _serve(self, block: str) -> None:
        self.close()
        port = own_port()
        self.url = f"http://127.0.0.1:{port}"
        self._server = subprocess.Popen(
            [*shlex.split(block.replace("\\\n", " ")), "--port", str(port)],
            cwd=self.folder,
            env=self._environment,
            executable=str(self.folder / ".bin" / "vllm-h3"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._server.stderr is not None
        seen = []
        for line in self._server.stderr:
            seen.append(line)
            if "ready after" in line:
                # What follows must not fill the pipe.
                subprocess.Popen(["cat"], stdin=self._server.stderr, stdout=subprocess.DEVNULL)
                return
        raise AssertionError("".join(seen[-40:]))

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGTERM)
            try:
                self._server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._server.pid, signal.SIGKILL)
                self._server.wait()
            self._server = None


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.close()


def test_whoever_follows_the_page_gets_what_it_shows(
    reader: Reader, pictures: tuple[Path, Path], film: Path, tone: bytes
) -> None:
    assert len(BLOCKS) >= 9 and sum(block.startswith("vllm-h3 serve") for block in BLOCKS) == 3
    shutil.copy(pictures[0], reader.folder / "picture.png")
    shutil.copy(film, reader.folder / "film.mp4")
    (reader.folder / "voice.wav").write_bytes(tone)
    for block in BLOCKS:
        reader.follow(block)
    made = {path.name for path in reader.folder.glob("*.mp4")} - {"film.mp4"}
    ways = {"turbo.mp4", "base.mp4", "mine.mp4", "fasth3.mp4", "text.mp4", "picture.mp4", "mixed.mp4"}
    assert made == ways
    clips = {name: (reader.folder / name).read_bytes() for name in made}
    # A server of both partitions makes FL2VA's clip, as one with an adapter at scale 0 does.
    assert clips["text.mp4"] == clips["base.mp4"]
    assert len(set(clips.values())) == len(ways) - 1


def test_a_block_that_does_not_do_what_it_shows_is_seen(reader: Reader) -> None:
    with pytest.raises(AssertionError, match="false"):
        reader.follow("false\n")
    with pytest.raises(AssertionError):
        reader.follow("vllm-h3 serve spark-turbo -c nowhere\n")


@pytest.mark.only_host("ascend", reason="a profile of Ascend cards runs on the host that is pinned for them")
def test_the_ascend_profile_passes_its_checks(
    checkpoint_of: Callable[..., Path], adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = DRY
    words = shlex.split(line)
    # Four cards take a key/value head of the text encoder each.
    words[words.index("-c") + 1] = str(checkpoint_of(text=replace(tiny_text(), num_key_value_heads=4)))
    words[words.index("--lora") + 1] = str(adapters("turbo"))
    monkeypatch.setattr("vllm_h3_plugin.serving.cards.check_cards", lambda *args: None)  # there are none here
    monkeypatch.delenv("H3_REFERENCE", raising=False)
    assert run(*words) == 0
