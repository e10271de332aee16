# SPDX-License-Identifier: Apache-2.0
"""Picture references: what they really are, how large, and what is made of odd ones."""

from __future__ import annotations

import io
import resource
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.unit.serving.reference_kit import encoded, loaded, picture, png_header, refused, taken
from vllm_h3_plugin.serving.references.limits import ReferenceLimits
from vllm_h3_plugin.serving.references.load import ReferencePolicy
from vllm_h3_plugin.serving.references.media import Loaded
from vllm_h3_plugin.serving.references.sniff import ALLOWED

RED, BLUE, GREEN, WHITE = (255, 0, 0), (0, 0, 255), (0, 255, 0), (255, 255, 255)


def _pixels(found: Loaded) -> np.ndarray:
    assert found.image is not None and found.image.mode == "RGB"
    return np.asarray(found.image)


def test_a_png_keeps_every_pixel_and_tells_what_it_is(tmp_path: Path) -> None:
    data = encoded(picture())
    found = taken(data, tmp_path)
    assert np.array_equal(_pixels(found), np.asarray(picture()))
    facts = found.facts
    assert (facts.kind, facts.format, facts.width, facts.height, facts.nbytes) == ("image", "png", 320, 256, len(data))
    assert facts.notes == ()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("format_", "name"), [("JPEG", "jpeg"), ("WEBP", "webp")])
def test_other_picture_formats_are_told_by_their_bytes_whatever_the_name_says(
    format_: str, name: str, tmp_path: Path
) -> None:
    found = taken(encoded(picture(), format_), tmp_path)
    assert found.facts.format == name
    assert np.abs(_pixels(found)[20, 200].astype(int) - RED).max() < 40


def test_a_lossless_webp_is_measured_by_its_header(tmp_path: Path) -> None:
    assert np.array_equal(_pixels(taken(encoded(picture(), "WEBP", lossless=True), tmp_path)), np.asarray(picture()))


@pytest.mark.parametrize("orientation", range(2, 9))
def test_exif_orientation_is_applied(orientation: int, tmp_path: Path) -> None:
    """A picture that was turned for the file, and says so, comes out as it was."""
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = taken(encoded(picture().transpose(undo), "PNG", exif=exif), tmp_path)
    assert np.array_equal(_pixels(found), np.asarray(picture()))
    assert (found.facts.width, found.facts.height) == (320, 256)
    assert f"EXIF orientation {orientation}" in found.facts.notes[0]


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    found = taken(encoded(picture().convert("CMYK"), "JPEG", quality=95), tmp_path)
    assert np.abs(_pixels(found)[20, 200].astype(int) - RED).max() < 40
    assert found.facts.notes == ("CMYK converted to RGB",)


def test_sixteen_bit_grey_keeps_its_shades(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 256 * 256).reshape(256, 256).astype(np.uint16)
    found = taken(encoded(Image.fromarray(ramp)), tmp_path)
    assert np.abs(_pixels(found)[..., 0].astype(float) - ramp / 257).max() <= 0.51
    assert "16 bits" in found.facts.notes[0]


def test_palette_and_grey_become_rgb(tmp_path: Path) -> None:
    flat = picture().quantize(8)
    assert tuple(_pixels(taken(encoded(flat), tmp_path))[20, 200]) == RED
    assert tuple(_pixels(taken(encoded(picture().convert("L")), tmp_path))[20, 200]) == (76, 76, 76)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white_and_not_what_lies_hidden_in_it(mode: str, tmp_path: Path) -> None:
    image = picture().convert("RGBA")
    image.putalpha(Image.fromarray(np.repeat(np.array([[0], [255]], np.uint8), 128, 0).repeat(320, 1)))
    if mode == "P":
        flat = picture().quantize(4)
        hidden = flat.getpixel((200, 20))
        data = encoded(flat, transparency=hidden)
    else:
        data = encoded(image.convert(mode))
    found = taken(data, tmp_path)
    assert tuple(_pixels(found)[20, 200]) == WHITE
    assert "transparency laid over white" in found.facts.notes


def test_an_opaque_alpha_channel_changes_nothing(tmp_path: Path) -> None:
    found = taken(encoded(picture().convert("RGBA")), tmp_path)
    assert np.array_equal(_pixels(found), np.asarray(picture())) and found.facts.notes == ()


@pytest.mark.parametrize("format_", ["PNG", "WEBP"])
def test_an_animation_is_refused_with_the_way_out(format_: str, tmp_path: Path) -> None:
    other = picture().transpose(Image.Transpose.ROTATE_180)
    fault = refused(encoded(picture(), format_, save_all=True, append_images=[other, picture()]), tmp_path)
    assert "animated, with 3 frames" in fault.why and "PNG" in fault.why


def test_a_jpeg_with_a_second_picture_in_it_is_no_animation(tmp_path: Path) -> None:
    found = taken(encoded(picture(), "MPO", save_all=True, append_images=[picture()]), tmp_path)
    assert (found.facts.format, found.facts.width) == ("jpeg", 320)


