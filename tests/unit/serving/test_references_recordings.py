# SPDX-License-Identifier: Apache-2.0
"""Film and sound references: what is in the file, and whether all of it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.serving.reference_kit import encoded, film, loaded, picture, refused, sound, taken
from vllm_h3_plugin.serving.references.limits import ReferenceLimits
from vllm_h3_plugin.serving.references.recording import probe_sound
from vllm_h3_plugin.serving.references.unfit import Unfit

_MADE: dict[str, bytes] = {}


@pytest.fixture
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a film or sound, each once."""

    def make(maker: Any, **options: Any) -> bytes:
        key = f"{maker.__name__} {options}"
        if key not in _MADE:
            _MADE[key] = maker(tmp_path_factory.mktemp("made") / "file", **options)
        return _MADE[key]

    return make


def test_a_film_is_kept_as_a_file_that_the_host_can_name(made: Any, tmp_path: Path) -> None:
    data = made(film)
    found = taken(data, tmp_path, "video")
    assert (found.facts.kind, found.facts.format) == ("video", "mp4")
    assert (found.facts.width, found.facts.height, found.facts.seconds) == (256, 256, 2.5)
    assert found.path is not None and found.path.suffix == ".mp4" and found.path.read_bytes() == data
    assert [found.path] == list(tmp_path.iterdir())


def test_a_mov_is_told_from_an_mp4(made: Any, tmp_path: Path) -> None:
    assert taken(made(film, format_="mov"), tmp_path).facts.format == "mov"


def test_media_removes_its_files_and_may_do_so_twice(made: Any, tmp_path: Path) -> None:
    import io

    from vllm_h3_plugin.serving.references.load import ReferencePolicy, load
    from vllm_h3_plugin.serving.rules.ask import Reference

    sent = [
        Reference(f"input_references[{place}]", None, io.BytesIO(data))
        for place, data in enumerate((made(film), made(sound), encoded(picture())))
    ]
    media, faults = load(sent, ReferencePolicy(folder=tmp_path))
    assert not faults and (len(media.videos), len(media.audios), len(media.images)) == (1, 1, 1)
    assert [facts.kind for facts in media.facts] == ["video", "audio", "image"]
    media.close()
    media.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "why", "allowed"),
    [
        ({"seconds": 1.0}, "it lasts 1.00 s", "2 to 15 s"),
        ({"seconds": 16.0, "size": (256, 256)}, "it lasts 16.00 s", "2 to 15 s"),
        ({"size": (128, 256)}, "it is 128x256 pixels", "sides of 256 to 5760 pixels"),
        ({"size": (1024, 320)}, "3.2 to 1", "width over height from 0.4 to 2.5"),
        ({"rate": 10}, "10.000 frames a second", "23.976 to 60 frames a second"),
        ({"rate": 120}, "120.000 frames a second", "23.976 to 60 frames a second"),
        ({"codec": "mpeg4"}, "coded as mpeg4", "an MP4 or MOV film (H.264 or H.265)"),
        ({"sound": "ac3"}, "sound is coded as ac3", "AAC or MP3 sound, or none"),
    ],
)
def test_films_out_of_range_are_refused_with_the_range(
    options: dict[str, Any], why: str, allowed: str, made: Any, tmp_path: Path
) -> None:
    fault = refused(made(film, **options), tmp_path, "video")
    assert why in fault.why and fault.allowed == allowed


def test_a_film_without_sound_is_taken(made: Any, tmp_path: Path) -> None:
    assert taken(made(film, sound=None), tmp_path).facts.kind == "video"


@pytest.mark.parametrize("share", [0.1, 0.6, 0.95])
def test_a_truncated_film_is_refused(share: float, made: Any, tmp_path: Path) -> None:
    data = made(film)
    fault = refused(data[: int(len(data) * share)], tmp_path, "video")
    assert "truncated" in fault.why
    assert str(tmp_path) not in fault.why


