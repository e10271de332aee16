# SPDX-License-Identifier: Apache-2.0
"""A finished file gets its name once, whole, and never over another."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from vllm_h3_plugin.errors import ClipError, UsageError
from vllm_h3_plugin.video.promote import part_path, promote


@pytest.fixture(params=["hard links", "no hard links"])
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to rename: with ``link``, and on file systems that refuse it."""
    if request.param == "no hard links":

        def link(source: Path, target: Path) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", link)


@pytest.fixture
def part(tmp_path: Path) -> Path:
    path = part_path(tmp_path / "clip.mp4")
    path.write_bytes(b"new")
    return path


def test_the_part_stands_beside_the_final_name() -> None:
    assert part_path(Path("out/my clip.mp4")) == Path("out/my clip.mp4.part")


@pytest.mark.usefixtures("file_system")
def test_promote_moves_the_bytes_and_leaves_no_part(part: Path, tmp_path: Path) -> None:
    promote(part, tmp_path / "clip.mp4")
    assert (tmp_path / "clip.mp4").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["clip.mp4"]


@pytest.mark.usefixtures("file_system")
def test_an_existing_file_is_kept_and_so_is_the_part(part: Path, tmp_path: Path) -> None:
    final = tmp_path / "clip.mp4"
    final.write_bytes(b"old")
    with pytest.raises(
        UsageError, match=r"clip\.mp4 already exists: nothing is overwritten.*kept as .*clip\.mp4\.part"
    ):
        promote(part, final)
    assert final.read_bytes() == b"old"
    assert part.read_bytes() == b"new"


@pytest.mark.usefixtures("file_system")
def test_a_dangling_link_of_that_name_is_not_followed(part: Path, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="already exists"):
        promote(part, tmp_path / "clip.mp4")
    assert not (tmp_path / "elsewhere").exists()


def test_a_rename_that_fails_leaves_no_empty_placeholder(
    part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        promote(part, tmp_path / "clip.mp4")
    assert os.listdir(tmp_path) == ["clip.mp4.part"]


@pytest.mark.parametrize(("content", "state"), [(None, "does not exist"), (b"", "is empty")])
def test_nothing_is_promoted_from_nothing(tmp_path: Path, content: bytes | None, state: str) -> None:
    part = tmp_path / "clip.mp4.part"
    if content is not None:
        part.write_bytes(content)
    with pytest.raises(ClipError, match=rf"clip\.mp4\.part {state}"):
        promote(part, tmp_path / "clip.mp4")
    assert not (tmp_path / "clip.mp4").exists()


def test_another_file_system_is_named(part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(UsageError, match=r"another file system.*beside its final name, as .*clip\.mp4\.part"):
        promote(part, tmp_path / "clip.mp4")
    assert part.exists()


def test_a_missing_folder_is_named(part: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"clip\.mp4 cannot be written: No such file.*Check that .*nowhere"):
        promote(part, tmp_path / "nowhere" / "clip.mp4")
    assert part.exists()