@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.95])
def test_a_truncated_picture_is_refused(format_: str, share: float, tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (256, 256, 3), np.uint8))
    data = encoded(noise, format_)
    fault = refused(data[: int(len(data) * share)], tmp_path)
    assert "truncated" in fault.why or "cut off" in fault.why


def test_an_empty_file_is_named_so(tmp_path: Path) -> None:
    assert refused(b"", tmp_path).why == "it is empty (0 bytes)"


@pytest.mark.parametrize("size", [(1, 1), (255, 256), (5761, 4000), (1, 100_000)])
def test_sizes_out_of_range_are_refused_with_the_range(size: tuple[int, int], tmp_path: Path) -> None:
    fault = refused(encoded(Image.new("RGB", size)), tmp_path)
    assert f"{size[0]}x{size[1]}" in fault.why
    assert fault.allowed == "sides of 256 to 5760 pixels"


def test_a_flat_picture_is_refused_with_the_range(tmp_path: Path) -> None:
    assert refused(encoded(Image.new("RGB", (2000, 700))), tmp_path).allowed == "width over height from 0.4 to 2.5"


# Pictures of one colour in 34 bytes: 16383x16383, and 13000x13000, which Pillow by itself would decode into 507 MB.
WEBP_BOMBS = [
    bytes.fromhex(f"524946461a000000574542505650384c0e0000002f{size}071011fd0f4444ff03")
    for size in ("febfff0f", "c7f2b10c")
]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    "bomb",
    [png_header(50_000, 50_000), png_header(2**31 - 1, 2**31 - 1), png_header(8_000, 8_000), *WEBP_BOMBS],
    ids=["png", "largest", "below-pillows-limit", "webp", "webp-below-pillows-limit"],
)
def test_a_decompression_bomb_is_refused_by_its_header(bomb: bytes, tmp_path: Path) -> None:
    started = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fault = refused(bomb, tmp_path)
    assert "pixels" in fault.why and fault.allowed.startswith("sides of 256 to 5760")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB"
    assert time.monotonic() - started < 2


def test_a_compressed_text_chunk_is_no_way_to_fill_the_memory(tmp_path: Path) -> None:
    from PIL import PngImagePlugin

    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", "x" * (80 << 20), zip=True)
    data = encoded(picture(), pnginfo=info)
    assert len(data) < 1 << 20
    tracemalloc.start()
    loaded(data, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 << 20


def test_more_bytes_than_a_picture_may_have_are_refused(tmp_path: Path) -> None:
    policy = ReferencePolicy(
        ReferenceLimits(nbytes={"image": 1 << 20, "video": 2 << 20, "audio": 1 << 20}), folder=tmp_path
    )
    data = encoded(picture())
    fault = refused(data + bytes((3 << 20) // 2), tmp_path, policy=policy)
    assert fault.why == "it has 1.5 MiB" and fault.allowed == "up to 1 MiB"
    assert refused(data + bytes(3 << 20), tmp_path, policy=policy).allowed == "up to 2 MiB"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (encoded(picture(), "GIF"), "GIF"),
        (encoded(picture(), "BMP"), "BMP"),
        (encoded(picture(), "TIFF"), "TIFF"),
        (encoded(picture(), "AVIF"), "AVIF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64), "HEIC"),
        (b"<!DOCTYPE html><title>404</title>", "HTML"),
        (b'<?xml version="1.0"?><svg/>', "SVG"),
        (b'{"error": {"message": "no"}}', "JSON"),
        (b"hello", "text"),
        (b"#EXTM3U\n#EXTINF:1\nfile:///etc/passwd\n", "playlist"),
        (b"%!PS-Adobe\n", "text"),
        (bytes(64), "00 00"),
    ],
)
def test_what_is_no_picture_that_h3_takes_is_named_for_what_it_is(data: bytes, said: str, tmp_path: Path) -> None:
    fault = refused(data, tmp_path, "image")
    assert said in fault.why
    assert fault.allowed == ALLOWED["image"]


def test_a_film_in_a_pictures_field_is_named(tmp_path: Path) -> None:
    fault = refused(b"\0\0\0\x18ftypisom\0\0\0\0isomavc1" + bytes(64), tmp_path, "image")
    assert fault.why == "it is an MP4 film" and "JPEG" in fault.allowed


def test_broken_bytes_never_come_out_as_another_error(tmp_path: Path) -> None:
    """Headers with flipped bytes end in a picture or in a fault, never in an exception."""
    random = np.random.default_rng(7)
    for format_ in ("PNG", "JPEG", "WEBP"):
        whole = encoded(picture(), format_)
        for _ in range(60):
            data = bytearray(whole)
            for at in random.integers(0, min(len(data), 600), 4):
                data[at] = random.integers(256)
            loaded(bytes(data), tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_upload_is_read_from_its_beginning(tmp_path: Path) -> None:
    from vllm_h3_plugin.serving.references.load import load
    from vllm_h3_plugin.serving.rules.ask import Reference

    file = io.BytesIO(encoded(picture()))
    file.read()
    media, faults = load([Reference("input_reference", None, file)], ReferencePolicy(folder=tmp_path))
    assert len(media.images) == 1 and not faults
