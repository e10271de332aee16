# SPDX-License-Identifier: Apache-2.0
"""Files that are no whole clip: each is told from the others, by name, with the way out."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_h3_plugin.errors import ClipError
from vllm_h3_plugin.video.probe import probe
from vllm_h3_plugin.video.verify import verify


def written(content: bytes) -> Callable[[Path, Path], Path]:
    def make(folder: Path, good: Path) -> Path:
        path = folder / "bad.mp4"
        path.write_bytes(content)
        return path

    return make


def cut(keep: float | int) -> Callable[[Path, Path], Path]:
    """Keep a fraction of the file, or all but so many bytes (negative)."""

    def make(folder: Path, good: Path) -> Path:
        data = good.read_bytes()
        return written(data[: int(len(data) * keep) if isinstance(keep, float) else keep])(folder, good)

    return make


def without_index(folder: Path, good: Path) -> Path:
    data = good.read_bytes()
    return written(data[: data.rindex(b"moov") - 4])(folder, good)


def special_file(folder: Path, good: Path) -> Path:
    path = folder / "bad.mp4"
    os.mkfifo(path)
    return path


HTML = b"\n<!DOCTYPE html><html><head><title>504 Gateway Time-out</title></head><body>nginx</body></html>"
XML = b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code><Message>The key does not exist.</Message></Error>"
JSON = b'{"error": {"message": "out of memory", "type": "InternalServerError", "code": 500}}'
DETAIL = b'{"detail": [{"loc": ["body", "size"], "msg": "bad"}]}'

BAD = {
    "missing": (lambda folder, good: folder / "bad.mp4", "missing", r"bad\.mp4 does not exist.*NAME\.part"),
    "folder": (lambda folder, good: folder, "directory", r"is a folder.*Name the clip's file"),
    "pipe": (special_file, "special", r"not a regular file"),
    "empty": (written(b""), "empty", r"empty \(0 bytes\).*disk space"),
    "html": (written(HTML), "html", r"HTML or XML page.*'504 Gateway Time-out'.*Download the clip again"),
    "xml": (written(XML), "html", r"HTML or XML page.*'The key does not exist\.'"),
    "json": (written(JSON), "json", r"JSON answer, not a clip.*'out of memory'.*Download the clip again"),
    "json detail": (written(DETAIL), "json", r"JSON answer.*body.*size.*bad"),
    "json cut": (written(JSON[:30]), "json", r"JSON answer.*error.*message.*out of"),
    "text": (written("Wörter, viele\nmehr".encode()), "text", r"text file, not a clip.*'Wörter, viele mehr'"),
    "playlist": (written(b"#EXTM3U\n#EXTINF:1,\n/etc/hostname\n"), "text", r"text file.*#EXTM3U"),
    "pointer": (written(b"version https://git-lfs.github.com/spec/v1\n"), "text", r"Git LFS pointer.*git lfs pull"),
    "webm": (written(b"\x1a\x45\xdf\xa3" + bytes(60)), "other_format", r"Matroska or WebM file, not MP4.*video/mp4"),
    "png": (written(b"\x89PNG\r\n\x1a\n" + bytes(60)), "other_format", r"PNG picture, not MP4"),
    "noise": (written(b"\x00\x01\x02\x03\x04\x05\x06\x07\xff" * 9), "unknown_format", r"not MP4.*00 01 02 03"),
    "cut by one byte": (cut(-1), "truncated", r"truncated: its moov box goes 1 bytes beyond.*Content-Length"),
    "cut in half": (cut(0.5), "truncated", r"truncated: its mdat box goes \d+ bytes beyond"),
    "without index": (without_index, "no_index", r"no index \(moov box\).*ftyp free mdat.*writer stopped"),
    "four bytes": (written(b"\x00\x00\x00\x20"), "unknown_format", r"not MP4"),
}


@pytest.mark.parametrize("case", BAD)
def test_each_bad_file_is_named_for_what_it_is(case: str, good: Path, tmp_path: Path) -> None:
    make, kind, message = BAD[case]
    folder = tmp_path / "in"
    folder.mkdir()
    path = make(folder, good)
    with pytest.raises(ClipError, match=f"(?s){message}") as caught:
        probe(path)
    assert caught.value.details["fault"] == kind
    assert str(path) in caught.value.what
    assert caught.value.fix

    verdict = verify(path)
    assert not verdict.ok
    with pytest.raises(ClipError, match=f"(?s){message}"):
        verdict.raise_if_failed()


@pytest.mark.usefixtures("no_ffmpeg")
def test_a_file_that_is_no_clip_is_named_even_without_ffmpeg(tmp_path: Path) -> None:
    verdict = verify(written(HTML)(tmp_path, tmp_path))
    assert verdict.error() is not None and "HTML" in str(verdict.error())


def test_a_clip_with_its_index_first_cut_in_half_is_truncated(make_clip, tmp_path: Path) -> None:
    fast = make_clip("fast.mp4", movflags="+faststart")
    assert verify(fast).ok
    path = cut(0.5)(tmp_path, fast)
    with pytest.raises(ClipError, match=r"truncated: its mdat box"):
        probe(path)


def test_sound_alone_is_no_clip(make_clip) -> None:
    path = make_clip("sound.mp4", picture=None)
    verdict = verify(path)
    with pytest.raises(
        ClipError, match=rf"{path} has no video stream: it holds: audio \(aac\).*encoder was given frames"
    ):
        verdict.raise_if_failed()
    assert [check.name for check in verdict.failures] == ["video stream"]


def test_a_cover_picture_is_no_video(make_clip) -> None:
    path = make_clip("cover.mp4", frames=1, video_codec="png")
    with pytest.raises(ClipError, match=r"has no video stream: it holds: video \(png\), audio \(aac\)"):
        probe(path)


def test_a_damaged_index_is_said_to_be_damaged(good: Path) -> None:
    data = good.read_bytes()
    start = data.rindex(b"moov") + 4
    good.write_bytes(data[:start] + b"\xff" * (len(data) - start))
    with pytest.raises(ClipError, match=r"(cannot be opened as MP4.*index is damaged|has no video stream)"):
        probe(good)


def test_a_codec_that_nobody_knows_is_named_so(good: Path) -> None:
    good.write_bytes(good.read_bytes().replace(b"avc1", b"zzzz"))
    with pytest.raises(ClipError, match=r"no video stream: it holds: .*\(unknown codec\), audio \(aac\)"):
        probe(good)


def test_sound_in_a_codec_that_nobody_knows_fails(good: Path) -> None:
    good.write_bytes(good.read_bytes().replace(b"mp4a", b"zzzz").replace(b"esds", b"zzzz"))
    verdict = verify(good)
    assert verdict.error() is not None
    assert "audio stream: unknown codec 0 Hz" in verdict.error().what


def test_a_name_in_the_index_that_is_no_text_is_no_obstacle(good: Path) -> None:
    data = good.read_bytes()
    assert b"VideoHandler" in data
    good.write_bytes(data.replace(b"VideoHandler", b"Video\xb6andler"))
    assert verify(good).error() is None


def test_an_unreadable_file_is_said_to_be_so(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    with pytest.raises(ClipError, match=r"cannot be read: no permission.*owner and mode"):
        probe(good)


def test_bytes_behind_the_last_box_are_a_warning(good: Path) -> None:
    with good.open("ab") as file:
        file.write(bytes(1000))
    verdict = verify(good)
    assert verdict.ok
    assert [(check.name, "1000 at the end" in check.seen) for check in verdict.warnings] == [("container", True)]
    assert not verify(good, strict=True).ok


def test_a_name_that_looks_like_a_protocol_or_an_option_is_a_file(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(good.parent)
    for name in ("tcp:a.mp4", "-i [x] %03d.mp4", "concat:a|b.mp4", "ä b'\"\n.mp4"):
        good = good.rename(good.with_name(name))
        assert verify(Path(name)).error() is None


def test_probing_opens_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x.ts"
        path = written(f"#EXTM3U\n#EXTINF:1,\n{url}\n#EXT-X-ENDLIST\n".encode())(tmp_path, tmp_path)
        assert not verify(path).ok
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_file_of_one_word_may_be_a_key_and_is_not_shown(tmp_path: Path) -> None:
    from vllm_h3_plugin.video.verdict import Expectation
    from vllm_h3_plugin.video.verify import verify

    file = tmp_path / "api-key"
    file.write_text("5ecret" * 8 + "\n")
    error = verify(file, Expectation()).error()
    assert error is not None and "5ecret" not in error.report() and "one word" in error.report()
