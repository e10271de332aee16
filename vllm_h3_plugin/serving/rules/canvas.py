# SPDX-License-Identifier: Apache-2.0
"""Width and height of a clip: asked as a size, as a ratio, or as a picture's.

Sources, vLLM-Omni 0.30.0 (0.28.0 is equal): ``model_executor/models/minimax_h3/preprocessing.py``
(``resolve_minimax_h3_aspect_ratio``, ``resolve_minimax_h3_output_canvas``) and ``encoder_processing.py``
(``resolve_minimax_h3_shape``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from vllm_h3_plugin.serving.rules.accepted import ReferenceFacts, Task
from vllm_h3_plugin.serving.rules.findings import Findings
from vllm_h3_plugin.serving.rules.limits import Limits
from vllm_h3_plugin.serving.rules.ratios import RATIOS, ratio_name
from vllm_h3_plugin.video.geometry import SIZE_MULTIPLE, snap_size

SHORT_EDGE = 768
"""Pixels of the shorter side where no size is given; H3 has no other."""
CANVAS_PIXELS = 768 * 1344
"""Largest area of a canvas that follows from a ratio."""
FLATTEST = 4
"""Longest side over shortest, at most."""
_DERIVED = ("auto", "adaptive")
_TOLERANCE = 1e-6
_SIDES = re.compile(r"^\s*(\d{1,9})\s*[x×*:, ]\s*(\d{1,9})\s*$", re.IGNORECASE)


def canvas(ratio: float) -> tuple[int, int]:
    """(width, height) of a ratio: short edge 768, at most 1344x768 in area, each side rounded to a multiple of 32.

    Args:
        ratio: width over height.
    """
    width, height = SHORT_EDGE * max(ratio, 1.0), SHORT_EDGE * max(1 / ratio, 1.0)
    scale = min(1.0, math.sqrt(CANVAS_PIXELS / (width * height)))
    # The host's rounding: half to even, and never below one multiple.
    sides = [max(1, round(side * scale / SIZE_MULTIPLE)) * SIZE_MULTIPLE for side in (width, height)]
    return sides[0], sides[1]


def nearest_size(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """The size nearest to one that is too small, too large or too flat, sides multiples of 32.

    The ratio is brought into its range at the same area; then both sides are scaled into the area.
    """
    wide, high = float(max(width, 1)), float(max(height, 1))
    if max(wide, high) > FLATTEST * min(wide, high):
        area = wide * high
        short = math.sqrt(area / FLATTEST)
        wide, high = (FLATTEST * short, short) if wide > high else (short, FLATTEST * short)
    scale = max(1.0, SIZE_MULTIPLE / min(wide, high)) * min(1.0, math.sqrt(max_pixels / (wide * high)))
    # Lengths that are whole but for rounding stay so.
    units = [max(1, math.floor(side * scale / SIZE_MULTIPLE + 1e-9)) for side in (wide, high)]
    # Flooring the short side, or keeping it at one, may have made it too flat or too large again.
    longest = min(FLATTEST * min(units), max_pixels // SIZE_MULTIPLE**2 // min(units))
    width, height = (min(unit, longest) * SIZE_MULTIPLE for unit in units)
    return width, height


def resolve(
    task: Task | None, found: Findings, limits: Limits, references: Sequence[ReferenceFacts]
) -> tuple[int, int, str] | None:
    """(width, height, name of the ratio) that will be made; None with a fault, or where a picture is not known yet."""
    ratio = _ratio(found)
    before = len(found.faults)
    asked = _asked(found)
    if len(found.faults) > before:
        return None
    if asked is not None:
        pictures = any(reference.kind == "image" for reference in references)
        size = _checked(*asked, found, limits, limits.least_with_pictures if pictures else SIZE_MULTIPLE)
        if size is None:
            return None
        name = ratio_name(*size)
        if ratio is not None and ratio != name and task != "fl2va":
            found.snap("aspect_ratio", ratio, name, f"the size {size[0]}x{size[1]} decides")
        return *size, name
    if task == "fl2va":
        first = next((reference for reference in references if reference.kind == "image"), None)
        if first is None:
            return None
        size = canvas(first.width / first.height)
        if ratio is not None and ratio != ratio_name(*size):
            found.snap("aspect_ratio", ratio, ratio_name(*size), "without a size, the first picture's ratio decides")
        return *size, ratio_name(*size)
    name = ratio or "16:9"
    return *canvas(RATIOS[name]), name


def _ratio(found: Findings) -> str | None:
    """The ratio asked, by name; None where it is to follow from something else."""
    asked = found.ask.aspect_ratio
    if asked is None or asked in _DERIVED:
        return None
    if asked in RATIOS:
        return asked
    value = _quotient(asked)
    if value is not None:
        exact = [name for name, ratio in RATIOS.items() if math.isclose(value, ratio, rel_tol=0, abs_tol=_TOLERANCE)]
        if exact:
            return exact[0]
    nearest = ratio_name(value, 1.0) if value is not None else None
    found.fault("aspect_ratio", asked, "H3 has no such ratio", ", ".join([*RATIOS, "auto"]), nearest)
    return None


def _quotient(text: str) -> float | None:
    try:
        above, _, below = text.partition(":")
        value = float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        return None
    return value if math.isfinite(value) and value > 0 else None


def _asked(found: Findings) -> tuple[int, int, str] | None:
    """(width, height, field) asked; None if no size is, or with a fault."""
    ask = found.ask
    if ask.short_edge is not None and ask.short_edge != SHORT_EDGE:
        found.fault("short_edge", ask.short_edge, f"H3's is {SHORT_EDGE}", str(SHORT_EDGE), SHORT_EDGE)
    sides = (ask.width, ask.height)
    if ask.size is not None:
        match = _SIDES.match(ask.size)
        if match is None:
            found.fault("size", ask.size, "it is no size", "WIDTHxHEIGHT in pixels, for example 1344x768")
            return None
        width, height = int(match[1]), int(match[2])
        for name, side, other in (("width", width, ask.width), ("height", height, ask.height)):
            if other is not None and other != side:
                found.fault(name, other, f"size={ask.size} says {side}", "one of the two", side)
                return None
        return width, height, "size"
    if sides == (None, None):
        return None
    if ask.width is None or ask.height is None:
        given, missing = ("height", "width") if ask.width is None else ("width", "height")
        found.fault(missing, None, f"{given} is given without it", "both, or size", code="missing_parameter")
        return None
    return ask.width, ask.height, "width"


def _checked(
    width: int, height: int, field: str, found: Findings, limits: Limits, least: int
) -> tuple[int, int] | None:
    """The size made, of sides of ``least`` and more; None with a fault."""
    made, why = (0, 0), ""
    if min(width, height) < SIZE_MULTIPLE or min(snap_size(width, height)) < least:
        beside = "" if least == SIZE_MULTIPLE else " where pictures come with it, which this host fits to the clip"
        why = f"each side is at least {least} pixels{beside}"
    else:
        made = snap_size(width, height)
        if max(made) > FLATTEST * min(made):
            why = f"no side is longer than {FLATTEST} times the other"
        elif made[0] * made[1] > limits.max_pixels:
            why = f"it has more than {limits.max_pixels} pixels"
    if why:
        allowed = (
            f"sides of {least} and more, in multiples of {SIZE_MULTIPLE}, "
            f"from 1:{FLATTEST} to {FLATTEST}:1, of at most {limits.max_pixels} pixels"
        )
        larger = max(1.0, least / max(1, min(width, height)))
        near = nearest_size(math.ceil(width * larger), math.ceil(height * larger), limits.max_pixels)
        for name, asked, nearest in _by_field(field, (width, height), near):
            found.fault(name, asked, why, allowed, nearest)
        return None
    for name, asked, side in _by_field(field, (width, height), made):
        found.snap(name, asked, side, f"sides are multiples of {SIZE_MULTIPLE}")
    return made


def _by_field(field: str, asked: tuple[int, int], made: tuple[int, int]) -> Iterator[tuple[str, int | str, int | str]]:
    """What differs, in the terms in which it was asked: field, value asked, value made."""
    if field == "size":
        pairs: list[tuple[str, int | str, int | str]] = [("size", "{}x{}".format(*asked), "{}x{}".format(*made))]
    else:
        pairs = [("width", asked[0], made[0]), ("height", asked[1], made[1])]
    return (pair for pair in pairs if pair[1] != pair[2])
