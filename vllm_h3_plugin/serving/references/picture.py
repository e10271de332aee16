# SPDX-License-Identifier: Apache-2.0
"""A picture file into an upright RGB picture, or the reason why not. Sizes are read before anything is decoded."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_h3_plugin.serving.references.limits import ReferenceLimits
from vllm_h3_plugin.serving.references.unfit import Unfit

if TYPE_CHECKING:
    from PIL.Image import Image

_BACKGROUND = (255, 255, 255)
_SIXTEEN_BIT = frozenset({"I;16", "I;16B", "I;16L", "I;16N", "I"})
_EXIF_ORIENTATION = 0x0112


def load_picture(path: Path, format_: str, limits: ReferenceLimits) -> tuple[Image, tuple[str, ...]]:
    """The picture, and what was done to it.

    Args:
        path: the file.
        format_: as sniffed: ``jpeg``, ``png`` or ``webp``. No other decoder is tried.
        limits: ranges; the size in the file's header is held against them before pixels are decoded.

    Raises:
        Unfit: out of range, animated, truncated or broken.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path, formats=(format_.upper(),)) as image:
            _check_size(*image.size, limits)
            frames = int(getattr(image, "n_frames", 1))
            # A phone's JPEG may carry a second picture, such as a depth map; it is no animation.
            if frames > 1 and format_ != "jpeg":
                raise Unfit(f"it is animated, with {frames} frames; send one of them as PNG, or a film as MP4")
            image.load()
            return _plain(image)
    except Image.DecompressionBombError as exc:
        raise Unfit("it has more pixels than may be decoded", _sides(limits)) from exc
    except UnidentifiedImageError as exc:
        raise Unfit(f"it begins like {format_.upper()}, and its header is broken or cut off") from exc
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, IndexError, MemoryError, KeyError) as exc:
        # Pillow has no one error for a file that is broken or ends early.
        raise Unfit(f"it is truncated or broken: {_first_line(exc)}") from exc


def _check_size(width: int, height: int, limits: ReferenceLimits) -> None:
    fault = limits.size_fault(width, height)
    if fault is not None:
        raise Unfit(*fault)


def _sides(limits: ReferenceLimits) -> str:
    return f"sides of {limits.shortest_side} to {limits.longest_side} pixels"


def _plain(image: Image) -> tuple[Image, tuple[str, ...]]:
    """Upright, opaque, 8-bit RGB."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    notes = []
    turned = image.getexif().get(_EXIF_ORIENTATION, 1)
    upright = ImageOps.exif_transpose(image)
    if turned in range(2, 9):
        notes.append(f"turned upright (EXIF orientation {turned})")
    mode = upright.mode
    if mode in _SIXTEEN_BIT:
        upright = _eight_bit(upright)
        notes.append("16 bits a pixel reduced to 8")
    elif mode in ("CMYK", "YCCK"):
        notes.append("CMYK converted to RGB")
    elif mode in ("L", "LA", "1"):
        notes.append("grey converted to RGB")
    elif mode in ("P", "PA"):
        notes.append("palette converted to RGB")
    if upright.has_transparency_data:
        rgba = upright.convert("RGBA")
        if rgba.getchannel("A").histogram()[255] < rgba.width * rgba.height:
            notes.append("transparency laid over white")
            paper = Pillow.new("RGBA", rgba.size, (*_BACKGROUND, 255))
            return Pillow.alpha_composite(paper, rgba).convert("RGB"), tuple(notes)
        upright = rgba
    plain = upright.convert("RGB")
    plain.info.clear()
    return plain, tuple(notes)


def _eight_bit(image: Image) -> Image:
    """The upper bits of a 16-bit grey picture; Pillow's own conversion clips everything above 255 to white."""
    import numpy as np
    from PIL import Image as Pillow

    values = np.asarray(image).astype(np.int64).clip(0, 65535)
    return Pillow.fromarray(((values + 128) // 257).astype(np.uint8))


def _first_line(exc: BaseException) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0][:120]
