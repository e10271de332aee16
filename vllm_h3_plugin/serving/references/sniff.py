# SPDX-License-Identifier: Apache-2.0
"""What a reference really is, from its first bytes. Names and content types are not asked."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_h3_plugin.serving.references.unfit import Unfit
from vllm_h3_plugin.serving.rules.accepted import Kind

HEAD_BYTES = 4096

PICTURES = "a JPEG, PNG or WebP picture"
FILMS = "an MP4 or MOV film (H.264 or H.265)"
SOUNDS = "a WAV or MP3 sound"
ALLOWED: dict[Kind | None, str] = {
    "image": PICTURES,
    "video": FILMS,
    "audio": SOUNDS,
    None: f"{PICTURES}, {FILMS} or {SOUNDS}",
}


@dataclass(frozen=True)
class Sniffed:
    """A format that may be taken.

    Attributes:
        format: ``jpeg``, ``png``, ``webp``, ``mp4``, ``mov``, ``wav`` or ``mp3``.
    """

    kind: Kind
    format: str


# What is recognized and cannot be taken: first bytes -> what it is and what to do.
_OTHERS: tuple[tuple[bytes, str], ...] = (
    (b"GIF8", "it is a GIF; send its first frame as PNG, or the animation as MP4"),
    (b"BM", "it is a BMP; send PNG"),
    (b"II*\0", "it is a TIFF; send PNG"),
    (b"MM\0*", "it is a TIFF; send PNG"),
    (b"II+\0", "it is a TIFF; send PNG"),
    (b"MM\0+", "it is a TIFF; send PNG"),
    (b"8BPS", "it is a Photoshop file; send PNG"),
    (b"\0\0\0\x0cJXL ", "it is a JPEG XL; send JPEG"),
    (b"\xff\x0a", "it is a JPEG XL; send JPEG"),
    (b"\0\0\0\x0cjP  ", "it is a JPEG 2000; send JPEG"),
    (b"\x1a\x45\xdf\xa3", "it is a Matroska or WebM file; send MP4"),
    (b"OggS", "it is an Ogg file; send WAV or MP3"),
    (b"fLaC", "it is a FLAC file; send WAV"),
    (b"caff", "it is a Core Audio file; send WAV"),
    (b"FORM", "it is an AIFF file; send WAV"),
    (b"%PDF", "it is a PDF"),
    (b"PK\x03\x04", "it is a ZIP archive"),
    (b"\x1f\x8b", "it is a gzip file"),
    (b"#EXTM3U", "it is a playlist"),
    (b"ffconcat", "it is a playlist"),
)
_HEIF_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})
_AVIF_BRANDS = frozenset({b"avif", b"avis"})
_SOUND_BRANDS = frozenset({b"M4A ", b"M4B ", b"M4P "})
# First boxes of MOV files from before `ftyp` was invented.
_OLD_MOV = frozenset({b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"})
# Two bytes of an MPEG audio frame of layer III: sync, version, layer.
_MP3_SYNC = frozenset({0xFB, 0xFA, 0xF3, 0xF2, 0xE3, 0xE2})


def sniff(head: bytes) -> Sniffed:
    """What a file is.

    Args:
        head: its first bytes, up to ``HEAD_BYTES``.

    Raises:
        Unfit: it is empty, or nothing that H3 takes; says what it is.
    """
    if not head:
        raise Unfit("it is empty (0 bytes)")
    if head.startswith(b"\xff\xd8\xff"):
        return Sniffed("image", "jpeg")
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return Sniffed("image", "png")
    if head[:4] in (b"RIFF", b"RF64"):
        return _riff(head)
    if head[4:8] == b"ftyp":
        return _ftyp(head)
    if head[4:8] in _OLD_MOV:
        return Sniffed("video", "mov")
    if head.startswith(b"ID3") or (head[0] == 0xFF and len(head) > 1 and head[1] in _MP3_SYNC):
        return Sniffed("audio", "mp3")
    for magic, why in _OTHERS:
        if head.startswith(magic):
            raise Unfit(why)
    raise Unfit(_unknown(head))


def _riff(head: bytes) -> Sniffed:
    if head[8:12] == b"WEBP":
        return Sniffed("image", "webp")
    if head[8:12] == b"WAVE":
        return Sniffed("audio", "wav")
    raise Unfit("it is an AVI; send MP4" if head[8:12] == b"AVI " else "it is a RIFF file of an unknown kind")


def _ftyp(head: bytes) -> Sniffed:
    size = min(int.from_bytes(head[:4], "big"), len(head))
    brands = [head[8:12], *(head[at : at + 4] for at in range(16, size - 3, 4))]
    if brands[0] in _HEIF_BRANDS:
        raise Unfit("it is a HEIC or HEIF picture, which cannot be decoded here; send JPEG")
    if brands[0] in _AVIF_BRANDS:
        raise Unfit("it is an AVIF picture; send PNG")
    if brands[0] in _SOUND_BRANDS:
        raise Unfit("it is an M4A sound; send WAV or MP3")
    return Sniffed("video", "mov" if brands[0] == b"qt  " else "mp4")


def _unknown(head: bytes) -> str:
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:64].lower()
    if text.startswith((b"<!doctype", b"<html")):
        return "it is an HTML page"
    if text.startswith((b"<svg", b"<?xml")):
        return "it is an SVG or XML file; send PNG"
    if text.startswith((b"{", b"[")):
        return "it is JSON text"
    if b"\0" not in head:
        try:
            head[:64].decode("utf-8")
            return "it is text"
        except UnicodeDecodeError:
            pass
    return f"its first bytes are {head[:8].hex(' ')}, which no known format begins with"