def test_a_film_whose_index_stands_first_is_missed_at_its_end(made: Any, tmp_path: Path) -> None:
    """The header is whole and says 2.5 s; the pictures of the second half are not there."""
    import av

    source, path = tmp_path / "source.mp4", tmp_path / "made.mp4"
    source.write_bytes(made(film))
    with av.open(source) as read, av.open(path, "w", format="mp4", options={"movflags": "faststart"}) as write:
        streams = {stream: write.add_stream_from_template(stream) for stream in read.streams}
        for packet in read.demux():
            if packet.dts is not None:
                packet.stream = streams[packet.stream]
                write.mux(packet)
    data = path.read_bytes()
    source.unlink()
    path.unlink()
    start = data.index(b"mdat") - 4
    assert data.index(b"moov") < start
    assert "truncated" in refused(data[: len(data) // 2], tmp_path, "video").why
    # Boxes that end where the file does, and an index that goes beyond.
    half = data[: (start + len(data)) // 2]
    closed = half[:start] + (len(half) - start).to_bytes(4, "big") + half[start + 4 :]
    assert "truncated" in refused(closed, tmp_path, "video").why


def test_a_film_of_zeros_behind_a_good_header_is_refused(made: Any, tmp_path: Path) -> None:
    data = bytearray(made(film))
    start = data.index(b"mdat") + 4
    end = data.rindex(b"moov") - 4
    data[start:end] = bytes(end - start)
    assert "broken" in refused(bytes(data), tmp_path, "video").why


def test_a_sound_in_a_films_container_is_named(made: Any, tmp_path: Path) -> None:
    fault = refused(made(sound, codec="aac", format_="mp4", rate=48_000), tmp_path, "video")
    assert fault.why == "it has no moving picture, only sound"


@pytest.mark.parametrize(("codec", "format_"), [("pcm_s16le", "wav"), ("pcm_f32le", "wav"), ("mp3", "mp3")])
def test_sounds_are_taken(codec: str, format_: str, made: Any, tmp_path: Path) -> None:
    found = taken(made(sound, codec=codec, format_=format_), tmp_path, "audio")
    assert (found.facts.kind, found.facts.format) == ("audio", format_)
    assert found.facts.seconds == pytest.approx(2.5, abs=0.15)
    assert found.path is not None and found.path.suffix == f".{format_}"


@pytest.mark.parametrize("seconds", [1.0, 16.0])
def test_sounds_out_of_range_are_refused_with_the_range(seconds: float, made: Any, tmp_path: Path) -> None:
    assert refused(made(sound, seconds=seconds), tmp_path, "audio").allowed == "2 to 15 s"


def test_a_sound_coded_otherwise_is_refused(made: Any, tmp_path: Path) -> None:
    fault = refused(made(sound, codec="adpcm_ms", format_="wav"), tmp_path, "audio")
    assert fault.why == "it is coded as adpcm_ms" and fault.allowed == "a WAV or MP3 sound"


@pytest.mark.parametrize("share", [0.001, 0.5, 0.9])
def test_a_truncated_wav_is_refused(share: float, made: Any, tmp_path: Path) -> None:
    data = made(sound, seconds=6.0)
    assert "truncated" in refused(data[: int(len(data) * share)], tmp_path, "audio").why


@pytest.mark.parametrize(("head", "said"), [(b"OggS", "Ogg"), (b"fLaC", "FLAC"), (b"\x1a\x45\xdf\xa3", "WebM")])
def test_other_containers_are_named_with_the_way_out(head: bytes, said: str, tmp_path: Path) -> None:
    fault = refused(head + bytes(64), tmp_path)
    assert said in fault.why and "send" in fault.why


def test_a_playlist_in_a_films_coat_reads_no_other_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    disguised = b"\0\0\0\x18ftypisom\0\0\0\0isomavc1" + f"\n#EXTM3U\n#EXTINF:1,\nfile://{secret}\n".encode()
    fault = refused(disguised, tmp_path, "video")
    assert "broken" in fault.why and "secret" not in str(fault)


def test_a_list_of_files_is_not_played_whoever_calls_it_a_sound(made: Any, tmp_path: Path) -> None:
    """FFmpeg, left to guess, plays what such a list names."""
    (tmp_path / "other.mp3").write_bytes(made(sound, codec="mp3", format_="mp3"))
    listed = tmp_path / "listed"
    listed.write_text("ffconcat version 1.0\nfile other.mp3\nduration 2.5\n")
    assert "playlist" in refused(listed.read_bytes(), tmp_path, "audio").why
    for format_ in ("mp3", "wav"):
        with pytest.raises(Unfit, match="broken"):
            probe_sound(listed, format_, "audio_reference", ReferenceLimits())


def test_broken_bytes_never_come_out_as_another_error(made: Any, tmp_path: Path) -> None:
    """Flipped bytes end in a recording or in a fault, never in an exception."""
    import numpy as np

    random = np.random.default_rng(11)
    for whole in (made(film), made(sound), made(sound, codec="mp3", format_="mp3")):
        head = whole.find(b"moov") if b"moov" in whole else 0
        for _ in range(25):
            data = bytearray(whole)
            for at in random.integers(head, min(len(data), head + 900), 3):
                data[at] = random.integers(256)
            loaded(bytes(data), tmp_path)
